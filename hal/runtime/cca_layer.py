"""ZAYA's compressed convolutional attention: the two convolutions and the delayed hidden state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from hal.errors import StepOrderError
from hal.runtime.batch import Mode

if TYPE_CHECKING:
    from torch import Tensor

    from hal.interfaces import ConvState
    from hal.model.spec import CcaDims
    from hal.runtime.layers import Current
    from hal.runtime.params import CcaParams
    from hal.runtime.step import Step


@dataclass(slots=True)
class CcaLayer:
    """A CCA layer, bound; composed of torch over the sidecar's two tensors, without a host sync.

    Called with r act `[T, C]`, raw q beside raw k, and h act `[T, hidden]`; the results are the
    convolved `[T, C]` and the hidden state before each token `[T, hidden]`, zeros before the first.
    Both convolutions run over the whole window, so the second one sees the first one's bias where
    the sequence has not begun.
    """

    current: Current
    layer_id: int
    dims: CcaDims
    params: CcaParams
    sidecar: ConvState
    layout: str
    grouped: Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Lay the grouped weight out by group, `[G, t1 * D, D]` in float32."""
        dims, weight = self.dims, self.params.grouped_weight.float()
        by_group = weight.view(-1, dims.D, dims.D, dims.time1)
        self.grouped = by_group.permute(0, 3, 2, 1).reshape(-1, dims.time1 * dims.D, dims.D)

    def __call__(self, r: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve, delay, and move both states on."""
        step = self.current.get()
        if step.mode is Mode.VERIFY:
            raise StepOrderError("a CCA layer has no verify; select refuses speculation for it")
        if not r.shape[0] or not step.rows:
            return torch.zeros_like(r), torch.zeros_like(h)
        held = self.sidecar.step(self.layer_id)
        window, hidden = held.tensors
        window = window.transpose(1, 2) if self.layout == "CW" else window
        taps = _windows(r, window, step)
        before = _windows(h, hidden.unsqueeze(1), step)[:, 0]
        token, slot = _kept(step)
        window[slot] = taps[token, 1:].to(window.dtype)
        hidden[slot] = h[token].to(hidden.dtype)
        return step.clear_pads(self._convolve(taps)), step.clear_pads(before)

    def commit(self, step: Step, last: Tensor) -> None:
        """Refuse: no verify step of this layer can have come before."""
        raise StepOrderError("a CCA layer has no verify; select refuses speculation for it")

    def _convolve(self, taps: Tensor) -> Tensor:
        """Both convolutions of windows `[T, carry + 1, C]` in float32, rounded once to `[T, C]`."""
        dims, params = self.dims, self.params
        parts = taps.float().unfold(1, dims.time0, 1)
        first = (parts * params.depthwise_weight.float()).sum(-1)
        if params.depthwise_bias is not None:
            first = first + params.depthwise_bias.float()
        by_group = first.view(*first.shape[:2], -1, dims.D).permute(2, 0, 1, 3).flatten(2)
        second = torch.bmm(by_group, self.grouped).transpose(0, 1).flatten(1)
        if params.grouped_bias is not None:
            second = second + params.grouped_bias.float()
        return second.to(taps.dtype)


def _kept(step: Step) -> tuple[Tensor, Tensor]:
    """Tokens behind which the states are kept, and their slots; slot 0 takes what has none."""
    token, slot = step.query_start_loc[1:] - 1, step.dst
    if step.track is not None:
        row, count, tracked = step.track.unbind(1)
        token = torch.cat((token, step.query_start_loc[row] + count - 1))
        slot = torch.cat((slot, tracked))
    return token.clamp(min=0).long(), slot.clamp(min=0).long()


def _windows(x: Tensor, state: Tensor, step: Step) -> Tensor:
    """Each token of x `[T, C]` behind the `n` that came before it in its row: `[T, n + 1, C]`.

    state `[S, n, C]` holds those before the row's first; they are zeros where src is none. What
    it leaves in slot 0 is never read.
    """
    rows, carry = step.rows, state.shape[1]
    held = state[step.src.clamp(min=0).long()].to(x.dtype)
    held = torch.where((step.src < 0).view(-1, 1, 1), 0, held)
    token = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
    row = torch.searchsorted(step.query_start_loc, token, right=True).sub(1).clamp(max=rows - 1)
    back = torch.arange(carry, -1, -1, device=x.device)
    place = (token - step.query_start_loc[row]).unsqueeze(1) - back
    here = rows * carry + token.unsqueeze(1) - back
    there = row.unsqueeze(1) * carry + carry + place
    return torch.cat((held.flatten(0, 1), x))[torch.where(place >= 0, here, there)]
