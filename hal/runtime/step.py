"""The device's view of a step, made in one pass and one copy from the host's batch."""

from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from hal.runtime.batch import NO_SLOT, Batch, Mode


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What operations take: i32 query_start_loc `[B+1]`, src, dst and start `[B]`, track `[M, 3]`.

    All are views of one packed buffer. `max_len` is the longest row, known on the host.
    """

    mode: Mode
    rows: int
    tokens: int
    max_len: int
    query_start_loc: Tensor
    src: Tensor
    dst: Tensor
    start: Tensor
    track: Tensor | None
    pads: Tensor | None
    """bool `[B]`, the pad rows of a DECODE step; None where there are none."""
    lengths: tuple[int, ...] = ()
    parents: Tensor | None = None
    """i32 `[T]` in a VERIFY step of trees, row-relative; None for chains."""
    copies: tuple[Tensor, Tensor] | None = None
    """In a DECODE step the slots to copy from and to, once the tracked rows have moved on."""

    def track_decode(self, state: Tensor) -> None:
        """Keep the tracked rows' new states; no other row writes or reads the slots."""
        if self.copies is not None:
            sources, targets = self.copies
            state[targets] = state[sources]

    def clear_pads(self, out: Tensor) -> Tensor:
        """Zero what belongs to no row, in place: 0 * NaN in a gate would have left NaN there."""
        if self.pads is not None:
            out.masked_fill_(self.pads.view(-1, *[1] * (out.ndim - 1)), 0)
        if out.shape[0] > self.tokens:
            out[self.tokens :].zero_()
        return out


def make_step(batch: Batch, device: torch.device) -> Step:
    """Pack a checked batch; rows without tokens get no slots, so that nothing can address them."""
    rows, lengths = batch.rows, _lengths(batch)
    starts = [0, *accumulate(lengths)]
    src = [max(s, NO_SLOT) if n else NO_SLOT for s, n in zip(batch.src, batch.lengths, strict=True)]
    dst = [max(s, NO_SLOT) if n else NO_SLOT for s, n in zip(batch.dst, batch.lengths, strict=True)]
    points = [(row, pos - batch.start[row], slot) for row, pos, slot in batch.track if slot >= 0]
    parents = list(chain.from_iterable(batch.parents or ()))
    flat = list(chain(starts, src, dst, batch.start, chain.from_iterable(points), parents))
    packed = torch.tensor(flat, dtype=torch.int32).to(device)
    cuts = [rows + 1, rows, rows, rows, 3 * len(points), len(parents)]
    query_start_loc, src_ids, dst_ids, start, track, links = packed.split_with_sizes(cuts)
    return Step(
        batch.mode,
        rows,
        starts[-1],
        max(lengths, default=0),
        query_start_loc,
        src_ids,
        dst_ids,
        start,
        track.view(-1, 3) if points else None,
        (src_ids < 0) & (dst_ids < 0) if _has_pads(batch) else None,
        tuple(lengths),
        links if batch.parents is not None else None,
        _copies(batch, points, device),
    )


def _copies(
    batch: Batch, points: list[tuple[int, int, int]], device: torch.device
) -> tuple[Tensor, Tensor] | None:
    if batch.mode is not Mode.DECODE or not points:
        return None
    slots = [[batch.dst[row] for row, _, _ in points], [slot for _, _, slot in points]]
    sources, targets = torch.tensor(slots, dtype=torch.long).to(device)
    return sources, targets


def _has_pads(batch: Batch) -> bool:
    return batch.mode is Mode.DECODE and any(
        s < 0 and d < 0 for s, d in zip(batch.src, batch.dst, strict=True)
    )


def _lengths(batch: Batch) -> list[int]:
    """Tokens that each row takes in the packed input; a DECODE pad takes one."""
    return [1] * batch.rows if batch.mode is Mode.DECODE else list(batch.lengths)
