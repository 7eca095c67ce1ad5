"""Two full attentions as one: prefill by one backend, decode by the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from hal.errors import CompositionError, StepOrderError
from hal.runtime.batch import Mode
from hal.runtime.phases import DECODES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from hal.runtime.batch import Batch
    from hal.runtime.full_attention import FullAttention, SpeculativeAttention


class PhaseSplit:
    """A `FullAttention` of two; `verify` says which of them runs VERIFY steps.

    `part(mode)` alone decides, for every method. The part that the step went to is remembered from
    `begin`, `capture` or `replay` on, so that `forward` and `commit` reach the same one.
    """

    def __init__(
        self,
        prefill: FullAttention,
        decode: FullAttention,
        verify: Literal["prefill", "decode"] = "prefill",
    ) -> None:
        if verify not in ("prefill", "decode"):
            raise ValueError(f"PhaseSplit: verify is {verify!r}, expected 'prefill' or 'decode'")
        self.prefill = prefill
        self.decode = decode
        self.verify = verify
        self._mode: Mode | None = None

    @property
    def label(self) -> str:
        """Both parts and the one that verifies."""
        return (
            f"PhaseSplit(prefill={self.prefill.label}, decode={self.decode.label}, "
            f"verify in {self.verify})"
        )

    @property
    def speculation(self) -> SpeculativeAttention | None:
        """Itself where the part that runs VERIFY has a commit."""
        return None if self.part(Mode.VERIFY).speculation is None else self

    def part(self, mode: Mode) -> FullAttention:
        """Who runs steps of a mode."""
        if not isinstance(mode, Mode):
            raise ValueError(f"Invalid forward mode: {mode}")
        if mode is Mode.VERIFY:
            return self.decode if self.verify == "decode" else self.prefill
        return self.decode if mode in DECODES else self.prefill

    def begin(self, batch: Batch) -> None:
        """Begin the step in its part; one that fails leaves no step to run."""
        part = self.part(batch.mode)
        self._mode = None
        part.begin(batch)
        self._mode = batch.mode

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
        """Attend in the part that the step went to."""
        if self._mode is None:
            raise StepOrderError("PhaseSplit: forward was called before begin(batch)")
        return self.part(self._mode).forward(q, k, v, layer_id)

    def capture(self, mode: Mode, rows: int, width: int) -> None:
        """Let the mode's part make its metadata at fixed addresses."""
        part = self.part(mode)
        self._mode = None
        part.capture(mode, rows, width)
        self._mode = mode

    def replay(self, batch: Batch) -> None:
        """Let the part that captured the mode rewrite its metadata."""
        part = self.part(batch.mode)
        self._mode = None
        part.replay(batch)
        self._mode = batch.mode

    def commit(
        self, accepted: Sequence[int] | Tensor, tips: Sequence[int] | Tensor | None = None
    ) -> None:
        """Commit in the part that ran the verify step."""
        if self._mode is not Mode.VERIFY:
            raise StepOrderError("PhaseSplit: commit without a verify")
        part = self.part(self._mode)
        committer = part.speculation
        if committer is None:
            raise CompositionError(
                f"PhaseSplit: verify runs in the {self.verify} part {part.label}, "
                f"which has no commit"
            )
        committer.commit(accepted, tips)
        self._mode = None
