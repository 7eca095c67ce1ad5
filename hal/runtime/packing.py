"""The fields of a step side by side in one buffer, for the step's own sizes or larger ones."""

from __future__ import annotations

import struct
from array import array
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Final

from hal.runtime.batch import NO_SLOT, Mode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from hal.runtime.batch import Batch

NO_TOKEN: Final = -1
"""How a parent says the committed state, and a table that a path does not reach its point."""

ZERO: Final = struct.pack("i", 0)
"""The word of position 0, which rows behind a batch have."""

NONE: Final = struct.pack("i", -1)
"""The word of `NO_SLOT` and `NO_TOKEN`, which all other fields have there."""


@dataclass(frozen=True, slots=True, eq=False)
class Fields:
    """The views of one packed buffer, i32; what a frame leaves out is None."""

    query_start_loc: Tensor
    src: Tensor
    dst: Tensor
    start: Tensor
    track: Tensor | None
    parents: Tensor | None
    points: tuple[tuple[Tensor, Tensor], ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """How long the fields of a packed step are: as its batch needs, or as a capture has room.

    `track` points of `[M, 3]`; parents `[T]` where `tree`; `points` pairs of slots `[B]` and a
    table `[T]`.
    """

    rows: int
    tokens: int
    track: int = 0
    tree: bool = False
    points: int = 0

    @property
    def sizes(self) -> list[int]:
        """The entries of each field, in the order of the buffer."""
        rows, links = self.rows, self.tokens if self.tree else 0
        fields = [rows + 1, rows, rows, rows, 3 * self.track, links]
        return fields + [rows, self.tokens] * self.points

    @property
    def size(self) -> int:
        """The entries of the whole buffer."""
        return sum(self.sizes)

    def split(self, packed: Tensor) -> Fields:
        """The views of a buffer."""
        bounds, src, dst, start, track, links, *rest = packed.split_with_sizes(self.sizes)
        return Fields(
            bounds,
            src,
            dst,
            start,
            track.view(-1, 3) if self.track else None,
            links if self.tree else None,
            tuple(zip(rest[::2], rest[1::2], strict=True)),
        )


def frame_of(batch: Batch) -> Frame:
    """The frame that a batch just fills."""
    live = [row for row, _, slot in batch.track if slot >= 0]
    if batch.mode is not Mode.VERIFY:
        return Frame(batch.rows, batch.tokens, len(live))
    most = max(Counter(live).values(), default=0)
    return Frame(batch.rows, batch.tokens, 0, batch.parents is not None, most)


def pack(batch: Batch, frame: Frame) -> array[int]:
    """Every field of the frame, neutral behind the batch: no slots, no tokens, position 0."""
    gap = frame.rows - batch.rows
    none = NONE * gap
    src, dst = _slots(batch)
    parts = [_starts(batch, frame.rows), src, none, dst, none, _words(batch.start), ZERO * gap]
    if frame.track:
        parts += map(_words, counted(batch))
    if frame.tree:
        parts.append(_filled([*chain.from_iterable(_links(batch))], frame.tokens))
    for slots, table in _passes(batch, frame.points):
        parts += (_filled(slots, frame.rows), _filled(table, frame.tokens))
    return array("i", b"".join(parts))


def _words(values: Sequence[int]) -> bytes:
    """The values as i32, in half the time of `array("i", values)`."""
    return struct.pack(f"{len(values)}i", *values)


def _filled(values: Sequence[int], size: int) -> bytes:
    return _words(values) + NONE * (size - len(values))


def _starts(batch: Batch, rows: int) -> bytes:
    """Row bounds; in DECODE every row of the frame has one token, a pad too."""
    if batch.mode is Mode.DECODE:
        return _counted_up(rows + 1)
    bounds = [0, *accumulate(batch.lengths)]
    return _words(bounds + bounds[-1:] * (rows - batch.rows))


@lru_cache
def _counted_up(size: int) -> bytes:
    """0, 1, … as i32, kept since a decode needs them in every step."""
    return _words(range(size))


def _slots(batch: Batch) -> tuple[bytes, bytes]:
    """src and dst, none where the device holds them."""
    if batch.held is not None:
        none = NONE * batch.rows
        return none, none
    src = _words(_clean(batch.src, batch.lengths))
    return src, src if batch.src == batch.dst else _words(_clean(batch.dst, batch.lengths))


def _clean(slots: Sequence[int], lengths: Sequence[int]) -> Sequence[int]:
    """One spelling of "no slot", which rows without tokens have too."""
    if not slots or (min(slots) >= NO_SLOT and 0 not in lengths):
        return slots
    return [
        max(slot, NO_SLOT) if length else NO_SLOT
        for slot, length in zip(slots, lengths, strict=True)
    ]


def counted(batch: Batch) -> Iterator[tuple[int, int, int]]:
    """The live track points with their counts of this step's tokens."""
    for row, position, slot in batch.track:
        if slot >= 0:
            yield row, position - batch.start[row], slot


def _links(batch: Batch) -> Sequence[Sequence[int]]:
    """The parents of every row; those of a chain where none were given."""
    return batch.parents or [range(NO_TOKEN, length - 1) for length in batch.lengths]


def _passes(batch: Batch, passes: int) -> Iterator[tuple[list[int], list[int]]]:
    """The track points of a VERIFY step, one a row in each pass.

    Beside the slots stands for every token, as the tip of an accepted path, which token of that
    path is the point's last; -1 where the path ends before.
    """
    if not passes:
        return
    by_row: list[list[tuple[int, int]]] = [[] for _ in batch.lengths]
    for row, count, slot in counted(batch):
        by_row[row].append((count, slot))
    bounds, links = [0, *accumulate(batch.lengths)], _links(batch)
    for turn in range(passes):
        slots, table = [NO_SLOT] * batch.rows, [NO_TOKEN] * bounds[-1]
        for row, (begin, end) in enumerate(pairwise(bounds)):
            if turn < len(by_row[row]):
                count, slots[row] = by_row[row][turn]
                table[begin:end] = _lasts(links[row], count)
        yield slots, table


def _lasts(parents: Sequence[int], count: int) -> Iterator[int]:
    """For every token the `count`-th of the path to it, row-relative; -1 where it is shorter."""
    paths: list[list[int]] = []
    for token, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else ()), token])
        yield paths[-1][count - 1] if len(paths[-1]) >= count else NO_TOKEN
