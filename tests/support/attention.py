"""Full attentions for composition tests: they log their calls and answer by their scale."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from hal.runtime.batch import Batch, Mode

Call = tuple[object, ...]


@dataclass
class Attention:
    """A full attention without commit; a q head's answer is its v head, scaled by `scale`."""

    label: str
    scale: float = 1.0
    log: list[Call] = field(default_factory=list)
    failure: Exception | None = None
    """Raised by the next call that begins a step."""

    @property
    def speculation(self) -> Speculating | None:
        """It has no commit."""
        return None

    def begin(self, batch: Batch) -> None:
        """Log the mode, or fail."""
        self._log("begin", batch.mode)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
        """The v head of each q head."""
        self.log.append(("forward", layer_id))
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1) * self.scale

    def capture(self, mode: Mode, rows: int, width: int) -> None:
        """Log the size, or fail."""
        self._log("capture", mode, rows, width)

    def replay(self, batch: Batch) -> None:
        """Log the mode, or fail."""
        self._log("replay", batch.mode)

    def _log(self, *call: object) -> None:
        if self.failure is not None:
            raise self.failure
        self.log.append(call)


@dataclass
class Speculating(Attention):
    """A full attention with a commit."""

    @property
    def speculation(self) -> Speculating:
        """Itself."""
        return self

    def commit(
        self, accepted: Sequence[int] | Tensor, tips: Sequence[int] | Tensor | None = None
    ) -> None:
        """Log what was accepted."""
        self.log.append(("commit", accepted, tips))
