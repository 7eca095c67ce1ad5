"""Verify reads, commit writes: acceptance equals the decodes of the path, in chains and trees."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hal import reference
from hal.model.spec import GateKind
from hal.testing.case import Case
from hal.testing.conv_cases import conv_case
from hal.testing.delta_cases import Delta, delta_case
from hal.testing.metric import worst
from hal.testing.rows import NAN, ROW_KINDS, Rows, changed_outside, clone_view, i32, make_rows
from hal.testing.scan_cases import Scan, scan_case
from hal.testing.verify_cases import VerifyCase, accept, chain, tree
from hal_cpu.provider import TorchProvider

PROVIDER = TorchProvider("cpu", {})
DRAFTS = make_rows(
    [(4, "continue"), (1, "fork"), (0, "continue"), (5, "fresh"), (7, "continue"),
     (3, "stateless"), (6, "fork"), (1, "score"), (2, "fresh")],
    seed=3, pads=3,
)  # fmt: skip
BUILDS: dict[str, Callable[..., Case]] = {
    "conv": conv_case,
    "wide conv": lambda rows, **k: conv_case(rows, width=7, bias=False, activation=None, **k),
    **{
        f"delta {gate}": lambda rows, gate=gate, **k: delta_case(rows, Delta(gate=gate), **k)
        for gate in (*GateKind, None)
    },
    "even delta": lambda rows, **k: delta_case(rows, Delta(V=32), **k),
    "large delta": lambda rows, **k: delta_case(rows, Delta(K=96, V=192), **k),
    "doubled": lambda rows, **k: delta_case(rows, Delta(beta_scale=2, hard=True), **k),
    "mamba2": lambda rows, **k: scan_case(rows, Scan(z=True), **k),
    "large mamba2": lambda rows, **k: scan_case(rows, Scan(H=8, P=64, N=128), **k),
    "limited": lambda rows, **k: scan_case(rows, Scan(dt_limit=(0.0, 0.1)), **k),
    "mamba1": lambda rows, **k: scan_case(rows, Scan(kind="mamba1", G=2, z=True), **k),
    "lightning": lambda rows, **k: scan_case(rows, Scan(kind="lightning"), **k),
}
SMALL = [name for name in BUILDS if "large" not in name]
EVEN = ("conv", "even delta", "large delta", "mamba2", "large mamba2", "mamba1", "lightning")
"""Cases whose K and V are multiples of 16, where a row's bits do not depend on its batch."""

search = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


def served(case: Case) -> Any:
    return getattr(PROVIDER, case.operation.partition(".")[0])


def check(case: Case, parents: torch.Tensor | None, last: torch.Tensor) -> None:
    VerifyCase.of(case, parents, last).check(served(case), PROVIDER.scratch_spec)


def shape(rows: Rows, kind: str, seed: int) -> torch.Tensor | None:
    return {
        "none": lambda: None,
        "chain": lambda: chain(rows),
        "tree": lambda: tree(rows, seed=seed),
    }[kind]()


