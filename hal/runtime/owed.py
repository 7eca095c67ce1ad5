"""What a step owes after its layers have run, and the slots that were freed before it came."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hal.errors import StepOrderError
from hal.runtime.batch import NO_SLOT
from hal.runtime.step import decode_copies, track_points

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

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
        slots = set() if self._batch is None else _targets(self._batch)
        return self.step is not None and not (slots and slots <= self._gone)

    def check(self, counts: Sequence[int] | None) -> None:
        """Refuse a commit that would use a freed slot, or may where the device counts (None)."""
        if not self._gone or self._batch is None:
            return
        for row, length in enumerate(self._batch.lengths):
            count = length if counts is None else counts[row]
            if gone := self._gone.intersection(_moved(self._batch, row, count)):
                told = "a count from the device" if counts is None else f"{count} tokens"
                fix = "accept 0 of its tokens, or abandon" if count else "abandon"
                raise StepOrderError(
                    f"commit: row {row} accepts {told} and would use slots {sorted(gone)}, which "
                    f"were freed since the verify; {fix} the step"
                )


@dataclass(frozen=True, slots=True, eq=False)
class _Tracked:
    """A replayed DECODE step, the slots `[B]` of its rows, and its pairs of slots to copy."""

    batch: Batch
    dst: Tensor
    pairs: Pairs

    def without(self, gone: set[int], ring: Ring) -> Pairs | None:
        """The pairs but for points that were freed; StepOrderError where their row's slot was."""
        batch = self.batch
        kept = [point for point in batch.track if point[2] not in gone]
        for row, _, slot in kept:
            if slot >= 0 and batch.held is None and batch.dst[row] in gone:
                raise StepOrderError(
                    f"end: the state of row {row} was to be kept in slot {slot}, but its own "
                    f"slot {batch.dst[row]} was freed since the replay; free it after end(), "
                    f"or abandon the step"
                )
        return decode_copies(self.dst, track_points(replace(batch, track=kept), ring))


@dataclass(slots=True)
class Copies:
    """The tracked rows of a replayed DECODE step, copied behind its graph; it follows the pool."""

    _ring: Ring
    _tracked: _Tracked | None = None
    _gone: set[int] = field(default_factory=set)
    ran: bool = False
    """Whether the graph was run, as far as is known here; before that there is nothing to copy."""

    def open(self, batch: Batch, dst: Tensor, *, ran: bool) -> None:
        """Owe the copies of a step whose rows leave their states in the slots `dst`."""
        pairs = decode_copies(dst, track_points(batch, self._ring))
        self._tracked = None if pairs is None else _Tracked(batch, dst, pairs)
        self._gone.clear()
        self.ran = ran

    def close(self) -> None:
        """Owe nothing."""
        self._tracked = None
        self._gone.clear()

    def release(self, slots: Iterable[Slot]) -> None:
        """Remember freed slots: nothing is copied to those."""
        if self._tracked is not None:
            self._gone.update(slots)

    def take(self) -> Pairs | None:
        """What to copy, which is then owed no more; StepOrderError where a row's slot was freed."""
        tracked = self._tracked if self.ran else None
        pairs = None if tracked is None else tracked.pairs
        if tracked is not None and self._gone:
            pairs = tracked.without(self._gone, self._ring)
        self.close()
        return pairs


def _targets(batch: Batch) -> set[int]:
    """The slots that the host knows a commit to leave states in, the track points' left out."""
    pairs = zip(batch.dst, batch.lengths, strict=batch.held is None)
    return {slot for slot, length in pairs if slot >= 0 and length}


def _moved(batch: Batch, row: int, count: int) -> Iterator[int]:
    """The slots that a commit of one row reads or writes; none where it stays as it is.

    Those that the device holds are left out.
    """
    src, dst = (NO_SLOT, NO_SLOT) if batch.held is not None else (batch.src[row], batch.dst[row])
    if batch.lengths[row] and dst >= 0 and (count or src != dst):
        yield from (src, dst)
    for tracked, position, slot in batch.track:
        if tracked == row and slot >= 0 and position - batch.start[row] <= count:
            yield from (src, slot)
