"""What a step owes after its layers have run, and the slots that were freed before it came."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from hal.errors import StepOrderError
from hal.runtime.step import decode_copies, track_points

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hal.runtime.batch import Batch
    from hal.runtime.pool import Slot
    from hal.runtime.staging import Ring
    from hal.runtime.step import Step

Pairs = tuple[Tensor, Tensor]
"""The slots that states are copied from and to."""


@dataclass(slots=True)
class Commit:
    """A VERIFY step whose commit has yet to come; it follows the pool.

    A freed slot may have a new tenant, whom that commit must not touch. Slots that the engine
    holds on the device are known to it alone.
    """

    step: Step | None = None
    _batch: Batch | None = None
    _gone: set[int] = field(default_factory=set)

    def open(self, step: Step, batch: Batch | None) -> None:
        """Owe the commit of a step; a captured one has no batch yet."""
        self.step, self._batch = step, batch
        self._gone.clear()

    def close(self) -> None:
        """Owe nothing."""
        self.step = self._batch = None
        self._gone.clear()

    def release(self, slots: Iterable[Slot]) -> None:
        """Remember freed slots."""
        if self._batch is not None:
            self._gone.update(slots)

    @property
    def due(self) -> bool:
        """Whether no other step may come first; not where the slots of all rows were freed."""
        slots = set() if self._batch is None else {slot for slot in self._batch.dst if slot >= 0}
        return self.step is not None and not (slots and slots <= self._gone)

    def check(self, accepted: Sequence[int] | Tensor) -> None:
        """Refuse a commit that would read or write a freed slot, or may where the device counts."""
        if not self._gone or self._batch is None:
            return
        counts = None if isinstance(accepted, Tensor) else accepted
        for row in range(self._batch.rows):
            count = self._batch.lengths[row] if counts is None else counts[row]
            if gone := self._gone.intersection(_moved(self._batch, row, count)):
                told = "a count from the device" if counts is None else f"{count} tokens"
                raise StepOrderError(
                    f"commit: row {row} accepts {told} and would use slots {sorted(gone)}, which "
                    f"were freed since the verify; accept 0 of its tokens, or abandon the step"
                )


@dataclass(slots=True)
class Copies:
    """The tracked rows of a replayed DECODE step, copied behind its graph; it follows the pool."""

    _ring: Ring
    _batch: Batch | None = None
    _dst: Tensor | None = None
    _pairs: Pairs | None = None
    _gone: set[int] = field(default_factory=set)

    def open(self, batch: Batch, dst: Tensor) -> None:
        """Owe the copies of a step whose rows leave their states in the slots `dst`."""
        self._pairs = decode_copies(dst, track_points(batch, self._ring))
        self._batch, self._dst = (batch, dst) if self._pairs else (None, None)
        self._gone.clear()

    def close(self) -> None:
        """Owe nothing."""
        self._batch = self._dst = self._pairs = None
        self._gone.clear()

    def release(self, slots: Iterable[Slot]) -> None:
        """Remember freed slots: nothing is copied to those."""
        if self._batch is not None:
            self._gone.update(slots)

    def take(self) -> Pairs | None:
        """What to copy, which is then owed no more; StepOrderError where a row's slot was freed."""
        batch, dst, pairs = self._batch, self._dst, self._pairs
        if self._gone and batch is not None and dst is not None:
            kept = [point for point in batch.track if point[2] not in self._gone]
            for row, _, slot in kept:
                if slot >= 0 and batch.held is None and batch.dst[row] in self._gone:
                    raise StepOrderError(
                        f"end: the state of row {row} was to be kept in slot {slot}, but its own "
                        f"slot {batch.dst[row]} was freed since the replay; free it after end(), "
                        f"or abandon the step"
                    )
            pairs = decode_copies(dst, track_points(replace(batch, track=kept), self._ring))
        self.close()
        return pairs


def _moved(batch: Batch, row: int, count: int) -> Iterator[int]:
    """The slots that a commit of one row reads or writes; none where it stays as it is."""
    src, dst = batch.src[row], batch.dst[row]
    if count or src != dst:
        yield from (src, dst)
    for tracked, position, slot in batch.track:
        if tracked == row and position - batch.start[row] <= count:
            yield slot
