"""The same work asked for in another way: fewer rows, other slots, pieces, other garbage."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hal.testing.case import Case
from hal.testing.rows import NAN, clone_view, i32

ROW_ARGS = ("src", "dst", "start")


def pick(case: Case, rows: Sequence[int]) -> Case:
    """The given rows alone, in this order, with the same slots and pools and without pads."""
    old, spans = case.rows, case.rows.spans()
    named = ("lengths", *ROW_ARGS)
    kept = {name: tuple(getattr(old, name)[row] for row in rows) for name in named}
    new = replace(old, **kept, pads=0)  # type: ignore[arg-type]
    tokens = [token for row in rows for token in range(spans[row].start, spans[row].stop)]
    args: dict[str, Any] = {name: value[tokens] for name, value in case.tokens.items()}
    args |= {name: i32(*kept[name]) for name in ROW_ARGS if name in case.args}
    if not case.decode:
        args |= {"query_start_loc": i32(*new.bounds), "max_len": max((1, *new.lengths))}
    return replace(case, rows=new).replace(**args)


def piece(case: Case, begin: int, stop: int) -> Case:
    """Tokens `[begin, stop)` of a case of one row; all but the first piece continue in `dst`."""
    row = case.rows
    src = row.src if begin == 0 else row.dst
    start = (row.start[0] + begin,)
    new = replace(row, lengths=(stop - begin,), src=src, start=start, pads=0)
    args: dict[str, Any] = {name: value[begin:stop] for name, value in case.tokens.items()}
    args |= {"src": i32(*src), "query_start_loc": i32(0, stop - begin), "max_len": stop - begin}
    if "start" in case.args:
        args["start"] = i32(*start)
    return replace(case, rows=new).replace(**args)


def with_pads(case: Case, value: float) -> Case:
    """Every token that belongs to no row holds `value`."""
    live = case.rows.live(decode=case.decode)
    pads = [token for token in range(case.rows.tokens) if token not in live]
    args = {name: clone_view(tensor) for name, tensor in case.tokens.items()}
    for tensor in args.values():
        tensor[pads] = value
    return case.replace(**args)


def with_row(case: Case, row: int, value: float) -> Case:
    """One row's tokens hold `value`."""
    args = {name: clone_view(tensor) for name, tensor in case.tokens.items()}
    for tensor in args.values():
        tensor[case.rows.spans()[row]] = value
    return case.replace(**args)


def with_free(case: Case, seed: int = 0) -> Case:
    """Slots that no row reads hold finite numbers instead of NaN, so that arithmetic shows."""
    gen = torch.Generator().manual_seed(seed)
    args = {}
    for name in case.pools:
        pool = args[name] = clone_view(case.args[name])
        free = [slot for slot in range(pool.shape[0]) if slot not in case.rows.src]
        noise = torch.randn((len(free), *pool.shape[1:]), generator=gen)
        pool[free] = noise.to(pool.dtype)
    return case.replace(**args)


def with_slots(case: Case, order: Sequence[int]) -> Case:
    """Slot s becomes slot `order[s]`, with what it holds."""
    place = torch.tensor(order).argsort()
    src, dst = _renamed(case.rows.src, order), _renamed(case.rows.dst, order)
    ids = {"src": i32(*src), "dst": i32(*dst)}
    args: dict[str, Any] = {name: case.args[name][place] for name in case.pools}
    rows = replace(case.rows, src=src, dst=dst)
    return replace(case, rows=rows).replace(**args, **ids)


def _renamed(slots: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    return tuple(order[slot] if slot >= 0 else slot for slot in slots)


def without_rows(case: Case) -> Case:
    """No rows and no tokens."""
    return pick(case, [])


def pads_alone(case: Case, count: int) -> Case:
    """No rows, and tokens that belong to none; the first ones of the case."""
    empty = pick(case, [])
    tokens = {name: clone_view(value[:count]) for name, value in case.tokens.items()}
    return replace(empty, rows=replace(empty.rows, pads=count)).replace(**tokens)


def with_none(case: Case, value: int) -> Case:
    """Absent slots are written in another way."""
    ids = {name: case.args[name] for name in ("src", "dst")}
    return case.replace(
        **{name: torch.where(t < 0, value, t).to(torch.int32) for name, t in ids.items()}
    )


def with_start(case: Case, row: int, value: float) -> Case:
    """The start state of one row holds `value`."""
    args = {name: clone_view(case.args[name]) for name in case.pools}
    for pool in args.values():
        pool[case.rows.src[row]] = value
    return case.replace(**args)


def own_sources(case: Case) -> list[int]:
    """Rows with tokens whose start state no other row reads."""
    src = case.rows.src
    return [row for row in filled(case) if src[row] >= 0 and src.count(src[row]) == 1]


def spread(case: Case, gap: int = 8) -> Case:
    """Slots of dense memory that lie apart behind an offset, as in pages that layers share."""
    args = {}
    for name in case.pools:
        pool = case.args[name]
        slots, *inner = pool.shape
        size = pool[0].numel()
        whole = torch.full((slots + 1, size + gap), NAN, dtype=pool.dtype)
        args[name] = whole[1:, gap:].view(slots, *inner)
        args[name].copy_(pool)
    return case.replace(**args)


def filled(case: Case) -> list[int]:
    """Rows that have tokens and a slot."""
    return [
        row
        for row, n in enumerate(case.rows.lengths)
        if n and max(case.rows.src[row], case.rows.dst[row]) >= 0
    ]


def as_decode(case: Case) -> Case:
    """A case of one-token rows as the decode of its interface takes it."""
    dropped = ("query_start_loc", "max_len")
    args = {n: v for n, v in case.args.items() if n not in dropped}
    return replace(case, args=args, operation=case.operation.replace("prefill", "decode"))
