"""ZAYA's compressed convolutional attention, composed from a provider's convolution and torch.

Raw q and k rows pass a depthwise and then a grouped convolution with one carry of both. A token of
the grouped stage reads the depthwise outputs of the `t1 - 1` tokens before it, which need raw rows
as far back as the whole carry. So the depthwise stage runs once for each of the grouped taps, over
the whole window, with its taps shifted: rows, fresh starts, trees, pads and the window's writes are
the convolution's, and a fresh row's earlier outputs are the stage's bias. The hidden state before
is a convolution of two taps, of which the older one counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import torch
from torch.nn.functional import pad

from hal.runtime.seam import result

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from hal.interfaces import Conv

    Run = Callable[[Tensor, Tensor, Tensor | None, Tensor, bool], Tensor]
    """Convolves x with weight and bias on a state; True where the call may leave a window."""

LAYOUTS: Final = ("CW", "WC")
"""Layouts of the window that the composition reads and writes."""


@dataclass(frozen=True, slots=True, eq=False)
class CcaWeights:
    """Both stages laid out once, at bind.

    `shifted` holds the depthwise weight `[C, W]` for each grouped tap, W = t0 + t1 - 1, the newest
    last; `mix` is the grouped weight `[t1, groups, D, D]` (input, output), float32; `delay` is
    `[hidden, 2]`, the weight that picks the token before.
    """

    shifted: tuple[Tensor, ...]
    depthwise_bias: Tensor | None
    mix: Tensor
    grouped_bias: Tensor | None
    delay: Tensor

    @classmethod
    def of(
        cls,
        depthwise: Tensor,
        depthwise_bias: Tensor | None,
        grouped: Tensor,
        grouped_bias: Tensor | None,
        hidden: int,
    ) -> Self:
        """Lay out depthwise `[C, t0]` and grouped `[C, D, t1]`; biases are `[C]` or None."""
        (channels, _), (outputs, inner, width) = depthwise.shape, grouped.shape
        if channels != outputs or channels % inner:
            raise ValueError(
                f"cca: depthwise has {channels} channels, "
                f"grouped has {outputs} in groups of {inner}"
            )
        depthwise, grouped = depthwise.detach(), grouped.detach()
        shifted = tuple(pad(depthwise, (tap, width - 1 - tap)) for tap in range(width))
        mix = grouped.float().view(-1, inner, inner, width).permute(3, 0, 2, 1).contiguous()
        bias = None if grouped_bias is None else grouped_bias.detach().float()
        delay = depthwise.new_tensor((1.0, 0.0)).repeat(hidden, 1)
        return cls(shifted, depthwise_bias, mix, bias, delay)


@dataclass(frozen=True, slots=True, eq=False)
class Cca:
    """A CCA layer's convolutions and its delay, on the layer's window and hidden tensors.

    r is `[T, C]`, raw q then raw k; h `[T, hidden]`. Every call gives q and k convolved, act
    `[T, C]`, and the hidden state of the token before, act `[T, hidden]` (zeros before the first).
    `layout` is the window's; `hidden` `[S, hidden]` is the previous hidden state. Rows, slots and
    tracking are as of `Conv`.
    """

    conv: Conv
    weights: CcaWeights
    window: Tensor
    hidden: Tensor
    layout: str = "CW"

    def __post_init__(self) -> None:
        """Refuse a ring: the hidden state has one row, and a ring of one input takes two."""
        if self.layout not in LAYOUTS:
            raise ValueError(
                f"cca: the window's layout is {self.layout!r}, expected {' or '.join(LAYOUTS)}"
            )

    def prefill(
        self,
        r: Tensor,
        h: Tensor,
        src: Tensor,
        dst: Tensor,
        start: Tensor,
        query_start_loc: Tensor,
        max_len: int,
        *,
        track: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run any mixture of rows."""
        none = torch.full_like(dst, -1)

        def run(
            x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, last: bool
        ) -> Tensor:
            target, points = (dst, track) if last else (none, None)
            index = (src, target, start, query_start_loc, max_len)
            return self.conv.prefill(x, weight, bias, state, *index, track=points)

        return self._compose(run, r, h, _pads(r.shape[0], query_start_loc))

    def decode(
        self, r: Tensor, h: Tensor, src: Tensor, dst: Tensor, start: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run one token a row; a row with neither slot is padding.

        The stages before the last leave no window, and `Conv.decode` takes a fresh row that leaves
        none for padding. Their newest tap is zero, so that such a row's output is the bias.
        """
        none, fresh = torch.full_like(dst, -1), (src < 0).unsqueeze(1)

        def run(
            x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, last: bool
        ) -> Tensor:
            y = self.conv.decode(x, weight, bias, state, src, dst if last else none, start)
            y = result("conv", y, x.shape, x.dtype)
            if last:
                return y
            return torch.where(fresh, 0 if bias is None else bias.to(y.dtype), y)

        return self._compose(run, r, h, (src < 0) & (dst < 0))

    def verify(
        self,
        r: Tensor,
        h: Tensor,
        src: Tensor,
        start: Tensor,
        query_start_loc: Tensor,
        max_len: int,
        scratch: tuple[Sequence[Tensor], Sequence[Tensor]],
        *,
        parents: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run draft tokens along their parents; `scratch` is that of the window and of the hidden.

        Every stage leaves the same raw inputs in the window's scratch.
        """

        def run(
            x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, last: bool
        ) -> Tensor:
            index = (src, start, query_start_loc, max_len)
            kept = scratch[0] if state is self.window else scratch[1]
            return self.conv.verify(x, weight, bias, state, *index, kept, parents=parents)

        return self._compose(run, r, h, _pads(r.shape[0], query_start_loc))

    def commit(
        self,
        scratch: tuple[Sequence[Tensor], Sequence[Tensor]],
        src: Tensor,
        dst: Tensor,
        start: Tensor,
        query_start_loc: Tensor,
        last: Tensor,
    ) -> None:
        """Write both states after the path to row-relative token `last` (-1: write nothing)."""
        index = (src, dst, start, query_start_loc, last)
        self.conv.commit(self.window, scratch[0], *index)
        self.conv.commit(self.hidden_window(), scratch[1], *index)

    def hidden_window(self) -> Tensor:
        """The previous hidden state as a window of one input."""
        return self.hidden.unsqueeze(-1 if self.layout == "CW" else 1)

    def _compose(self, run: Run, r: Tensor, h: Tensor, pads: Tensor) -> tuple[Tensor, Tensor]:
        weights, final = self.weights, len(self.weights.shifted) - 1
        mixed = None
        for tap, shifted in enumerate(weights.shifted):
            y = run(r, shifted, weights.depthwise_bias, self.window, tap == final)
            part = _by_group(result("conv", y, r.shape, r.dtype), weights.mix[tap])
            mixed = part if mixed is None else mixed.add_(part)
        if mixed is None:
            raise ValueError("cca: the grouped stage has no taps")
        if weights.grouped_bias is not None:
            mixed = mixed.add_(weights.grouped_bias)
        delayed = run(h, weights.delay, None, self.hidden_window(), True)
        return _clear(mixed.to(r.dtype), pads), result("conv", delayed, h.shape, h.dtype)


def _by_group(y: Tensor, mix: Tensor) -> Tensor:
    """One tap of the grouped stage in float32: y `[T, C]`, mix `[groups, D, D]`."""
    groups, inner, _ = mix.shape
    rows = y.float().view(-1, groups, inner).transpose(0, 1)
    return torch.bmm(rows, mix).transpose(0, 1).reshape(y.shape)


def _pads(tokens: int, query_start_loc: Tensor) -> Tensor:
    """bool `[T]`: the tokens behind the last row, found without reading the device."""
    return torch.arange(tokens, device=query_start_loc.device) >= query_start_loc[-1]


def _clear(tensor: Tensor, pads: Tensor) -> Tensor:
    """Zero the pads in place; the grouped stage's bias is on them."""
    return tensor.masked_fill_(pads.unsqueeze(1), 0)
