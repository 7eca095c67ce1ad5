"""The CPU scan equals the float64 oracle over kinds, dtypes, limits, groups and lengths."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hal.testing.case import Case
from hal.testing.metric import worst
from hal.testing.rows import NAN, ROW_KINDS, changed_outside, clone_view, i32, make_rows
from hal.testing.scan_cases import Scan, scan_case
from hal_cpu.provider import TorchProvider
from hal_cpu.recurrent import IN_PLACE_ELEMENTS
from hal_cpu.scan_chunk import HEAD_CHUNK

SCAN = TorchProvider("cpu", {}).scan
C, INF = HEAD_CHUNK, float("inf")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LIMITS = ((0.0, INF), (0.0, 0.1), (0.5, INF), (1e-3, INF))
MIXED = make_rows(
    [(C, "continue"), (1, "fork"), (0, "continue"), (C + 1, "fresh"), (1, "continue"),
     (3, "stateless"), (C - 1, "fork"), (1, "score"), (2, "fresh"), (0, "fork"), (1, "fresh")],
    seed=3, pads=3,
)  # fmt: skip
ROWS = make_rows(
    [(1, "continue"), (1, "fresh"), (1, "pad"), (1, "fork"), (1, "stateless"), (1, "pad")], seed=4
)
LARGE = Scan(H=8, P=64, N=128)
KINDS = {
    "mamba2": Scan(),
    "one group": Scan(G=1),
    "gated": Scan(z=True),
    "bare": Scan(D=False, dt_bias=False),
    "plain dt": Scan(dt_softplus=False, dt_limit=(1e-3, 0.5)),
    "large": LARGE,
    "mamba1": Scan(kind="mamba1", G=1, z=True),
    "zamba": Scan(kind="mamba1", G=4),
    "lightning": Scan(kind="lightning"),
}
search = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
DIMS = st.builds(
    Scan,
    kind=st.sampled_from(["mamba2", "mamba1", "lightning"]),
    H=st.sampled_from([2, 4]),
    P=st.sampled_from([16, 24, 48]),
    N=st.sampled_from([16, 32]),
    G=st.sampled_from([1, 2]),
    dt_limit=st.sampled_from(LIMITS),
    D=st.booleans(),
    z=st.booleans(),
)
LENGTHS = st.one_of(st.integers(0, 6), st.sampled_from([31, 63, 64, 65, 130]))
BATCHES = st.lists(st.tuples(LENGTHS, st.sampled_from(ROW_KINDS)), min_size=1, max_size=4)
STEPS = st.lists(
    st.tuples(st.just(1), st.sampled_from([*ROW_KINDS[:4], "pad"])), min_size=1, max_size=6
)


def call_of(case: Case) -> Any:
    return SCAN.decode if case.decode else SCAN.prefill


def test_the_dims_of_this_sweep_reach_both_ways_to_decode() -> None:
    small = Scan()
    assert small.H * small.P * small.N < IN_PLACE_ELEMENTS <= LARGE.H * LARGE.P * LARGE.N


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", KINDS)
def test_mixed_rows_equal_the_oracle(name: str, dtype: torch.dtype) -> None:
    scan_case(MIXED, KINDS[name], dtype=dtype).check(SCAN.prefill)
    scan_case(ROWS, KINDS[name], dtype=dtype, decode=True).check(SCAN.decode)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("G", [1, 2])
@pytest.mark.parametrize("kind", ["mamba2", "mamba1"])
def test_the_dt_limit_binds_in_prefill_and_in_decode(
    kind: str, G: int, limit: tuple[float, float]
) -> None:
    dims = Scan(kind=kind, G=G, dt_limit=limit)
    scan_case(MIXED, dims).check(SCAN.prefill)
    scan_case(ROWS, dims, decode=True).check(SCAN.decode)


@pytest.mark.parametrize("limit", [(0.0, 0.1), (0.5, INF)])
@pytest.mark.parametrize("decode", [False, True])
def test_the_limits_of_this_sweep_bind(limit: tuple[float, float], decode: bool) -> None:
    case = scan_case(ROWS if decode else MIXED, Scan(dt_limit=limit), decode=decode)
    free, _ = replace(case, options={**case.options, "dt_limit": (0.0, INF)}).expect()
    bound, _ = case.expect()
    assert worst(free, bound, 0) > 1e-2


@pytest.mark.parametrize("length", [1, 2, C - 1, C, C + 1, 257])
@pytest.mark.parametrize("kind", ["fresh", "fork"])
@pytest.mark.parametrize("scan", ["mamba2", "mamba1", "lightning"])
def test_lengths_around_the_chunk_are_right(scan: str, kind: str, length: int) -> None:
    scan_case(make_rows([(length, kind)]), Scan(kind=scan)).check(SCAN.prefill)


def test_mamba1_chunks_of_every_size_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    case = scan_case(MIXED, Scan(kind="mamba1"))
    for elements in (1, 32 * 16 * 3, 1 << 30):
        monkeypatch.setattr("hal_cpu.scan_chunk.CHANNEL_ELEMENTS", elements)
        case.check(SCAN.prefill)


@pytest.mark.slow
def test_long_rows_of_served_dims_stay_within_the_limits() -> None:
    scan_case(make_rows([(1024, "fork")]), Scan(H=2, P=64, N=64, G=2)).check(SCAN.prefill)


@pytest.mark.parametrize("scan", ["mamba2", "lightning"])
def test_slow_decays_over_a_long_row_keep_their_digits(scan: str) -> None:
    case = scan_case(make_rows([(700, "fork")]), Scan(kind=scan, H=2))
    case.replace(A=torch.full((2,), -1e-4)).check(SCAN.prefill)


def test_float32_steps_beside_bfloat16_inputs_are_used_as_they_are() -> None:
    case = scan_case(MIXED, Scan(), dtype=torch.bfloat16)
    case.replace(dt=torch.randn(case.args["dt"].shape)).check(SCAN.prefill)


@pytest.mark.parametrize("scan", ["mamba2", "mamba1"])
def test_strong_decays_are_finite_and_right(scan: str) -> None:
    case = scan_case(make_rows([(130, "fork"), (1, "fork")]), Scan(kind=scan, dt_bias=False))
    dt = case.args["dt"].clone()
    dt[5:9], dt[64] = 60.0, 200.0
    case.replace(dt=dt).check(SCAN.prefill)


@pytest.mark.parametrize("scan", ["mamba2", "mamba1", "lightning"])
def test_track_stores_the_state_of_the_prefix_at_any_count(scan: str) -> None:
    rows = make_rows([(70, "fork"), (1, "fresh"), (9, "stateless"), (0, "continue")], spare=12)
    unused = [s for s in range(1, rows.slots) if s not in {*rows.src, *rows.dst}]
    points = [(0, 1), (0, 33), (0, 64), (0, 70), (1, 1), (2, 9), (2, 4)]
    track = [[row, count, unused[i]] for i, (row, count) in enumerate(points)]
    track = torch.tensor([*track, [0, 5, -1]], dtype=torch.int32)
    scan_case(rows, Scan(kind=scan), track=track).check(SCAN.prefill)


@pytest.mark.parametrize("scan", ["mamba2", "mamba1", "lightning"])
@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("gap", [1, 3])
def test_column_slices_padded_pools_and_strided_indices_are_read_in_place(
    scan: str, decode: bool, gap: int
) -> None:
    dims, rows = Scan(kind=scan, z=True), ROWS if decode else MIXED
    case = scan_case(rows, dims, decode=decode, gap=gap, strided=True)
    case.check(call_of(case))


@pytest.mark.parametrize("dims", [Scan(), LARGE, Scan(kind="mamba1")], ids=str)
@pytest.mark.parametrize("decode", [False, True])
def test_a_transposed_pool_gets_the_writes_in_its_own_storage(dims: Scan, decode: bool) -> None:
    case = scan_case(ROWS if decode else MIXED, dims, decode=decode)
    view = case.args["state"].transpose(-1, -2).contiguous().transpose(-1, -2)
    case.replace(state=view).check(call_of(case))


@pytest.mark.parametrize("name", KINDS)
def test_inputs_are_left_as_they_were(name: str) -> None:
    for case in (scan_case(MIXED, KINDS[name]), scan_case(ROWS, KINDS[name], decode=True)):
        before = {n: v.clone() for n, v in case.args.items() if isinstance(v, torch.Tensor)}
        case.run(call_of(case))
        for key, tensor in before.items():
            assert torch.equal(case.args[key].nan_to_num(), tensor.nan_to_num()), key


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("scan", ["mamba2", "mamba1"])
def test_nan_of_one_row_stays_in_that_row(scan: str, row: int) -> None:
    rows = make_rows([(70, "fork"), (70, "fork"), (1, "fork"), (1, "fresh")])
    case = scan_case(rows, Scan(kind=scan))
    clean, _ = case.run(SCAN.prefill)
    hot = case.args["x"].clone()
    hot[rows.spans()[row]] = NAN
    got, _ = case.replace(x=hot).run(SCAN.prefill)
    for i, span in enumerate(rows.spans()):
        assert got[span].isnan().all() if i == row else torch.equal(got[span], clean[span])


@pytest.mark.parametrize("scan", ["mamba2", "mamba1", "lightning"])
def test_empty_batches_give_empty_results_and_write_nothing(scan: str) -> None:
    for rows in (make_rows([]), make_rows([(0, "fork"), (0, "fresh")], pads=3)):
        case = scan_case(rows, Scan(kind=scan))
        got, state = case.run(SCAN.prefill)
        assert torch.equal(got, torch.zeros_like(got))
        assert changed_outside(case.args["state"], state, set()) == 0
    case = scan_case(make_rows([]), Scan(kind=scan), decode=True)
    assert case.run(SCAN.decode)[0].shape[0] == 0


@search
@given(batch=BATCHES, dims=DIMS, seed=st.integers(0, 99))
def test_any_prefill_equals_the_oracle(batch: list, dims: Scan, seed: int) -> None:
    scan_case(make_rows(batch, seed=seed, pads=seed % 4), dims, seed=seed).check(SCAN.prefill)


@search
@given(batch=STEPS, dims=DIMS, seed=st.integers(0, 99))
def test_any_decode_equals_the_oracle(batch: list, dims: Scan, seed: int) -> None:
    scan_case(make_rows(batch, seed=seed), dims, seed=seed, decode=True).check(SCAN.decode)


@search
@given(batch=BATCHES, dims=DIMS, seed=st.integers(0, 99), decode=st.booleans())
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    batch: list, dims: Scan, seed: int, decode: bool
) -> None:
    batch = [(1 if decode else length, kind) for length, kind in batch]
    case = scan_case(make_rows(batch, seed=seed), dims, seed=seed, decode=decode)
    together, end = case.run(call_of(case))
    for row, span in enumerate(case.rows.spans()):
        one = {name: (getattr(case.rows, name)[row],) for name in ("lengths", "src", "dst")}
        args: dict[str, Any] = {name: tensor[span] for name, tensor in case.tokens.items()}
        args |= {name: i32(*one[name]) for name in ("src", "dst")}
        bounds = {} if decode else {"query_start_loc": i32(0, span.stop - span.start)}
        alone, state = case.replace(**args, **bounds).run(call_of(case))
        assert torch.equal(together[span], alone)
        if case.rows.dst[row] >= 0 and span.stop > span.start:
            assert torch.equal(end[case.rows.dst[row]], state[case.rows.dst[row]])


@search
@given(
    length=st.integers(2, 140),
    cuts=st.sets(st.integers(1, 139), max_size=4),
    dims=DIMS,
    kind=st.sampled_from(["fresh", "fork"]),
)
def test_any_cut_of_a_row_gives_the_same_results(
    length: int, cuts: set, dims: Scan, kind: str
) -> None:
    case = scan_case(make_rows([(length, kind)]), dims)
    want, end = case.expect()
    state, src, dst = clone_view(case.args["state"]), case.args["src"], case.args["dst"]
    parts = []
    for begin, stop in pairwise([0, *sorted(cut for cut in cuts if cut < length), length]):
        cut = {name: tensor[begin:stop] for name, tensor in case.tokens.items()}
        args = {**case.args, **cut, "query_start_loc": i32(0, stop - begin), "state": state}
        parts.append(SCAN.prefill(**{**args, "src": src}, **case.options))
        src = dst
    groups = 2 if case.heads else 1
    got = torch.cat(parts)
    swap = (got.transpose(0, 1), want.transpose(0, 1)) if case.heads else (got, want)
    assert worst(*swap, 1 if case.heads else 0) <= 1e-5
    assert worst(state[dst], end[dst], groups) <= 1e-5


@pytest.mark.parametrize("scan", ["mamba2", "mamba1", "lightning"])
def test_sixty_four_decodes_in_place_stay_within_the_limits(scan: str) -> None:
    case = scan_case(make_rows([(64, "continue")]), Scan(kind=scan))
    want, end = case.expect()
    state, slot = clone_view(case.args["state"]), case.args["dst"]
    fixed = {n: case.args[n] for n in ("A", "D", "dt_bias")}
    got = []
    for t in range(64):
        token = {n: None if case.args[n] is None else case.args[n][t : t + 1] for n in
                 ("x", "dt", "B", "C", "z")}  # fmt: skip
        got.append(SCAN.decode(**token, **fixed, state=state, src=slot, dst=slot, **case.options))
    done = torch.cat(got)
    assert worst(done.transpose(0, 1), want.transpose(0, 1), 1) <= 1e-5
    assert worst(state[slot], end[slot], 2) <= 1e-5
