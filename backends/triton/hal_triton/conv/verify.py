"""Plans and launches of the convolution's verify and commit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from hal.runtime.checks import check_conv, check_rows
from hal.runtime.verify_checks import check_scratch
from hal_triton.conv.kernels.verify import conv_commit, conv_verify
from hal_triton.conv.runner import window_strides
from hal_triton.launch import Launch, Plans, dense, dense_or_none, rows_are_dense, signature
from hal_triton.tuning import Tuning
from hal_triton.tuning import block as pow2

SCRATCH_TENSORS: Final = 2
"""Inputs and parents."""


@dataclass(frozen=True, slots=True, eq=False)
class ConvDraft:
    """The arguments of one verify."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    state: Tensor
    src: Tensor
    start: Tensor
    query_start_loc: Tensor
    max_len: int
    scratch: Sequence[Tensor]
    parents: Tensor | None
    activation: str | None
    out: Tensor | None

    def indices(self) -> tuple[Tensor | None, ...]:
        """The index tensors."""
        return self.src, self.start, self.query_start_loc, self.parents

    def signature(self) -> tuple[object, ...]:
        """What decides the plan of this call."""
        held = (self.x, self.weight, self.bias, self.state, self.out)
        return self.activation, signature(*held, *self.indices(), *self.scratch)

    def is_tidy(self) -> bool:
        """Whether kernels can take the tensors as they are: dense rows, dense indices."""
        return rows_are_dense(self.x, self.bias, self.out) and all(
            t is None or t.is_contiguous() for t in self.indices()
        )

    def tidied(self) -> "ConvDraft":
        """The same call on dense copies, without `out`."""
        return replace(
            self,
            x=dense(self.x),
            bias=dense_or_none(self.bias),
            src=dense(self.src),
            start=dense(self.start),
            query_start_loc=dense(self.query_start_loc),
            parents=dense_or_none(self.parents),
            out=None,
        )

    def check(self, layout: str) -> None:
        """Refuse what does not fit, before anything is written."""
        name, (tokens, channels) = "conv.verify", self.x.shape
        check_conv(
            name, self.x, self.weight, self.bias, self.state, layout, self.activation, self.out
        )
        others = (("start", self.start),)
        check_rows(name, tokens, self.src, others, self.query_start_loc, parents=self.parents)
        check_scratch(
            name, self.scratch, SCRATCH_TENSORS, min(tokens, self.src.shape[0] * self.max_len)
        )
        _check_kept(name, self.scratch, channels)


@dataclass(frozen=True, slots=True, eq=False)
class ConvCommit:
    """The arguments of one commit."""

    state: Tensor
    scratch: Sequence[Tensor]
    src: Tensor
    dst: Tensor
    start: Tensor
    query_start_loc: Tensor
    last: Tensor

    def indices(self) -> tuple[Tensor, ...]:
        """The index tensors."""
        return self.src, self.dst, self.start, self.query_start_loc, self.last

    def check(self, layout: str) -> None:
        """Refuse what does not fit, before anything is written."""
        name = "conv.commit"
        others = (("dst", self.dst), ("start", self.start), ("last", self.last))
        check_rows(name, 0, self.src, others, self.query_start_loc)
        check_scratch(name, self.scratch, SCRATCH_TENSORS)
        if self.state.ndim != 3:
            raise ValueError(f"{name}: state is {list(self.state.shape)}, expected 3 dimensions")
        _check_kept(name, self.scratch, self.state.shape[1 if layout == "CW" else 2])


def _check_kept(operation: str, scratch: Sequence[Tensor], channels: int) -> None:
    """Refuse scratch that was not made for these channels, or is not dense."""
    for name, tensor, shape, dtype in (
        ("inputs", scratch[0], (channels,), torch.float32),
        ("parents", scratch[1], (), torch.int32),
    ):
        fits = tuple(tensor.shape[1:]) == shape and tensor.dtype == dtype
        if not fits or not tensor.is_contiguous():
            raise ValueError(
                f"{operation}: {name} of scratch is {list(tensor.shape)} {tensor.dtype}, expected "
                f"dense {['tokens', *shape]} {dtype}"
            )


