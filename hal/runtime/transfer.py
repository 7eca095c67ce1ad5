"""A slot's state by named segment, so that a running request moves between pools and ranks.

A segment is in one form whatever layout its pool has: conv inputs `[channels, W-1]` oldest first,
delta-rule states `[heads, V, K]`, scan states `[heads, P, N]` or `[channels, N]`. Its first axis is
the one that ranks cut.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import index
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from hal.options import Shard
from hal.runtime.batch import LAST_POSITION
from hal.sharding import offset

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hal.states import StateSpec

FORMAT: Final = 1
"""Version of the form; a state of another is refused."""

FORMS: Final = {"CW": "CW", "WC": "CW", "ring": "CW", "VK": "VK", "KV": "VK", "PN": "PN", "": ""}
"""The layout that a segment is brought to, by its pool's."""

Key = tuple[int, str, str]
"""Layer, state and segment."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A named part of one layer's state on one rank; `whole` is its first axis over all ranks."""

    layer: int
    state: str
    name: str
    layout: str
    whole: int
    values: Tensor

    @property
    def key(self) -> Key:
        """What it is, on every rank."""
        return self.layer, self.state, self.name

    @property
    def title(self) -> str:
        """What it is, in errors."""
        return f"layer {self.layer} {self.state} {self.name}"


@dataclass(frozen=True, slots=True, eq=False)
class SlotState:
    """All segments of one slot on one rank, after `start` tokens; plain data that pickles."""

    start: int
    shard: Shard
    segments: tuple[Segment, ...]
    format: int = FORMAT

    def to(self, device: str | torch.device) -> SlotState:
        """The same state on another device, as on the host while its slot serves somebody else."""
        moved = (replace(segment, values=segment.values.to(device)) for segment in self.segments)
        return replace(self, segments=tuple(moved))


def export_slot(
    states: Sequence[tuple[StateSpec, Tensor]], slot: int, start: int, shard: Shard
) -> SlotState:
    """Copies of a slot's segments, from pool tensors `[slots, …]` beside their plan."""
    start = index(start)
    _check_start("export_state", start)
    return SlotState(
        start,
        shard,
        tuple(seg for spec, held in states for seg in _segments(spec, held[slot], start)),
    )


def import_slot(
    states: Sequence[tuple[StateSpec, Tensor]], slot: int, given: SlotState, shard: Shard
) -> None:
    """Write a slot from a state of the same model and rank; one that misfits writes nothing."""
    _check_origin("import_state", given, shard)
    found = _by_key("import_state", given)
    wanted = [(spec.layer, spec.name, name) for spec, _ in states for name, _, _ in spec.sizes]
    _check_keys("import_state", found, wanted)
    for spec, held in states:
        _check_fit(spec, held, found)
    # Segments that came out of autograd must not bring the pool into it.
    with torch.no_grad():
        joined = [_joined(spec, held, found) for spec, held in states]
        for (spec, held), values in zip(states, joined, strict=True):
            _write(held[slot], spec.layout, values, index(given.start))


def merge(parts: Sequence[SlotState]) -> SlotState:
    """The state of the whole model from those of all ranks, segment by segment.

    What several ranks hold the same is taken from the first of them.
    """
    ranks = sorted(parts, key=lambda part: part.shard.rank)
    _check_parts(ranks)
    first = ranks[0]
    merged = tuple(
        _merged([part.segments[i] for part in ranks]) for i in range(len(first.segments))
    )
    _check_size("merge", [(s.values.shape[0], s.whole) for s in first.segments], len(ranks))
    return SlotState(first.start, Shard(), merged)


def cut(whole: SlotState, states: Sequence[StateSpec], shard: Shard) -> SlotState:
    """One rank's part of a whole model's state, as that rank's plan has it."""
    _check_origin("cut", whole, Shard())
    found = _by_key("cut", whole)
    sizes = {(s.layer, s.name, name): (own, all_) for s in states for name, own, all_ in s.sizes}
    _check_keys("cut", found, list(sizes))
    parts = tuple(_part(found[key], *sizes[key], shard) for key in sizes)
    _check_size("cut", list(sizes.values()), shard.size)
    return SlotState(whole.start, shard, parts)


def _segments(spec: StateSpec, held: Tensor, start: int) -> Iterator[Segment]:
    form = _form(spec)
    values = _read(held, spec.layout, start).split_with_sizes([own for _, own, _ in spec.sizes])
    for (name, _, whole), value in zip(spec.sizes, values, strict=True):
        copied = value.clone(memory_format=torch.contiguous_format)
        yield Segment(spec.layer, spec.name, name, form, whole, copied)


def _form(spec: StateSpec) -> str:
    if spec.layout not in FORMS:
        raise ValueError(
            f"layer {spec.layer} {spec.name} is in layout {spec.layout!r}, "
            f"which cannot move; those that can are {', '.join(filter(None, FORMS))}"
        )
    return FORMS[spec.layout]


def _read(held: Tensor, layout: str, start: int) -> Tensor:
    """One slot's tensor in the form of segments."""
    if layout == "ring":
        return held[_ring(held, start)].T
    return held.transpose(-1, -2) if layout in ("WC", "KV") else held


def _joined(spec: StateSpec, held: Tensor, found: dict[Key, Segment]) -> Tensor:
    parts = [found[spec.layer, spec.name, name].values for name, _, _ in spec.sizes]
    return torch.cat([part.to(held.device) for part in parts])


def _write(held: Tensor, layout: str, values: Tensor, start: int) -> None:
    """The other way; a ring's free row stays as it is."""
    if layout == "ring":
        held[_ring(held, start)] = values.T
    else:
        (held.transpose(-1, -2) if layout in ("WC", "KV") else held).copy_(values)