@pytest.mark.parametrize("kind", ["none", "chain", "tree"])
@pytest.mark.parametrize("name", BUILDS)
def test_verify_and_commit_equal_the_oracle(name: str, kind: str) -> None:
    check(BUILDS[name](DRAFTS), shape(DRAFTS, kind, 1), accept(DRAFTS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SMALL)
def test_verify_rounds_once_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    check(BUILDS[name](DRAFTS, dtype=dtype), tree(DRAFTS), accept(DRAFTS))


@pytest.mark.parametrize("name", SMALL)
def test_column_slices_and_padded_pools_are_read_in_place(name: str) -> None:
    check(BUILDS[name](DRAFTS, gap=3, strided=True), tree(DRAFTS), accept(DRAFTS))


@pytest.mark.parametrize(
    ("layouts", "build"),
    [
        ({"conv": "WC"}, lambda rows: conv_case(rows, layout="WC")),
        ({"recurrent": "KV"}, lambda rows: delta_case(rows, layout="KV")),
        ({"recurrent": "KV"}, lambda rows: delta_case(rows, Delta(K=96, V=192), layout="KV")),
    ],
)
def test_every_layout_verifies(layouts: dict, build: Callable[[Rows], Case]) -> None:
    provider, case = TorchProvider("cpu", {"layouts": layouts}), build(DRAFTS)
    interface = getattr(provider, case.operation.partition(".")[0])
    VerifyCase.of(case, tree(DRAFTS), accept(DRAFTS)).check(interface, provider.scratch_spec)


@search
@given(
    name=st.sampled_from(SMALL),
    lengths=st.lists(
        st.tuples(st.integers(0, 6), st.sampled_from(ROW_KINDS)), min_size=1, max_size=4
    ),
    kind=st.sampled_from(["none", "chain", "tree"]),
    seed=st.integers(0, 99),
)
def test_any_batch_of_drafts_equals_the_oracle(
    name: str, lengths: list, kind: str, seed: int
) -> None:
    rows = make_rows(lengths, seed=seed, pads=seed % 3)
    case = BUILDS[name](rows, seed=seed)
    check(case, shape(rows, kind, seed), accept(rows, seed=seed))


def by_decodes(case: Case, path: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of the last of the decodes of a path of row 0, and the pool after them."""
    state, src, dst = clone_view(case.args["state"]), case.args["src"], case.args["dst"]
    fixed = {n: v for n, v in case.args.items()
             if n not in case.tokens and n not in ("query_start_loc", "max_len")}  # fmt: skip
    out = torch.empty(0)
    for step, token in enumerate(path):
        own = {name: tensor[token : token + 1] for name, tensor in case.tokens.items()}
        args = {**fixed, **own, "state": state, "src": src, "dst": dst}
        if "start" in args:
            args["start"] = args["start"] + step
        out = served(case).decode(**args, **case.options)
        src = dst
    return out, state


@search
@given(
    name=st.sampled_from(SMALL),
    width=st.integers(1, 7),
    accepted=st.integers(0, 7),
    kind=st.sampled_from(["continue", "fork", "fresh"]),
    branching=st.booleans(),
    seed=st.integers(0, 99),
)
def test_accepting_any_prefix_equals_its_decodes(
    name: str, width: int, accepted: int, kind: str, branching: bool, seed: int
) -> None:
    rows = make_rows([(width, kind)], seed=seed)
    case, last = BUILDS[name](rows, seed=seed), min(accepted, width) - 1
    parents = tree(rows, seed=seed) if branching else None
    verify = VerifyCase.of(case, parents, i32(last))
    result, between, state = verify.run(served(case), PROVIDER.scratch_spec)
    path = [] if last < 0 else reference.path_to(
        None if parents is None else parents.tolist(), last
    )  # fmt: skip
    out, want = by_decodes(case, path)
    assert changed_outside(case.args["state"], between, set()) == 0
    assert changed_outside(want, state, {rows.dst[0]}) == 0
    if path:
        groups = 2 if case.heads else 1
        assert worst(result[last : last + 1], out.double(), groups) <= 1e-5
        assert worst(state[rows.dst[0]], want[rows.dst[0]].double(), groups - 1) <= 1e-6


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("parents", ["none", "tree"])
def test_verify_leaves_every_committed_bit_alone(name: str, parents: str) -> None:
    case = BUILDS[name](DRAFTS, gap=2)
    verify = VerifyCase.of(case, shape(DRAFTS, parents, 2), accept(DRAFTS))
    _, between, _ = verify.run(served(case), PROVIDER.scratch_spec)
    assert changed_outside(case.args["state"], between, set()) == 0


@pytest.mark.parametrize("name", BUILDS)
def test_minus_one_commits_nothing_and_rows_commit_independently(name: str) -> None:
    case = BUILDS[name](DRAFTS)
    count = len(DRAFTS.lengths)
    none = VerifyCase.of(case, None, torch.full((count,), -1, dtype=torch.int32))
    _, _, state = none.run(served(case), PROVIDER.scratch_spec)
    assert changed_outside(case.args["state"], state, set()) == 0
    whole = i32(*(n - 1 for n in DRAFTS.lengths))
    _, _, every = replace(none, last=whole).run(served(case), PROVIDER.scratch_spec)
    for row, (length, dst) in enumerate(zip(DRAFTS.lengths, DRAFTS.dst, strict=True)):
        last = torch.where(torch.arange(count) == row, whole, -1).to(torch.int32)
        _, _, one = replace(none, last=last).run(served(case), PROVIDER.scratch_spec)
        written = {dst} if length and dst >= 0 else set()
        assert changed_outside(case.args["state"], one, written) == 0
        if written:
            assert torch.equal(one[dst], every[dst])


@pytest.mark.parametrize("name", SMALL)
def test_a_fork_commits_into_dst_and_keeps_its_source(name: str) -> None:
    rows = make_rows([(5, "fork"), (3, "fork")], seed=5)
    case = BUILDS[name](rows)
    verify = VerifyCase.of(case, tree(rows), i32(4, 0))
    _, _, state = verify.run(served(case), PROVIDER.scratch_spec)
    for src in rows.src:
        assert torch.equal(state[src], case.args["state"][src])
    verify.check(served(case), PROVIDER.scratch_spec)


@pytest.mark.parametrize("name", SMALL)
def test_a_chain_with_and_without_parents_has_the_same_bits(name: str) -> None:
    case, last = BUILDS[name](DRAFTS), accept(DRAFTS)
    runs = [
        VerifyCase.of(case, parents, last).run(served(case), PROVIDER.scratch_spec)
        for parents in (None, chain(DRAFTS))
    ]
    for ours, theirs in zip(*runs, strict=True):
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


@pytest.mark.parametrize("name", EVEN)
def test_a_row_verifies_and_commits_with_the_same_bits_alone(name: str) -> None:
    case, parents, last = BUILDS[name](DRAFTS), tree(DRAFTS), accept(DRAFTS)
    together, _, end = VerifyCase.of(case, parents, last).run(served(case), PROVIDER.scratch_spec)
    for row, span in enumerate(DRAFTS.spans()):
        one = {n: (getattr(DRAFTS, n)[row],) for n in ("lengths", "src", "dst", "start")}
        args = {n: t[span] for n, t in case.tokens.items()}
        args |= {n: i32(*one[n]) for n in ("src", "dst", "start") if n in case.args}
        alone = replace(case, rows=replace(DRAFTS, **one, pads=0)).replace(
            **args, query_start_loc=i32(0, span.stop - span.start)
        )
        verify = VerifyCase.of(alone, parents[span], last[row : row + 1])
        result, _, state = verify.run(served(case), PROVIDER.scratch_spec)
        assert torch.equal(result, together[span])
        dst = DRAFTS.dst[row]
        if dst >= 0 and span.stop > span.start:
            assert torch.equal(state[dst].nan_to_num(), end[dst].nan_to_num())


@pytest.mark.parametrize("name", ["conv", "delta scalar", "mamba2", "mamba1"])
def test_a_branch_does_not_see_its_siblings(name: str) -> None:
    rows = make_rows([(4, "fork")], seed=8)
    case, parents = BUILDS[name](rows), i32(-1, 0, 0, 2)
    verify = VerifyCase.of(case, parents, i32(3))
    clean, _, state = verify.run(served(case), PROVIDER.scratch_spec)
    hot = {n: t.clone() for n, t in case.tokens.items()}
    for tensor in hot.values():
        tensor[1] = NAN
    dirty = VerifyCase.of(case.replace(**hot), parents, i32(3))
    result, _, end = dirty.run(served(case), PROVIDER.scratch_spec)
    assert torch.equal(result[[0, 2, 3]], clean[[0, 2, 3]])
    assert torch.equal(end[rows.dst[0]], state[rows.dst[0]])


@pytest.mark.parametrize("name", SMALL)
def test_empty_batches_verify_to_nothing(name: str) -> None:
    for rows in (make_rows([]), make_rows([(0, "fork"), (0, "fresh")], pads=3)):
        case = BUILDS[name](rows)
        result, between, state = VerifyCase.of(case, tree(rows), accept(rows)).run(
            served(case), PROVIDER.scratch_spec
        )
        assert torch.equal(result, torch.zeros_like(result))
        for pool in (between, state):
            assert changed_outside(case.args["state"], pool, set()) == 0


@pytest.mark.parametrize("name", ["conv", "delta scalar", "mamba2", "mamba1"])
def test_bad_trees_last_tokens_and_scratch_are_refused(name: str) -> None:
    rows = make_rows([(2, "fork"), (3, "fork")])
    case = BUILDS[name](rows)
    interface, ours = case.operation.partition(".")[0], served(case)
    good = VerifyCase.of(case, None, i32(1, 2))

    def refused(bad: VerifyCase, text: str, **other: Any) -> None:
        state, scratch = clone_view(case.args["state"]), good.scratch(PROVIDER.scratch_spec)
        with pytest.raises((ValueError, TypeError)) as caught:
            if bad.parents is not None or "scratch" in other:
                ours.verify(**bad.verify_args(state), **{"scratch": scratch, **other})
            ours.verify(**good.verify_args(state), scratch=scratch)
            ours.commit(**bad.commit_args(state), scratch=scratch)
        assert str(caught.value) == text
        assert changed_outside(case.args["state"], state, set()) == 0

    verify, commit = f"{interface}.verify", f"{interface}.commit"
    refused(
        replace(good, parents=i32(-1, 0, -1, 1, 1)),
        f"{verify}: row 1: parent 1 of token 1 does not come before it",
    )
    refused(
        replace(good, parents=i32(-1, -2, -1, 0, 0)),
        f"{verify}: row 0: parent -2 of token 1 does not come before it",
    )
    refused(replace(good, parents=i32(-1, 0)), f"{verify}: 5 tokens, 2 entries in parents")
    refused(
        replace(good, parents=torch.tensor([-1, 0, -1, 0, 0])),
        f"{verify}: parents is int64, expected int32",
    )
    refused(
        replace(good, last=i32(1, 3)), f"{commit}: last is token 3 in row 1, row 1 has 3 tokens"
    )
    refused(replace(good, last=i32(1)), f"{commit}: 2 rows in src, 1 in last")
    short = [t[:4] for t in good.scratch(PROVIDER.scratch_spec)]
    refused(good, f"{verify}: rows have 5 tokens, scratch has room for 4", scratch=short)
    count = len(short)
    refused(good, f"{verify}: scratch has 1 tensors, expected {count}", scratch=short[:1])


@pytest.mark.parametrize("kind", ["none", "tree"])
def test_short_convolutions_verify_and_commit_on_the_sidecars_tensor(kind: str) -> None:
    rows = make_rows([(4, "fork"), (3, "fresh"), (0, "continue"), (2, "continue")], seed=4)
    gen = torch.Generator().manual_seed(1)
    b, c, x = (torch.randn(rows.tokens, 24, generator=gen) for _ in range(3))
    case = conv_case(rows, width=3, activation=None).replace(x=b * x)
    verify = VerifyCase.of(case, shape(rows, kind, 3), accept(rows, seed=3))
    provider, scratch = TorchProvider("cpu", {}), verify.scratch(PROVIDER.scratch_spec)
    pool = clone_view(case.args["state"])
    provider.conv_state.attach({5: (pool,)})
    index = [case.args[n] for n in ("src", "dst", "start", "query_start_loc", "max_len")]
    provider.conv_state.begin(*index)
    step = provider.conv_state.step(5)
    bounds = (step.query_start_loc, step.max_len)
    weights = (case.args["weight"], case.args["bias"])
    y = c * provider.conv.verify(
        b * x, *weights, step.tensors[0], step.src, step.start, *bounds, scratch,
        parents=verify.parents,
    )  # fmt: skip
    slots = (step.src, step.dst, step.start, step.query_start_loc)
    provider.conv.commit(step.tensors[0], scratch, *slots, verify.last)
    want, ends = verify.expect()
    assert worst(y, c.double() * want, 0) <= 1e-5
    written = verify.committed().written(None)
    live = sorted(written - {0})
    assert torch.equal(pool[live].double(), ends[live])
    assert changed_outside(case.args["state"], pool, written) == 0
