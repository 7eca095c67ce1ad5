"""A step as the engine states it on the host, and the checks that make it safe to run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from operator import index
from typing import TYPE_CHECKING, Final, SupportsIndex

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

LAST_POSITION: Final = 2**31 - 1
"""Positions and lengths are int32 on the device."""

NO_SLOT: Final = -1
"""How `hal` writes "no slot"; any negative id means it."""


class Mode(StrEnum):
    """What kind of step this is; declared by the engine, never inferred from shapes."""

    DECODE = "DECODE"
    EXTEND = "EXTEND"
    MIXED = "MIXED"
    VERIFY = "VERIFY"
    DRAFT_EXTEND = "DRAFT_EXTEND"
    IDLE = "IDLE"


Track = tuple[int, int, int]
"""(row, token position, slot): store the state after the tokens before `position` in `slot`."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSlots:
    """Slot ids that the engine keeps on the device: src and dst i32 `[B]`, none above `bound`.

    They are never read back, so that what `begin` checks of host ids is the engine's word here:
    ids 1 up to `bound` or negative, targets distinct, and no row reading what another writes.
    """

    src: Tensor
    dst: Tensor
    bound: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: for every row its new tokens, its position and its slots, as host integers.

    `lengths[i]` tokens of row i follow each other in the packed input; they start at position
    `start[i]`. Row i reads `src[i]` (negative: a fresh request) and leaves its state in `dst[i]`
    (negative: nowhere). A row without tokens is a no-op. In DECODE every row is one token, and a
    row with neither slot is padding. In VERIFY `dst` is where a commit will leave the state.
    """

    mode: Mode
    lengths: Sequence[int] = ()
    start: Sequence[int] = ()
    src: Sequence[int] = ()
    dst: Sequence[int] = ()
    track: Sequence[Track] = ()
    parents: Sequence[Sequence[int]] | None = None
    """In a VERIFY step of trees: for every token of a row its parent in the row, -1 the state."""
    held: DeviceSlots | None = None
    """The slots where the device holds them; `src` and `dst` are then empty."""

    def __post_init__(self) -> None:
        """Turn every entry into a plain integer, so that equal slots are seen to be equal.

        Tensors and numpy arrays on the host are taken too; a float is a TypeError.
        """
        for name in ("lengths", "start", "src", "dst"):
            object.__setattr__(self, name, _integers(getattr(self, name)))
        object.__setattr__(self, "track", tuple(map(_integers, self.track)))
        if self.parents is not None:
            object.__setattr__(self, "parents", tuple(map(_integers, self.parents)))

    @property
    def rows(self) -> int:
        """How many rows, pads included."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """How many packed tokens; every row of a DECODE step takes one, pads included."""
        return self.rows if self.mode is Mode.DECODE else sum(self.lengths)

    @property
    def max_len(self) -> int:
        """How many tokens the longest row has; a pad of a DECODE step takes one too."""
        return min(self.rows, 1) if self.mode is Mode.DECODE else max(self.lengths, default=0)


def _integers(values: Iterable[SupportsIndex]) -> tuple[int, ...]:
    return tuple(map(index, values))


@dataclass(frozen=True, slots=True)
class Limits:
    """What a backend was built for, so that a batch can be refused with both numbers."""

    slots: int
    max_batch: int
    max_tokens: int
    modes: frozenset[Mode]
    track: int | None = None
    """Granularity of tracked positions, None where tracking was not selected."""
    width: int = 0
    """Tokens of a VERIFY row at most."""
    tree: bool = False
    """Whether VERIFY rows may be trees."""


def check(batch: Batch, limits: Limits) -> None:
    """Raise ValueError for a step that cannot run or would race; nothing is changed."""
    check_mode(batch, limits)
    _check_sizes(batch, limits)
    if batch.rows and not _plain(batch, limits):
        _check_rows(batch)
        _check_slots("src", batch.src, limits)
        _check_slots("dst", batch.dst, limits)
    _check_points(batch, limits)
    _check_track(batch, limits)
    _check_drafts(batch, limits)
    _check_races(batch)


def check_mode(batch: Batch, limits: Limits) -> None:
    """Raise for a mode that is unknown or was not selected for; what can change comes behind it."""
    if not isinstance(batch, Batch):
        raise TypeError(f"begin: expected a Batch, got {type(batch).__name__}")
    if not isinstance(batch.mode, Mode):
        raise ValueError(f"Invalid forward mode: {batch.mode}")
    if batch.mode not in limits.modes:
        served = ", ".join(sorted(limits.modes))
        raise ValueError(f"begin: mode {batch.mode} was not selected for, served are {served}")


def _check_sizes(batch: Batch, limits: Limits) -> None:
    _check_entries(batch)
    if batch.rows > limits.max_batch:
        raise ValueError(f"begin: {batch.rows} rows, the backend was built for {limits.max_batch}")
    tokens = batch.tokens
    if tokens > limits.max_tokens:
        raise ValueError(f"begin: {tokens} tokens, the backend was built for {limits.max_tokens}")
    if tokens > LAST_POSITION:
        raise ValueError(f"begin: {tokens} tokens, at most {LAST_POSITION} have an int32 place")


def _check_entries(batch: Batch) -> None:
    """One entry a row in every field; slots on the host or on the device, not on both."""
    slots = batch.rows if batch.held is None else 0
    for name, expected in (("start", batch.rows), ("src", slots), ("dst", slots)):
        size = len(getattr(batch, name))
        if size != expected and batch.held is not None and name != "start":
            raise ValueError(f"begin: {size} entries in {name} beside slots held on the device")
        if size != expected:
            raise ValueError(f"begin: {batch.rows} lengths, {size} entries in {name}")


def _check_rows(batch: Batch) -> None:
    for row, (length, start) in enumerate(zip(batch.lengths, batch.start, strict=True)):
        if length < 0 or start < 0:
            raise ValueError(f"begin: row {row}: length {length}, start {start}: expected >= 0")
        if start + length > LAST_POSITION:
            raise ValueError(f"begin: row {row} ends at {start + length}, beyond {LAST_POSITION}")
        if batch.held is None and batch.src[row] < 0 and start > 0 and length > 0:
            raise ValueError(f"begin: row {row} starts at {start} without a src slot")
        if batch.mode is Mode.IDLE and length:
            raise ValueError(f"begin: row {row} has {length} tokens in an IDLE step")
        if batch.mode is Mode.DECODE and length != 1 and (length or not _is_pad(batch, row)):
            raise ValueError(f"begin: row {row} has {length} tokens in a DECODE step, expected 1")


def _plain(batch: Batch, limits: Limits) -> bool:
    """Whether no row can be at fault, nor its slots, by extremes alone; most steps are plain."""
    lengths, start = batch.lengths, batch.start
    counts = lengths.count(1) == batch.rows if batch.mode is Mode.DECODE else min(lengths) >= 0
    ends = min(start) >= 0 and max(start) + batch.max_len <= LAST_POSITION
    slots = batch.held is not None or _continued(batch, limits)
    return counts and ends and slots and batch.mode is not Mode.IDLE


def _continued(batch: Batch, limits: Limits) -> bool:
    """Whether every row reads a slot of the pool, and no target lies outside of it."""
    src, dst = batch.src, batch.dst
    return min(src) > 0 and max(src) <= limits.slots and (src == dst or _in_pool(dst, limits))


def _in_pool(slots: Sequence[int], limits: Limits) -> bool:
    return 0 not in slots and max(slots, default=NO_SLOT) <= limits.slots


def _is_pad(batch: Batch, row: int) -> bool:
    """Whether the host knows that a row has neither slot."""
    return batch.held is None and batch.src[row] < 0 and batch.dst[row] < 0


def _check_points(batch: Batch, limits: Limits) -> None:
    for point in batch.track:
        if len(point) != 3:
            raise ValueError(f"begin: track point {point}, expected (row, position, slot)")
        _check_slots("track", point[2:], limits)


def _check_slots(name: str, slots: Sequence[int], limits: Limits) -> None:
    if not _in_pool(slots, limits):
        slot = next(slot for slot in slots if slot == 0 or slot > limits.slots)
        raise ValueError(f"begin: slot {slot} in {name}, pool has slots 1..{limits.slots}")


def _check_track(batch: Batch, limits: Limits) -> None:
    for row, position, slot in batch.track:
        if slot < 0:
            continue
        if limits.track is None:
            raise ValueError("begin: track points need a selection with prefix_cache")
        if not 0 <= row < batch.rows:
            raise ValueError(f"begin: track point of row {row}, the batch has {batch.rows} rows")
        count, length = position - batch.start[row], batch.lengths[row]
        if not 1 <= count <= length:
            raise ValueError(
                f"begin: track point (row {row}, count {count}), row {row} has {length} tokens"
            )
        if batch.mode is Mode.DECODE and batch.held is None and batch.dst[row] < 0:
            raise ValueError(f"begin: track point of row {row}, which has no dst to copy from")
        if position % limits.track:
            raise ValueError(
                f"begin: track point (row {row}, position {position}) "
                f"is not a multiple of {limits.track}"
            )
        if batch.mode is Mode.VERIFY:
            continue  # a commit stops at any token
        if count % limits.track and count != length:  # chunks are counted from the row's start
            raise ValueError(
                f"begin: track point (row {row}, position {position}) is {count} tokens into the "
                f"row, expected a multiple of {limits.track} or its end, {length}: start the row "
                f"at a multiple of {limits.track} or end it there"
            )


def _check_drafts(batch: Batch, limits: Limits) -> None:
    if batch.mode is not Mode.VERIFY:
        if batch.parents is not None:
            raise ValueError(f"begin: parents belong to VERIFY, not to {batch.mode}")
        return
    for row, length in enumerate(batch.lengths):
        if length > limits.width:
            raise ValueError(
                f"begin: row {row} verifies {length} tokens, the width is {limits.width}"
            )
    if batch.parents is not None:
        _check_parents(batch, batch.parents, limits)


def _check_parents(batch: Batch, parents: Sequence[Sequence[int]], limits: Limits) -> None:
    if not limits.tree:
        raise ValueError("begin: parents need a selection with Speculative(tree=True)")
    if len(parents) != batch.rows:
        raise ValueError(f"begin: {batch.rows} lengths, {len(parents)} entries in parents")
    for row, (length, links) in enumerate(zip(batch.lengths, parents, strict=True)):
        if len(links) != length:
            raise ValueError(f"begin: row {row} has {length} tokens, {len(links)} parents")
        for token, parent in enumerate(links):
            if not -1 <= parent < token:
                raise ValueError(
                    f"begin: row {row}: parent {parent} of token {token} does not come before it"
                )


def _check_races(batch: Batch) -> None:
    """Live targets are distinct, and no row reads what another row writes."""
    if not batch.track and batch.src == batch.dst and len(set(batch.dst)) == len(batch.dst):
        return  # every row goes on in place, as in most steps
    live = [row for row, length in enumerate(batch.lengths) if length > 0]
    pairs = [] if batch.held is not None else [(batch.src[row], batch.dst[row]) for row in live]
    targets = [dst for _, dst in pairs if dst >= 0]
    targets += [slot for _, _, slot in batch.track if slot >= 0]
    written = set(targets)
    if len(written) == len(targets) and not any(s in written and s != d for s, d in pairs):
        return
    raise ValueError(_race(batch, live if pairs else []))


def _race(batch: Batch, live: Sequence[int]) -> str:
    """The first slot with two writers, or else the first that is read and written."""
    targets = [(batch.dst[row], f"dst of row {row}") for row in live if batch.dst[row] >= 0]
    points = [(slot, f"a track point of row {row}") for row, _, slot in batch.track if slot >= 0]
    for slot, times in Counter(slot for slot, _ in targets + points).items():
        if times > 1:
            who = [name for target, name in targets + points if target == slot]
            return f"begin: slot {slot} is {' and '.join(who)}"
    writers = {batch.dst[row]: f"row {row}" for row in live if batch.dst[row] >= 0} | dict(points)
    row = next(r for r in live if writers.get(batch.src[r], f"row {r}") != f"row {r}")
    return f"begin: row {row} reads slot {batch.src[row]}, which {writers[batch.src[row]]} writes"
