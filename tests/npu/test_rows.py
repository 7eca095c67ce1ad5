"""Scratch rows: what is gathered, spread, cut and scattered around the vendor's functions."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from hal_npu.chunked import rounds
from hal_npu.operands import EPS_OUTSIDE, normed, squared, stretch
from hal_npu.rows import Grid, Span, gather, last_steps, scatter, slots, without_pads
from hal_npu.scratch import scratch_of

LENGTHS = st.lists(st.integers(0, 5), max_size=6)
IDS = st.lists(st.integers(-9, 4), min_size=1, max_size=6)


def bounds(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()


@given(LENGTHS, st.integers(0, 3), st.integers(0, 3))
def test_a_grid_gives_back_every_token_and_zeros_elsewhere(
    lengths: list[int], pads: int, room: int
) -> None:
    tokens, width = sum(lengths) + pads, max([1, *lengths]) + room
    if not tokens:
        return
    packed = 1 + torch.arange(tokens * 2, dtype=torch.float32).view(tokens, 2)
    grid = Grid.of(bounds(lengths), tokens, width)
    cells = grid.spread(packed)
    assert cells.shape == (len(lengths) * width, 2)
    back = grid.collect(cells)
    assert torch.equal(back[: sum(lengths)], packed[: sum(lengths)])
    assert not back[sum(lengths) :].any()


@given(LENGTHS, st.integers(1, 5))
def test_live_cells_stand_in_front_of_those_without_a_token(lengths: list[int], pads: int) -> None:
    width = max([1, *lengths])
    grid = Grid.of(bounds(lengths), sum(lengths) + pads, width)
    live = grid.live.view(-1, width)
    assert live.sum(1).tolist() == lengths
    assert all((~row[n:]).all() for row, n in zip(live, lengths, strict=True))


@given(IDS)
def test_gathered_rows_are_the_slots_or_zeros_whatever_lies_there(ids: list[int]) -> None:
    pool = torch.arange(20.0).view(5, 4) + 1
    if min(ids) < 0:
        pool[0] = torch.nan
    rows = gather(pool, torch.tensor(ids, dtype=torch.int32))
    for row, slot in zip(rows, ids, strict=True):
        if slot < 0:
            assert not row.any()
        elif slot > 0:
            assert torch.equal(row, pool[slot])


@given(st.lists(st.integers(-3, 4), min_size=1, max_size=5, unique=True))
def test_scattered_rows_go_to_their_slots_and_nowhere_else(ids: list[int]) -> None:
    pool, ends = torch.zeros(5, 2), 1 + torch.arange(len(ids) * 2.0).view(-1, 2)
    scatter(pool, ids, ends)
    for slot in range(5):
        want = ends[ids.index(slot)] if slot in ids else torch.zeros(2)
        assert torch.equal(pool[slot], want)


@given(IDS)
def test_every_negative_id_becomes_minus_one_and_no_other_changes(ids: list[int]) -> None:
    found = slots(torch.tensor(ids, dtype=torch.int32))
    assert found.dtype == torch.int64
    assert found.tolist() == [max(slot, -1) for slot in ids]


@given(st.lists(st.tuples(st.integers(-1, 1), st.integers(-1, 1)), min_size=1, max_size=6))
def test_rows_without_both_slots_are_zero_though_they_hold_nan(
    pairs: list[tuple[int, int]],
) -> None:
    src, dst = (torch.tensor(side, dtype=torch.int32) for side in zip(*pairs, strict=True))
    result = without_pads(torch.full((len(pairs), 2, 3), torch.nan), src, dst)
    for row, pair in zip(result, pairs, strict=True):
        assert (row == 0).all() if max(pair) < 0 else row.isnan().all()


@given(LENGTHS, st.integers(-1, 99))
def test_a_row_without_tokens_commits_no_step(lengths: list[int], garbage: int) -> None:
    last = [n - 1 if n else garbage for n in lengths]
    found = last_steps(bounds(lengths), torch.tensor(last, dtype=torch.int32))
    assert found.tolist() == [n - 1 for n in lengths]


TRACKED = st.lists(
    st.integers(1, 9).flatmap(
        lambda n: st.tuples(st.just(n), st.lists(st.integers(1, n), max_size=3, unique=True))
    ),
    max_size=4,
)


@given(TRACKED)
def test_rows_are_cut_at_their_track_points_in_order(rows: list[tuple[int, list[int]]]) -> None:
    starts = [0, *torch.tensor([0] + [n for n, _ in rows]).cumsum(0).tolist()[1:]]
    spans = tuple(
        Span(begin, end, 1, 2, tuple((count, 10 + count) for count in counts))
        for (begin, end), (_, counts) in zip(pairwise(starts), rows, strict=True)
    )
    pieces = [piece for turn in rounds(spans) for piece in turn]
    for place, span in enumerate(spans):
        own = [piece for piece in pieces if piece.place == place]
        ends = [piece.end - span.begin for piece in own]
        assert ends == sorted({span.length, *(count for count, _ in span.track)})
        assert [piece.begin for piece in own] == [span.begin, *(piece.end for piece in own[:-1])]
        assert own[-1].keep[-1] == span.dst
        kept = {slot for piece in own for slot in piece.keep} - {span.dst}
        assert kept == {slot for _, slot in span.track}
    assert all(len({piece.place for piece in turn}) == len(turn) for turn in rounds(spans))


@given(st.floats(-8, 3), st.booleans())
def test_a_stretched_unit_is_the_key_of_the_contract(power: float, norm: bool) -> None:
    key = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(1)) * 10**power
    unit = key / (squared(key).sqrt() + EPS_OUTSIDE)
    torch.testing.assert_close(unit * stretch(key, norm), normed(key, norm), rtol=1e-5, atol=0)


def test_a_key_of_zeros_is_stretched_without_a_division_by_zero() -> None:
    for norm in (True, False):
        assert (stretch(torch.zeros(1, 4), norm) > 0).all()


def test_scratch_holds_windows_by_channel_and_states_by_value_in_any_layout() -> None:
    for conv, recurrent in (("CW", "VK"), ("WC", "KV")):
        layouts = {"conv": conv, "recurrent": recurrent}
        shapes = {
            "conv": (6, 3) if conv == "CW" else (3, 6),
            "recurrent": (2, 5, 4) if recurrent == "VK" else (2, 4, 5),
        }
        (windows,) = scratch_of("conv", shapes, layouts, 7, 2)
        (states,) = scratch_of("delta_rule", shapes, layouts, 7, 2)
        assert windows.shape == (7, 2, 6, 3)
        assert states.shape == (7, 2, 2, 5, 4)
        assert {windows.dtype, states.dtype} == {"float32"}
    assert scratch_of("scan", {"scan": (1, 2, 3)}, layouts, 7, 2) == ()
