"""How a batch's rows read as host data; on this device that costs no transfer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from hal.runtime.checks import check_slots, check_starts, check_track_points


@dataclass(frozen=True, slots=True)
class Row:
    """A row that runs by itself: its tokens `[begin, end)`, its slots (negative = none).

    `track` pairs a token count with the slot that keeps the state after it.
    """

    begin: int
    end: int
    src: int
    dst: int
    track: tuple[tuple[int, int], ...] = ()

    @property
    def length(self) -> int:
        """Tokens of the row, at least one."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Steps:
    """Rows of one token that run together: the token of each, and its slots (negative = none)."""

    tokens: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)

    def add(self, token: int, src: int, dst: int) -> None:
        """Append a row."""
        self.tokens.append(token)
        self.sources.append(src)
        self.targets.append(dst)

    @classmethod
    def of(cls, operation: str, slots: int, src: Tensor, dst: Tensor) -> Self:
        """The rows of a decode batch without the padding, which has neither slot."""
        sources, targets = src.tolist(), dst.tolist()
        check_slots(operation, "src", sources, slots)
        check_slots(operation, "dst", targets, slots)
        if not sources or min(map(max, sources, targets)) >= 0:
            return cls(list(range(len(sources))), sources, targets)
        steps = cls()
        for i, pair in enumerate(zip(sources, targets, strict=True)):
            if max(pair) >= 0:
                steps.add(i, *pair)
        return steps


@dataclass(frozen=True, slots=True)
class Packed:
    """The rows of a packed batch that have tokens: single ones together, longer ones apart.

    A row with a track point runs apart even with one token. Tokens from `end` on are padding.
    """

    steps: Steps
    runs: list[Row]
    end: int

    @classmethod
    def of(
        cls,
        operation: str,
        slots: int,
        tokens: int,
        src: Tensor,
        dst: Tensor,
        query_start_loc: Tensor,
        track: Tensor | None,
        name: str,
    ) -> Self:
        """Sort the rows; `name` is the input that messages speak of."""
        starts = query_start_loc.tolist()
        check_starts(operation, starts, tokens, name)
        sources, targets = src.tolist(), dst.tolist()
        check_slots(operation, "src", sources, slots)
        check_slots(operation, "dst", targets, slots)
        points = [] if track is None else track.tolist()
        lengths = [end - begin for begin, end in pairwise(starts)]
        check_track_points(operation, points, lengths, slots)
        kept = _tracked(points)
        steps, runs = Steps(), []
        for i, length in enumerate(lengths):
            if length == 1 and i not in kept:
                steps.add(starts[i], sources[i], targets[i])
            elif length:
                bounds = starts[i], starts[i + 1]
                runs.append(Row(*bounds, sources[i], targets[i], kept.get(i, ())))
        return cls(steps, runs, starts[-1])


def _tracked(points: Sequence[Sequence[int]]) -> dict[int, tuple[tuple[int, int], ...]]:
    found: dict[int, tuple[tuple[int, int], ...]] = {}
    for row, count, slot in points:
        if slot >= 0:
            found[row] = (*found.get(row, ()), (count, slot))
    return found


def gather(state: Tensor, sources: Sequence[int]) -> Tensor:
    """Copy start states side by side; a row without `src` reads zeros, by selection."""
    if min(sources) >= 0:
        return state.index_select(0, torch.tensor(sources))
    taken = state.index_select(0, torch.tensor([max(slot, 0) for slot in sources]))
    fresh = torch.tensor([slot < 0 for slot in sources])
    return taken.masked_fill_(fresh.view(-1, *[1] * (state.ndim - 1)), 0)


def scatter(state: Tensor, targets: Sequence[int], ends: Tensor) -> None:
    """Store end states; a row without `dst` writes nothing."""
    if min(targets) < 0:
        kept = [i for i, slot in enumerate(targets) if slot >= 0]
        ends = ends.index_select(0, torch.tensor(kept, dtype=torch.int64))
        targets = [targets[i] for i in kept]
    state.index_copy_(0, torch.tensor(targets, dtype=torch.int64), ends)


def start_state(state: Tensor, src: int, dst: int) -> Tensor:
    """A row's start state in the memory of its `dst`, or in fresh memory without one.

    The slot of `src` is left alone unless it is `dst`.
    """
    if dst >= 0:
        target = state[dst]
        if src == dst:
            return target
    else:
        target = torch.empty_like(state[0])
    return target.zero_() if src < 0 else target.copy_(state[src])


def result_like(tensor: Tensor, out: Tensor | None) -> Tensor:
    """`out`, or a dense result of the tensor's shape and dtype."""
    if out is not None:
        return out
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)
