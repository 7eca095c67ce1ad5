"""The convolution in front of a linear layer, bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.compiler import is_compiling

from hal.runtime.batch import Mode
from hal.runtime.seam import Draft, check_act, check_once, failed, filling, result, verifier

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hal.interfaces import Conv
    from hal.runtime.operators import OperatorConv
    from hal.runtime.step import Step


@dataclass(slots=True)
class BoundConv:
    """The convolution of one layer: weights, state and the providers' operations.

    `verify` and `draft` are there where the selection is speculative.
    """

    prefill: Conv
    decode: Conv
    weight: Tensor
    bias: Tensor | None
    state: Tensor
    activation: str | None
    dtype: torch.dtype
    verify: Conv | None = None
    draft: Draft | None = None
    compiled: OperatorConv | None = None
    ran: Step | None = None

    def check_verified(self, step: Step) -> None:
        """Refuse a commit of a step whose tokens are not in the scratch."""
        verifier(self.verify, self.draft)[1].take(step, "a conv")

    def commit(self, step: Step, last: Tensor, dst: Tensor | None = None) -> None:
        """Leave the window after each row's accepted path in its `dst`, by default the step's."""
        rule, draft = verifier(self.verify, self.draft)
        scratch = draft.take(step, "a conv")
        bounds, target = step.query_start_loc, step.dst if dst is None else dst
        commit = step.opaque(rule.commit)
        commit(self.state, scratch, step.src, target, step.start, bounds, last)

    def _verify(self, x: Tensor, step: Step) -> Tensor:
        rule, draft = verifier(self.verify, self.draft)
        with filling(step, (draft,), "conv.verify", x, self.weight, self.state):
            out = step.opaque(rule.verify)(
                x,
                self.weight,
                self.bias,
                self.state,
                step.src,
                step.start,
                step.query_start_loc,
                step.max_len,
                draft.scratch,
                parents=step.parents,
                activation=self.activation,
            )
            return result("conv.verify", out, x.shape, x.dtype)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """Convolve the step's packed tokens, act `[T, C]`."""
        check_act("the conv's input", x, self.dtype, step)
        if step.mode is Mode.VERIFY:
            return self._verify(x, step)
        check_once(self.ran, step, "the conv")
        try:
            out = self._run(x, step)
        except RuntimeError as error:
            raise failed("conv", error, x, self.weight, self.state) from error
        self.ran = step
        return result("conv", out, x.shape, x.dtype)

    def _run(self, x: Tensor, step: Step) -> Tensor:
        compiled, state = self.compiled if is_compiling() else None, self.state
        weight, bias, act = self.weight, self.bias, self.activation
        if step.mode is Mode.DECODE:
            decode = step.opaque((compiled or self.decode).decode)
            out = decode(x, weight, bias, state, step.src, step.dst, step.start, activation=act)
            if step.copies is not None:
                step.track_decode(state)
            return out
        rows = (step.src, step.dst, step.start, step.query_start_loc, step.max_len)
        serve = (compiled or self.prefill).prefill
        return serve(x, weight, bias, state, *rows, activation=act, track=step.track)
