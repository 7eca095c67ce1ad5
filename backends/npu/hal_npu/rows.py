"""Rows and slots around vendor functions: select, compute on scratch rows, scatter.

Everything but `Spans` works on device tensors without reading one back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from hal.runtime.checks import check_slots, check_starts, check_track_points

NONE = -1
"""The one negative slot id that vendor kernels are shown."""


def slots(ids: Tensor) -> Tensor:
    """Slot ids as int64, every negative one as -1.

    Some kernels skip only what equals -1, and some compute addresses in the dtype of the ids.
    """
    return ids.clamp_min(NONE).long()


def gather(state: Tensor, src: Tensor) -> Tensor:
    """Start states side by side, dense; a row without `src` reads zeros, by selection."""
    taken = state.index_select(0, src.clamp_min(0).long())
    fresh = (src < 0).view(-1, *[1] * (state.ndim - 1))
    return taken.masked_fill_(fresh, 0)


def scatter(state: Tensor, targets: Sequence[int], ends: Tensor) -> None:
    """Store end states in slots that are known on the host; a negative one writes nothing."""
    kept = [i for i, slot in enumerate(targets) if slot >= 0]
    if kept:
        index = torch.tensor([targets[i] for i in kept], device=state.device)
        rows = ends.index_select(0, torch.tensor(kept, device=state.device))
        state.index_copy_(0, index, rows.to(state.dtype))


def count_up(rows: int, like: Tensor) -> Tensor:
    """0, 1, ... as int64 on the device of `like`: the scratch rows of a batch."""
    return torch.arange(rows, device=like.device)


def without_pads(result: Tensor, src: Tensor, dst: Tensor) -> Tensor:
    """The result of a decode with exact zeros in the rows that have neither slot."""
    pads = ((src < 0) & (dst < 0)).view(-1, *[1] * (result.ndim - 1))
    return result.masked_fill(pads, 0)


def deliver(result: Tensor, out: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The result in the activation dtype, in `out` where it is given."""
    return result.to(dtype) if out is None else out.copy_(result)


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Rows of at most `width` tokens as a rectangle, for functions that take a fixed width.

    `token` int64 `[B * width]` is the token of each cell, `live` says which cells have one. Cells
    without one stand behind those that have, so that nothing of them reaches a live cell.
    """

    token: Tensor
    live: Tensor
    width: int
    tokens: int

    @classmethod
    def of(cls, query_start_loc: Tensor, tokens: int, width: int) -> Self:
        """The rectangle of a batch of `tokens` packed tokens, pads included."""
        bounds = query_start_loc.long()
        steps = torch.arange(width, device=bounds.device)
        cells = bounds[:-1, None] + steps
        live = steps < (bounds[1:] - bounds[:-1])[:, None]
        return cls(cells.clamp_max(tokens - 1).flatten(), live.flatten(), width, tokens)

    def spread(self, packed: Tensor) -> Tensor:
        """Packed tokens `[T, ...]` as cells `[B * width, ...]`."""
        return packed.index_select(0, self.token)

    def collect(self, cells: Tensor) -> Tensor:
        """Cells as packed tokens, exact zeros where a token belongs to no row."""
        packed = cells.new_zeros((self.tokens + 1, *cells.shape[1:]))
        place = torch.where(self.live, self.token, self.tokens)
        return packed.index_copy_(0, place, cells)[: self.tokens]


def last_steps(query_start_loc: Tensor, last: Tensor) -> Tensor:
    """The step that each row commits; -1 for a row without tokens, whose `last` is garbage."""
    empty = query_start_loc[1:] <= query_start_loc[:-1]
    return slots(last.masked_fill(empty, NONE))


@dataclass(frozen=True, slots=True)
class Span:
    """A row that has tokens `[begin, end)`, its slots, and its track points (count, slot)."""

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
class Spans:
    """The rows of a prefill that have tokens; `end` is where the pads begin.

    Vendor prefills read lengths back from the device themselves, so their adapter does too. Rows
    without tokens are left out: chunked functions compute NaN behind an empty one.
    """

    rows: tuple[Span, ...]
    end: int

    @classmethod
    def of(
        cls,
        operation: str,
        pool: int,
        tokens: int,
        src: Tensor,
        dst: Tensor,
        query_start_loc: Tensor,
        track: Tensor | None,
        name: str,
    ) -> Self:
        """Read the batch; `name` is the input that messages speak of."""
        starts, sources, targets = query_start_loc.tolist(), src.tolist(), dst.tolist()
        check_starts(operation, starts, tokens, name)
        check_slots(operation, "src", sources, pool)
        check_slots(operation, "dst", targets, pool)
        points = [] if track is None else track.tolist()
        check_track_points(operation, points, [e - b for b, e in pairwise(starts)], pool)
        rows = zip(pairwise(starts), sources, targets, strict=True)
        kept = (
            Span(begin, end, source, target, _points(points, row))
            for row, ((begin, end), source, target) in enumerate(rows)
            if end > begin
        )
        return cls(tuple(kept), starts[-1])


def _points(points: Sequence[Sequence[int]], row: int) -> tuple[tuple[int, int], ...]:
    return tuple((count, slot) for of, count, slot in points if of == row and slot >= 0)