def _ring(held: Tensor, start: int) -> list[int]:
    """The rows of the inputs before `start`, oldest first."""
    width = held.shape[0]
    return [position % width for position in range(start - width + 1, start)]


def _check_origin(what: str, given: SlotState, shard: Shard) -> None:
    if given.format != FORMAT:
        raise ValueError(f"{what}: the state is in format {given.format}, expected {FORMAT}")
    if given.shard != shard:
        raise ValueError(
            f"{what}: the state is of {_rank(given.shard)}, expected {_rank(shard)}; "
            f"merge the parts of all ranks, then cut the whole"
        )
    _check_start(what, index(given.start))


def _check_start(what: str, start: int) -> None:
    if not 0 <= start <= LAST_POSITION:
        bound = "at least 0" if start < 0 else f"at most {LAST_POSITION}"
        raise ValueError(f"{what}: start {start}, expected {bound}")


def _by_key(what: str, given: SlotState) -> dict[Key, Segment]:
    found: dict[Key, Segment] = {}
    for segment in given.segments:
        if segment.key in found:
            raise ValueError(f"{what}: the state holds {segment.title} twice, expected once")
        found[segment.key] = segment
    return found


def _rank(shard: Shard) -> str:
    return f"rank {shard.rank} of {shard.size}"


def _check_keys(what: str, found: dict[Key, Segment], wanted: Sequence[Key]) -> None:
    missing = [key for key in wanted if key not in found]
    extra = [key for key in found if key not in wanted]
    if missing or extra:
        raise ValueError(
            f"{what}: the state holds {len(found)} segments, the plan {len(wanted)}; "
            f"missing {_named(missing)}, not in the plan {_named(extra)}"
        )


def _named(keys: Sequence[Key]) -> str:
    shown = ", ".join(f"layer {layer} {state} {name}" for layer, state, name in keys[:3])
    return f"{shown}, …" if len(keys) > 3 else shown or "none"


def _check_fit(spec: StateSpec, held: Tensor, found: dict[Key, Segment]) -> None:
    rest = _read(held[0], spec.layout, 0).shape[1:]
    for name, own, whole in spec.sizes:
        given = found[spec.layer, spec.name, name]
        if given.layout != _form(spec):
            raise ValueError(
                f"import_state: {given.title} is in layout {given.layout!r}, "
                f"expected {_form(spec)!r}"
            )
        shape = (own, *rest)
        if tuple(given.values.shape) != shape or given.whole != whole:
            raise ValueError(
                f"import_state: {given.title} is {list(given.values.shape)} of {given.whole}, "
                f"the pool holds {list(shape)} of {whole}"
            )
        if given.values.dtype != held.dtype:
            raise TypeError(
                f"import_state: {given.title} is {given.values.dtype}, the pool holds {held.dtype}"
            )


def _check_parts(ranks: Sequence[SlotState]) -> None:
    """All ranks of one group, of one moment, with the same segments, each once."""
    have = [part.shard for part in ranks]
    size = have[0].size if have else 1
    if have != [Shard(rank, size) for rank in range(size)]:
        given = ", ".join(map(_rank, have)) or "none"
        raise ValueError(f"merge: got {given}, expected every rank of one size once")
    _by_key("merge", ranks[0])
    for part in ranks:
        if (part.start, part.format) != (ranks[0].start, FORMAT):
            raise ValueError(
                f"merge: {_rank(part.shard)} is at token {part.start} in format {part.format}, "
                f"expected token {ranks[0].start} in format {FORMAT}"
            )
        if [s.key for s in part.segments] != [s.key for s in ranks[0].segments]:
            raise ValueError(f"merge: {_rank(part.shard)} holds other segments than rank 0")


def _check_size(what: str, sizes: Sequence[tuple[int, int]], size: int) -> None:
    """Ranks share some segments and cut others into as many parts; `sizes` are own and whole."""
    parts = max((whole // own for own, whole in sizes), default=size)
    if parts != size:
        raise ValueError(
            f"{what}: the segments are cut for {parts} ranks, the states are of {size}; "
            f"take each rank's own plan, `pool.states`, with its `pool.shard`"
        )


def _merged(parts: Sequence[Segment]) -> Segment:
    first, size = parts[0], len(parts)
    for part in parts:
        if (part.values.shape, part.values.dtype, part.whole) != (
            first.values.shape,
            first.values.dtype,
            first.whole,
        ):
            raise ValueError(
                f"merge: {part.title} is {list(part.values.shape)} {part.values.dtype} of "
                f"{part.whole} on one rank, {list(first.values.shape)} {first.values.dtype} of "
                f"{first.whole} on another"
            )
    count = _count(first, first.values.shape[0], first.whole, size)
    taken = [parts[i * size // count].values.to(first.values.device) for i in range(count)]
    return replace(first, values=torch.cat(taken))


def _part(segment: Segment, own: int, whole: int, shard: Shard) -> Segment:
    if segment.whole != whole or segment.values.shape[0] != whole:
        raise ValueError(f"cut: {segment.title} is {segment.whole}, the plan has {whole}")
    _count(segment, own, whole, shard.size)
    values = segment.values.narrow(0, offset(own, whole, shard), own).clone()
    return replace(segment, values=values)


def _count(segment: Segment, own: int, whole: int, size: int) -> int:
    """How many different parts a segment has; more ranks than parts share them evenly."""
    if own < 1 or whole % own or size % (whole // own):
        raise ValueError(
            f"{segment.title}: {size} ranks of {own} do not make up a segment of {whole}"
        )
    return whole // own
