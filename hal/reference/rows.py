"""The row rule: which tokens, slots and track points belong to a row."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens `[begin, end)` of a row, its slots, and the (count, slot) pairs to track."""

    index: int
    begin: int
    end: int
    src: int
    dst: int
    track: tuple[tuple[int, int], ...]

    def keeps(self, count: int) -> list[int]:
        """The slots that hold the state after `count` tokens of this row."""
        tracked = [slot for at, slot in self.track if at == count and slot >= 0]
        last = [self.dst] if count == self.end - self.begin and self.dst >= 0 else []
        return tracked + last


def rows(
    src: Tensor, dst: Tensor, query_start_loc: Tensor, track: Tensor | None = None
) -> Iterator[Row]:
    """The rows of a packed batch, in order; one without tokens keeps nothing."""
    starts = query_start_loc.tolist()
    points = [] if track is None else track.tolist()
    for i, slots in enumerate(zip(src.tolist(), dst.tolist(), strict=True)):
        mine = tuple((count, slot) for row, count, slot in points if row == i)
        yield Row(i, starts[i], starts[i + 1], *slots, mine)


def token_rows(src: Tensor, dst: Tensor) -> Tensor:
    """`query_start_loc` of a decode batch with its pad rows (neither slot) made empty."""
    live = (src >= 0) | (dst >= 0)
    return torch.cat((torch.zeros(1, dtype=torch.int64), live.cumsum(0)))


def live_tokens(src: Tensor, dst: Tensor) -> Tensor:
    """The tokens of a decode batch that belong to a row with a slot."""
    return ((src >= 0) | (dst >= 0)).nonzero().flatten()


def spread(packed: Tensor, tokens: Tensor, count: int) -> Tensor:
    """Put the live tokens' results back among `count` tokens; the others are zero."""
    result = packed.new_zeros(count, *packed.shape[1:])
    result[tokens] = packed
    return result
