"""Rows, slots and pools of a case, with poison wherever nobody may look."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final, cast

import torch
from torch import Tensor

NAN: Final = float("nan")
ROW_KINDS: Final = ("fresh", "continue", "fork", "stateless", "score")


def i32(*values: int) -> Tensor:
    """An int32 index tensor."""
    return torch.tensor(values, dtype=torch.int32)


@dataclass(frozen=True, slots=True)
class Rows:
    """Slots and bounds of a batch. `pads` tokens follow the last row."""

    lengths: tuple[int, ...]
    src: tuple[int, ...]
    dst: tuple[int, ...]
    start: tuple[int, ...]
    slots: int
    pads: int = 0

    @property
    def bounds(self) -> tuple[int, ...]:
        """query_start_loc as host integers."""
        return tuple(accumulate(self.lengths, initial=0))

    @property
    def tokens(self) -> int:
        """Packed tokens, pads included."""
        return self.bounds[-1] + self.pads

    def spans(self) -> list[slice]:
        """The tokens of each row."""
        return [slice(b, e) for b, e in pairwise(self.bounds)]

    def ends(self, track: Tensor | None) -> dict[int, int]:
        """The slots that a call has to write, with the position that each has seen afterwards."""
        found = {
            dst: start + n
            for dst, start, n in zip(self.dst, self.start, self.lengths, strict=True)
            if dst >= 0 and n
        }
        points = [] if track is None else track.tolist()
        tracked = {slot: self.start[row] + n for row, n, slot in points if slot >= 0}
        return found | tracked

    def written(self, track: Tensor | None) -> set[int]:
        """Slots that a call may change, the sink included."""
        return {0, *self.ends(track)}

    def live(self, *, decode: bool) -> list[int]:
        """Tokens that belong to a row; a row of a decode without any slot is padding."""
        rows = zip(self.spans(), self.src, self.dst, strict=True)
        return [
            token
            for span, src, dst in rows
            if not decode or src >= 0 or dst >= 0
            for token in range(span.start, span.stop)
        ]


def make_rows(
    rows: Sequence[tuple[int, str]], *, seed: int = 0, pads: int = 0, spare: int = 4
) -> Rows:
    """Give rows of (length, kind) distinct slots in an order that is never the rows' own.

    A "twin" reads the slot of the first "fork" before it.
    """
    free = torch.randperm(2 * len(rows) + spare, generator=torch.Generator().manual_seed(seed))
    ids = [int(i) + 1 for i in free]
    if ids == sorted(ids):
        ids.reverse()
    src, dst, start = [], [], []
    for i, (_, kind) in enumerate(rows):
        old, new = ids[2 * i], ids[2 * i + 1]
        src.append(-1 if kind in ("fresh", "score", "pad") else old)
        dst.append({"continue": old, "fresh": new, "fork": new, "twin": new}.get(kind, -1))
        start.append(0 if src[-1] < 0 else 3 + 7 * i)
        if kind == "twin" and (forks := [row for row in range(i) if rows[row][1] == "fork"]):
            src[i], start[i] = src[forks[0]], start[forks[0]]
    lengths = tuple(length for length, _ in rows)
    return Rows(lengths, tuple(src), tuple(dst), tuple(start), len(ids) + 1, pads)


def poisoned_pool(
    rows: Rows, shape: Sequence[int], dtype: torch.dtype, gen: torch.Generator, pad: int = 0
) -> Tensor:
    """A pool of NaN whose `src` slots hold values; `pad` leaves NaN between its innermost rows."""
    whole = torch.full((rows.slots, *shape[:-1], shape[-1] + pad), NAN, dtype=dtype)
    pool = whole[..., : shape[-1]]
    for slot in set(rows.src) - {-1}:
        pool[slot] = torch.randn(tuple(shape), generator=gen).to(dtype)
    return pool


def whole_of(view: Tensor) -> Tensor:
    """Every byte of the storage under a view, as integers."""
    storage = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage())
    return storage.view({4: torch.int32, 2: torch.int16}[view.element_size()])


def clone_view(view: Tensor) -> Tensor:
    """The same view on a copy of the whole storage."""
    storage = cast(torch.UntypedStorage, view.untyped_storage().clone())  # type: ignore[no-untyped-call]
    copy = torch.empty(0, dtype=view.dtype).set_(storage)
    return copy.as_strided(view.shape, view.stride(), view.storage_offset())


def changed_outside(before: Tensor, after: Tensor, slots: set[int]) -> int:
    """How many elements differ outside the given slots, memory between the slots included."""
    marks = clone_view(after)
    for slot in slots:
        marks[slot] = before[slot]
    return int((whole_of(marks) != whole_of(before)).sum())


def packed(values: Tensor, rows: Rows, gap: int = 0) -> Tensor:
    """Rows' tokens with NaN pads behind; `gap` makes it a column slice of a wider NaN tensor."""
    values[rows.bounds[-1] :] = NAN
    if not gap:
        return values
    flat = values.flatten(1)
    wide = torch.full((flat.shape[0], flat.shape[1] + 2 * gap), NAN, dtype=values.dtype)
    wide[:, gap : gap + flat.shape[1]] = flat
    view = wide[:, gap : gap + flat.shape[1]]
    return view.view(-1, *values.shape[1:])


def index_args(rows: Rows, decode: bool, strided: bool) -> dict[str, Any]:
    """Slots and bounds as operators take them; `strided` puts live ids of 99 between them."""

    def index(values: Sequence[int]) -> Tensor:
        ids = i32(*values)
        return torch.stack((ids, torch.full_like(ids, 99)), 1)[:, 0] if strided else ids

    args: dict[str, Any] = {"src": index(rows.src), "dst": index(rows.dst)}
    if not decode:
        args |= {"query_start_loc": index(rows.bounds), "max_len": max((1, *rows.lengths))}
    return args
