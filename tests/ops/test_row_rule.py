"""The row rule, exactly: write sets, forks, pads, views, results in place, and empty batches."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hal_cpu.provider import TorchProvider
from support.ops import (
    NAN,
    Call,
    Case,
    Delta,
    changed_outside,
    conv_case,
    delta_case,
    i32,
    make_rows,
)

PROVIDER = TorchProvider("cpu", {})
SMALL, LARGE = Delta(), Delta(K=96, V=192)
PACKED = make_rows(
    [(5, "fork"), (0, "continue"), (1, "continue"), (70, "fresh"), (2, "stateless"), (1, "fork")],
    seed=11,
    pads=4,
)
TOKENS = make_rows([(1, "fork"), (1, "pad"), (1, "continue"), (1, "fresh"), (1, "pad")], seed=12)


def cases(**kwargs: object) -> list[tuple[Case, Call]]:
    """Each operation with its call, over one mixed batch."""
    return [
        (conv_case(PACKED, **kwargs), PROVIDER.conv.prefill),
        (conv_case(TOKENS, decode=True, **kwargs), PROVIDER.conv.decode),
        (delta_case(PACKED, SMALL, **kwargs), PROVIDER.delta_rule.prefill),
        (delta_case(PACKED, LARGE, **kwargs), PROVIDER.delta_rule.prefill),
        (delta_case(TOKENS, SMALL, decode=True, **kwargs), PROVIDER.delta_rule.decode),
        (delta_case(TOKENS, LARGE, decode=True, **kwargs), PROVIDER.delta_rule.decode),
    ]


OPS = pytest.mark.parametrize("number", range(6))


@OPS
def test_only_addressed_slots_change(number: int) -> None:
    case, call = cases()[number]
    _, state = case.run(call)
    assert changed_outside(case.args["state"], state, case.rows.written(None)) == 0


@OPS
def test_the_source_of_a_fork_keeps_its_bits(number: int) -> None:
    case, call = cases()[number]
    _, state = case.run(call)
    for src, dst in zip(case.rows.src, case.rows.dst, strict=True):
        if src >= 0 and dst != src:
            assert torch.equal(state[src], case.args["state"][src])


@OPS
def test_inputs_are_left_as_they_were(number: int) -> None:
    case, call = cases()[number]
    before = {n: v.clone() for n, v in case.args.items() if isinstance(v, Tensor)}
    case.run(call)
    for name, tensor in before.items():
        assert torch.equal(case.args[name].nan_to_num(), tensor.nan_to_num()), name


@OPS
def test_pads_are_exactly_zero_whatever_they_hold(number: int) -> None:
    case, call = cases()[number]
    for out in (None, torch.full_like(case.run(call)[0], NAN)):
        assert case.errors(call, out=out).pads == 0


@OPS
def test_nan_of_pad_rows_reaches_nobody(number: int) -> None:
    case, call = cases()[number]
    pads = [i for i in range(len(case.rows.src)) if case.rows.src[i] < 0 and case.rows.dst[i] < 0]
    hot = {
        name: case.args[name].index_fill(0, torch.tensor(pads), NAN)
        for name in ("x", "q", "k", "v", "a", "b")
        if name in case.args and case.operation.endswith("decode")
    }
    got, state = case.replace(**hot).run(call)
    want, end = case.run(call)
    assert torch.equal(got, want)
    assert changed_outside(end, state, set()) == 0


@OPS
@pytest.mark.parametrize("gap", [1, 3])
def test_column_slices_padded_pools_and_strided_indices_change_no_bit(
    number: int, gap: int
) -> None:
    dense, call = cases()[number]
    views, _ = cases(gap=gap, strided=True)[number]
    views.check(call)
    same = views.replace(state=dense.args["state"])
    assert torch.equal(same.run(call)[0], dense.run(call)[0])


@OPS
def test_a_transposed_pool_gets_the_writes_in_its_own_storage(number: int) -> None:
    case, call = cases()[number]
    pool = case.args["state"]
    view = pool.transpose(0, 1).contiguous().transpose(0, 1)
    assert view.stride() != pool.stride()
    case.replace(state=view).check(call)


@OPS
def test_a_given_result_is_filled_in_full_and_returned(number: int) -> None:
    case, call = cases()[number]
    want, _ = case.run(call)
    wide = torch.full((*want.shape[:-1], 2 * want.shape[-1]), NAN)
    out = wide[..., ::2]
    got, _ = case.run(call, out=out)
    assert got is out
    assert torch.equal(out, want)
    assert wide[..., 1::2].isnan().all()


@OPS
def test_no_rows_no_tokens_give_an_empty_result(number: int) -> None:
    case, call = cases()[number]
    none = replace(case.rows, lengths=(), src=(), dst=(), start=(), pads=0)
    cut = {n: case.args[n][:0] for n in ("x", "q", "k", "v", "a", "b", "start") if n in case.args}
    bounds = {} if case.operation.endswith("decode") else {"query_start_loc": i32(0)}
    empty = replace(case, rows=none).replace(**cut, **bounds, src=i32(), dst=i32())
    got, state = empty.run(call)
    assert got.shape[0] == 0
    assert changed_outside(case.args["state"], state, set()) == 0


def test_a_batch_of_empty_rows_gives_zero_pads_and_writes_nothing() -> None:
    rows = make_rows([(0, "continue"), (0, "fork"), (0, "fresh")], pads=3)
    for case, call in (
        (conv_case(rows), PROVIDER.conv.prefill),
        (delta_case(rows), PROVIDER.delta_rule.prefill),
    ):
        got, state = case.run(call)
        assert torch.equal(got, torch.zeros_like(got))
        assert changed_outside(case.args["state"], state, set()) == 0


@pytest.mark.parametrize("build", [conv_case, delta_case])
def test_an_empty_row_between_others_changes_none_of_them(build: Callable[..., Case]) -> None:
    call = PROVIDER.conv.prefill if build is conv_case else PROVIDER.delta_rule.prefill
    kinds = [(0, "fork"), (3, "fork"), (0, "continue"), (0, "fork"), (4, "fresh"), (0, "fresh")]
    case = build(make_rows(kinds, seed=9))
    names = ("src", "dst", "start")
    kept = {name: case.args[name][[1, 4]] for name in names if name in case.args}
    got, state = case.run(call)
    want, end = case.replace(**kept, query_start_loc=i32(0, 3, 7)).run(call)
    assert torch.equal(got, want)
    assert changed_outside(end, state, set()) == 0


@OPS
def test_several_rows_may_start_from_one_source(number: int) -> None:
    case, call = cases()[number]
    rows = make_rows([(1, "fork"), (1, "fork"), (1, "stateless")], seed=6)
    rows = replace(rows, src=(rows.src[0],) * 3, start=(3, 3, 3))
    build = conv_case if case.width else delta_case
    build(rows, decode=case.operation.endswith("decode")).check(call)


@OPS
def test_two_runs_give_the_same_bits(number: int) -> None:
    case, call = cases()[number]
    assert torch.equal(case.run(call)[0], case.run(call)[0])


def test_slots_past_two_to_the_31_elements_are_addressed_rightly(tmp_path: Path) -> None:
    dims, far = Delta(H=1, HV=1, K=16, V=8), 4097
    stride = 2**31 // (far - 1)
    size = stride * (far + 1)
    (tmp_path / "pool").touch()
    whole = torch.from_file(str(tmp_path / "pool"), shared=True, size=size, dtype=torch.float32)
    pool = whole.as_strided((far + 1, 1, 8, 16), (stride, 128, 16, 1))
    pool[far] = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(0))
    near = delta_case(make_rows([(3, "continue"), (1, "fresh")]), dims)
    held = near.replace(state=pool[[0, far]], src=i32(1, -1), dst=i32(1, 0))
    want, end = held.expect()
    spots = {"src": i32(far, -1), "dst": i32(far, far - 1)}
    got = PROVIDER.delta_rule.prefill(**{**near.args, **spots, "state": pool})
    assert torch.allclose(got.double(), want, atol=1e-6)
    assert torch.allclose(pool[[far - 1, far]].double(), end, atol=1e-6)
    assert not pool[[1, far - 2]].any()
