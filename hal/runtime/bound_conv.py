"""The convolution in front of a linear layer, bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hal.runtime.batch import Mode
from hal.runtime.seam import Draft, check_act, check_once, failed, verifier

if TYPE_CHECKING:
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

    def commit(self, step: Step, last: Tensor) -> None:
        """Leave the window after each row's accepted path in its target slot."""
        rule, draft = verifier(self.verify, self.draft)
        scratch = draft.take(step, "a conv")
        bounds = step.query_start_loc
        rule.commit(self.state, scratch, step.src, step.dst, step.start, bounds, last)

    def _verify(self, x: Tensor, step: Step) -> Tensor:
        rule, draft = verifier(self.verify, self.draft)
        try:
            return rule.verify(
                x,
                self.weight,
                self.bias,
                self.state,
                step.src,
                step.start,
                step.query_start_loc,
                step.max_len,
                draft.fill(step),
                parents=step.parents,
                activation=self.activation,
            )
        except RuntimeError as error:
            raise failed("conv.verify", error, x, self.weight, self.state) from error

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """Convolve the step's packed tokens, act `[T, C]`."""
        check_act("the conv's input", x, self.dtype)
        if step.mode is Mode.VERIFY:
            return self._verify(x, step)
        check_once(self.ran, step, "the conv")
        try:
            out = self._run(x, step)
        except RuntimeError as error:
            raise failed("conv", error, x, self.weight, self.state) from error
        self.ran = step
        return out

    def _run(self, x: Tensor, step: Step) -> Tensor:
        given = (x, self.weight, self.bias, self.state, step.src, step.dst, step.start)
        compiled = self.compiled if torch.compiler.is_compiling() else None
        if step.mode is Mode.DECODE:
            out = (compiled or self.decode).decode(*given, activation=self.activation)
            step.track_decode(self.state)
            return out
        rows = (step.query_start_loc, step.max_len)
        serve = (compiled or self.prefill).prefill
        return serve(*given, *rows, activation=self.activation, track=step.track)
