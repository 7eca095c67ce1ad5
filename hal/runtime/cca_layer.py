"""ZAYA's compressed convolutional attention, bound to the providers of its convolutions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hal.errors import ProviderError
from hal.runtime.batch import Mode
from hal.runtime.phases import Phases
from hal.runtime.seam import check_act, check_once, check_tokens, failed, filling, verifier

if TYPE_CHECKING:
    from torch import Tensor

    from hal.interfaces import ConvState
    from hal.model.spec import CcaDims
    from hal.runtime.cca import Cca
    from hal.runtime.seam import Current, Draft
    from hal.runtime.step import Step


@dataclass(slots=True)
class CcaLayer:
    """A CCA layer, bound: `Cca` over the provider of each mode, on the sidecar's two tensors.

    Called with r act `[T, C]`, raw q beside raw k, and h act `[T, hidden]`; the results are the
    convolved `[T, C]` and the hidden state before each token `[T, hidden]`, zeros before the first.
    `draft` is the window's and `hidden_draft` the hidden state's.
    """

    phases: ClassVar[Phases] = Phases.SPLIT
    current: Current
    layer_id: int
    dims: CcaDims
    sidecar: ConvState
    prefill: Cca
    decode: Cca
    verify: Cca | None = None
    draft: Draft | None = None
    hidden_draft: Draft | None = None
    ran: Step | None = None

    def __call__(self, r: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve, delay, and move both states on; a verify step moves none."""
        step = self.current.get()
        self._check_inputs(r, h, step)
        self._check_states()
        if step.mode is Mode.VERIFY:
            return self._verify(r, h, step)
        check_once(self.ran, step, "the CCA")
        try:
            found = self._run(r, h, step)
        except RuntimeError as error:
            raise failed("cca", error, r, h, self.prefill.window) from error
        self.ran = step
        return found

    def check_verified(self, step: Step) -> None:
        """Refuse a commit of a step whose tokens are not in the scratch."""
        for draft in (self.draft, self.hidden_draft):
            verifier(self.verify, draft)[1].take(step, "a CCA")

    def commit(self, step: Step, last: Tensor, dst: Tensor | None = None) -> None:
        """Leave both states after each row's accepted path in its `dst`, by default the step's."""
        rule, draft = verifier(self.verify, self.draft)
        _, hidden = verifier(self.verify, self.hidden_draft)
        scratch = draft.take(step, "a CCA"), hidden.take(step, "a CCA")
        target = step.dst if dst is None else dst
        commit = step.opaque(rule.commit)
        commit(scratch, step.src, target, step.start, step.query_start_loc, last)

    def _check_inputs(self, r: Tensor, h: Tensor, step: Step) -> None:
        """Refuse inputs of another shape or dtype before either state moves."""
        tokens = r.shape[0]
        for name, tensor, width in (("r", r, self.dims.channels), ("h", h, self.dims.hidden)):
            check_tokens(name, tensor, (tokens, width))
            check_act(name, tensor, self.prefill.window.dtype, step)

    def _check_states(self) -> None:
        window, hidden = self.sidecar.step(self.layer_id).tensors
        if window is not self.prefill.window or hidden is not self.prefill.hidden:
            raise ProviderError(f"conv_state.step gave another state for layer {self.layer_id}")

    def _run(self, r: Tensor, h: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        index = (step.src, step.dst, step.start)
        if step.mode is not Mode.DECODE:
            rows = (step.query_start_loc, step.max_len)
            return self.prefill.prefill(r, h, *index, *rows, track=step.track)
        found = step.opaque(self.decode.decode)(r, h, *index)
        for state in (self.decode.window, self.decode.hidden):
            step.track_decode(state)
        return found

    def _verify(self, r: Tensor, h: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        rule, draft = verifier(self.verify, self.draft)
        _, hidden = verifier(self.verify, self.hidden_draft)
        with filling(step, (draft, hidden), "cca.verify", r, h, rule.window):
            return step.opaque(rule.verify)(
                r,
                h,
                step.src,
                step.start,
                step.query_start_loc,
                step.max_len,
                (draft.scratch, hidden.scratch),
                parents=step.parents,
            )
