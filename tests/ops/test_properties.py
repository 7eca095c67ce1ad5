"""Invariances that no example list covers: split, batch, pad, slot and view, by search."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hal.model.spec import GateKind
from hal_cpu.provider import TorchProvider
from support.ops import (
    LIMITS,
    ROW_KINDS,
    Case,
    Delta,
    Rows,
    clone_view,
    conv_case,
    delta_case,
    i32,
    make_rows,
    worst,
)

PROVIDER = TorchProvider("cpu", {})
CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "conv.prefill": PROVIDER.conv.prefill,
    "conv.decode": PROVIDER.conv.decode,
    "delta_rule.prefill": PROVIDER.delta_rule.prefill,
    "delta_rule.decode": PROVIDER.delta_rule.decode,
}
TOKENS = ("x", "q", "k", "v", "a", "b")
search = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)

LENGTHS = st.one_of(st.integers(0, 6), st.sampled_from([15, 16, 17, 63, 64, 65, 130]))
BATCHES = st.lists(st.tuples(LENGTHS, st.sampled_from(ROW_KINDS)), min_size=1, max_size=5)
STEPS = st.lists(
    st.tuples(st.just(1), st.sampled_from([*ROW_KINDS[:4], "pad"])), min_size=1, max_size=6
)
DIMS = st.builds(
    Delta,
    H=st.integers(1, 2),
    HV=st.sampled_from([2, 4]),
    K=st.sampled_from([16, 32, 96]),
    V=st.sampled_from([16, 48, 192]),
    gate=st.sampled_from([*GateKind, None]),
)
OPERATIONS = st.sampled_from(["conv", "delta"])


def build(operation: str, rows: Rows, dims: Delta, **kwargs: Any) -> Case:
    """A case of either interface."""
    if operation == "conv":
        return conv_case(rows, channels=dims.K + 5, width=2 + dims.V % 5, **kwargs)
    return delta_case(rows, dims, **kwargs)


def only(case: Case, row: int) -> Case:
    """The same row alone: its tokens, slots and the same pool."""
    rows, span = case.rows, case.rows.spans()[row]
    one = {name: (getattr(rows, name)[row],) for name in ("lengths", "src", "dst", "start")}
    args: dict[str, Any] = {n: case.args[n][span] for n in TOKENS if n in case.args}
    args |= {n: i32(*one[n]) for n in ("src", "dst", "start") if n in case.args}
    if "query_start_loc" in case.args:
        args["query_start_loc"] = i32(0, span.stop - span.start)
    return replace(case, rows=replace(rows, **one, pads=0)).replace(**args)


@search
@given(operation=OPERATIONS, batch=BATCHES, dims=DIMS, seed=st.integers(0, 99))
def test_prefill_equals_the_oracle(operation: str, batch: list, dims: Delta, seed: int) -> None:
    case = build(operation, make_rows(batch, seed=seed, pads=seed % 4), dims, seed=seed)
    case.check(CALLS[case.operation])


@search
@given(operation=OPERATIONS, batch=STEPS, dims=DIMS, seed=st.integers(0, 99))
def test_decode_equals_the_oracle(operation: str, batch: list, dims: Delta, seed: int) -> None:
    case = build(operation, make_rows(batch, seed=seed), dims, seed=seed, decode=True)
    case.check(CALLS[case.operation])


@search
@given(
    operation=OPERATIONS,
    batch=st.one_of(BATCHES, STEPS),
    dims=DIMS,
    seed=st.integers(0, 99),
    decode=st.booleans(),
)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    operation: str, batch: list, dims: Delta, seed: int, decode: bool
) -> None:
    batch = [(1 if decode else length, kind) for length, kind in batch]
    case = build(operation, make_rows(batch, seed=seed), dims, seed=seed, decode=decode)
    call = CALLS[case.operation]
    together, end = case.run(call)
    for row, span in enumerate(case.rows.spans()):
        alone, state = only(case, row).run(call)
        assert torch.equal(together[span], alone)
        if case.rows.dst[row] >= 0 and span.stop > span.start:
            assert torch.equal(end[case.rows.dst[row]], state[case.rows.dst[row]])


@search
@given(
    operation=OPERATIONS,
    length=st.integers(2, 140),
    cuts=st.sets(st.integers(1, 139), max_size=5),
    dims=DIMS,
    seed=st.integers(0, 99),
    kind=st.sampled_from(["fresh", "fork"]),
)
def test_any_cut_of_a_row_gives_the_same_results(
    operation: str, length: int, cuts: set, dims: Delta, seed: int, kind: str
) -> None:
    case = build(operation, make_rows([(length, kind)], seed=seed), dims, seed=seed)
    call, state = CALLS[case.operation], clone_view(case.args["state"])
    want, end = case.expect()
    bounds = [0, *sorted(cut for cut in cuts if cut < length), length]
    src, dst = case.args["src"], case.args["dst"]
    parts = []
    for begin, stop in pairwise(bounds):
        cut = {n: case.args[n][begin:stop] for n in TOKENS if n in case.args}
        args = {**case.args, **cut, "query_start_loc": i32(0, stop - begin), "state": state}
        parts.append(call(**{**args, "src": src}, **case.options))
        src = dst
    limit = LIMITS["float32", "one rounding"][0]
    groups = 2 if operation == "delta" else 1
    swap = torch.cat(parts).transpose(0, 1), want.transpose(0, 1)
    assert worst(*swap, 1) <= limit
    assert worst(state[dst], end[dst], groups) <= limit


@search
@given(dims=DIMS, length=st.sampled_from([2, 63, 64, 65, 100]), seed=st.integers(0, 99))
def test_prefill_of_all_equals_prefill_of_all_but_one_then_decode(
    dims: Delta, length: int, seed: int
) -> None:
    case = delta_case(make_rows([(length, "fork")], seed=seed), dims, seed=seed)
    want, end = case.expect()
    state = clone_view(case.args["state"])
    head = {n: case.args[n][:-1] for n in TOKENS if n in case.args}
    tail = {n: case.args[n][-1:] for n in TOKENS if n in case.args}
    dst, gate = case.args["dst"], case.args["gate"]
    args = {**case.args, **head, "query_start_loc": i32(0, length - 1), "state": state}
    CALLS["delta_rule.prefill"](**args)
    got = CALLS["delta_rule.decode"](**tail, gate=gate, state=state, src=dst, dst=dst)
    assert worst(got[0], want[-1], 1) <= 1e-5
    assert worst(state[dst], end[dst], 2) <= 1e-5


@search
@given(operation=OPERATIONS, batch=BATCHES, dims=DIMS, pads=st.integers(1, 40))
def test_pads_change_no_bit_of_the_rows(
    operation: str, batch: list, dims: Delta, pads: int
) -> None:
    case = build(operation, make_rows(batch, pads=pads), dims)
    live = case.rows.bounds[-1]
    cut = {n: case.args[n][:live] for n in TOKENS if n in case.args}
    call = CALLS[case.operation]
    got, state = case.run(call)
    want, end = replace(case, rows=replace(case.rows, pads=0)).replace(**cut).run(call)
    assert torch.equal(got[:live], want)
    assert not got[live:].any()
    assert torch.equal(state.nan_to_num(), end.nan_to_num())


@search
@given(operation=OPERATIONS, batch=STEPS, dims=DIMS, moves=st.randoms(use_true_random=False))
def test_the_slots_that_rows_hold_change_no_bit(
    operation: str, batch: list, dims: Delta, moves: Any
) -> None:
    case = build(operation, make_rows(batch), dims, decode=True)
    call, pool = CALLS[case.operation], case.args["state"]
    order = [0, *moves.sample(range(1, pool.shape[0]), pool.shape[0] - 1)]
    moved = pool[torch.tensor(order).argsort()]
    ids = {n: i32(*(order[s] if s >= 0 else s for s in case.args[n].tolist())) for n in
           ("src", "dst")}  # fmt: skip
    got, state = case.replace(state=moved, **ids).run(call)
    want, end = case.run(call)
    assert torch.equal(got, want)
    assert torch.equal(state[order].nan_to_num(), end.nan_to_num())


@search
@given(
    operation=OPERATIONS,
    batch=BATCHES,
    dims=DIMS,
    gap=st.integers(1, 5),
    layout=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_views_are_read_and_written_like_copies(
    operation: str, batch: list, dims: Delta, gap: int, layout: bool, dtype: torch.dtype
) -> None:
    names = {"conv": ("CW", "WC"), "delta": ("VK", "KV")}[operation]
    state = "conv" if operation == "conv" else "recurrent"
    provider = TorchProvider("cpu", {"layouts": {state: names[layout]}})
    rows = make_rows(batch, pads=2)
    case = build(operation, rows, dims, dtype=dtype, layout=names[layout], gap=gap, strided=True)
    case.check(provider.conv.prefill if operation == "conv" else provider.delta_rule.prefill)