class ConvDrafts:
    """Runs verify and commit calls on one state layout; a signature is planned once."""

    def __init__(self, tuning: Tuning, layout: str) -> None:
        self._tuning, self._layout = tuning, layout
        self._plans: Plans[Launch] = Plans()

    def verify(self, call: ConvDraft) -> Tensor:
        """Draft tokens, act `[T, C]`."""
        key = call.signature()
        launch = self._plans.get(key)
        if launch is None:
            call.check(self._layout)
            if not call.is_tidy():
                result = self.verify(call.tidied())
                return result if call.out is None else call.out.copy_(result)
            launch = self._plans.put(key, self._plan_verify(call))
        x, weight, (kept, links) = call.x, call.weight, call.scratch
        out = x.new_empty(x.shape) if call.out is None else call.out
        bias = weight if call.bias is None else call.bias
        parents = call.src if call.parents is None else call.parents
        launch(x, weight, bias, call.state, call.src, call.start, call.query_start_loc, parents,
               kept, links, out)  # fmt: skip
        return out

    def commit(self, call: ConvCommit) -> None:
        """Leave the windows of the accepted paths."""
        key = signature(call.state, *call.scratch, *call.indices())
        launch = self._plans.get(key)
        if launch is None:
            call.check(self._layout)
            if not all(t.is_contiguous() for t in call.indices()):
                src, dst, start, bounds, last = map(dense, call.indices())
                return self.commit(
                    ConvCommit(call.state, call.scratch, src, dst, start, bounds, last)
                )
            launch = self._plans.put(key, self._plan_commit(call))
        launch(*call.scratch, call.state, *call.indices())
        return None

    def _plan_verify(self, call: ConvDraft) -> Launch:
        (tokens, channels), rows = call.x.shape, call.src.shape[0]
        config = self._tuning.pick("conv.verify", tokens * channels)
        BT, BC = config.blocks["BT"], _channel_block(config.blocks["BC"], channels)
        tiles = tokens // BT + rows + 1 if tokens else 0
        out_t = channels if call.out is None else call.out.stride(0)
        numbers = (
            *(rows, tokens, channels, call.x.stride(0), *call.weight.stride()),
            *(*window_strides(call.state, self._layout), out_t),
        )
        rough = call.x.dtype == torch.bfloat16
        constants = {
            **{"W": call.weight.shape[1], "BT": BT, "BC": BC, "EVEN": channels % BC == 0},
            **{"RING": self._layout == "ring", "HAS_BIAS": call.bias is not None},
            **{"TREE": call.parents is not None, "ACTIVATE": call.activation is not None},
            "SILU": self._tuning.fast_silu if rough else self._tuning.silu,
        }
        programs = tiles * -(-channels // BC)
        return Launch(conv_verify, programs, numbers, constants, config.options, call.x.device)

    def _plan_commit(self, call: ConvCommit) -> Launch:
        channels, rows = call.scratch[0].shape[1], call.src.shape[0]
        config = self._tuning.pick("conv.commit", rows * channels)
        BC = _channel_block(config.blocks["BC"], channels)
        ring = self._layout == "ring"
        held = call.state.shape[2 if self._layout == "CW" else 1]
        numbers = (channels, *window_strides(call.state, self._layout))
        constants = {
            **{"W": held if ring else held + 1, "BC": BC, "EVEN": channels % BC == 0},
            "RING": ring,
        }
        programs = rows * -(-channels // BC)
        return Launch(conv_commit, programs, numbers, constants, config.options, call.state.device)


def _channel_block(most: int, channels: int) -> int:
    """Channels a program; masked elements are read one by one, so a smaller block may fit."""
    block = min(most, pow2(channels, 32))
    return max(32, block // 2) if channels % block else block
