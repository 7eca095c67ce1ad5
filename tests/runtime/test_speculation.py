"""Verify and commit through a backend: as many decodes as were accepted, whatever came before."""

from dataclasses import dataclass, field
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hal
from hal.errors import StepOrderError
from hal.runtime.batch import Batch, Mode
from support.backends import selected_with
from support.bound import FAMILIES, Bound

WIDTH = 4
SERVED = sorted(set(FAMILIES) - {"zamba"})
"""Zamba's scans run head by head, which has no verify."""


@pytest.fixture(params=SERVED, scope="module")
def bound(request: pytest.FixtureRequest) -> Bound:
    """A bound layer of each family, on a backend made for trees of WIDTH tokens."""
    with selected_with(speculative=hal.Speculative(WIDTH, tree=True)):
        return FAMILIES[request.param]()


def states(bound: Bound) -> list[Tensor]:
    """Every state tensor of the layer that the tests bind, slot axis first."""
    layer = next(bound.backend.selection.model.stateful_layers()).index
    return list(bound.backend.pool.tensors(layer).values())


def snapshot(bound: Bound) -> list[Tensor]:
    return [tensor.clone() for tensor in states(bound)]


def same(before: list[Tensor], after: list[Tensor], slots: range | list[int]) -> bool:
    """Whether slots hold the same bits, NaN included."""
    return all(
        torch.equal(a[slot].nan_to_num(7), b[slot].nan_to_num(7))
        for a, b in zip(before, after, strict=True)
        for slot in slots
    )


def close(got: Tensor, want: Tensor) -> bool:
    """Equal within float32 rounding of two different orders of sums."""
    return float((got.double() - want.double()).norm()) <= 3e-5 * float(want.double().norm()) + 1e-9


@dataclass
class Row:
    """A request: the inputs of all it may see, how many tokens are committed, and its slot."""

    given: list[Tensor]
    slot: int
    done: int = 0
    outputs: list[Tensor] = field(default_factory=list)

    def take(self, start: int, count: int) -> list[Tensor]:
        return [tensor[start : start + count] for tensor in self.given]


def packed(parts: list[list[Tensor]]) -> list[Tensor]:
    return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]


def extend(bound: Bound, row: Row, count: int) -> None:
    src = row.slot if row.done else -1
    bound.backend.begin(Batch(Mode.EXTEND, [count], [row.done], [src], [row.slot]))
    row.outputs.append(bound.call(row.take(row.done, count)).clone())
    row.done += count


def verify(bound: Bound, rows: list[Row], drafts: list[list[Tensor]], **fields: object) -> Tensor:
    """One VERIFY step; every row's drafts follow its committed tokens."""
    lengths = [draft[0].shape[0] for draft in drafts]
    slots = [row.slot for row in rows]
    batch = Batch(Mode.VERIFY, lengths, [r.done for r in rows], slots, slots, **fields)  # type: ignore[arg-type]
    bound.backend.begin(batch)
    return bound.call(packed(drafts))


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1 << 20), steps=st.lists(st.integers(0, WIDTH), min_size=1, max_size=5))
def test_any_schedule_of_drafts_gives_what_the_accepted_tokens_give_alone(
    bound: Bound, seed: int, steps: list[int]
) -> None:
    rng = Random(seed)
    torch.manual_seed(seed)
    rows = [Row(bound.inputs(40), slot) for slot in rng.sample(range(1, 7), 2)]
    for row in rows:
        extend(bound, row, rng.randint(1, 7))
    for most in steps:
        counts = [rng.randint(0, most) for _ in rows]
        accepted = [rng.randint(0, count) for count in counts]
        drafts = []
        for row, count, good in zip(rows, counts, accepted, strict=True):
            true, wrong = row.take(row.done, good), bound.inputs(count - good)
            drafts.append([torch.cat(pair) for pair in zip(true, wrong, strict=True)])
        out = verify(bound, rows, drafts)
        bound.backend.commit(accepted)
        for row, piece, good in zip(rows, out.split(counts), accepted, strict=True):
            row.outputs.append(piece[:good].clone())
            row.done += good
    for row in rows:
        extend(bound, row, 3)
        want = bound.alone(row.take(0, row.done))
        assert close(torch.cat(row.outputs), want)


@pytest.mark.parametrize("accepted", range(WIDTH + 1))
def test_verify_changes_no_state_and_commit_only_the_target(bound: Bound, accepted: int) -> None:
    row = Row(bound.inputs(12), slot=3)
    extend(bound, row, 5)
    before = snapshot(bound)
    verify(bound, [row], [row.take(5, WIDTH)])
    assert same(before, states(bound), range(7))
    bound.backend.commit([accepted])
    assert same(before, states(bound), [slot for slot in range(1, 7) if slot != 3])
    if not accepted:
        assert same(before, states(bound), [3])
    row.done += accepted
    extend(bound, row, 2)
    assert close(row.outputs[-1], bound.alone(row.take(0, 7 + accepted))[-2:])


def test_a_tree_commits_the_path_to_its_tip(bound: Bound) -> None:
    row = Row(bound.inputs(12), slot=2)
    extend(bound, row, 5)
    true, wrong = row.take(5, 2), bound.inputs(2)
    order = [torch.stack((w[0], t[0], w[1], t[1])) for t, w in zip(true, wrong, strict=True)]
    out = verify(bound, [row], [order], parents=[[-1, -1, 1, 1]])
    assert close(out[[1, 3]], bound.alone(row.take(0, 7))[5:])
    bound.backend.commit([2], tips=[3])
    row.done += 2
    extend(bound, row, 2)
    assert close(row.outputs[-1], bound.alone(row.take(0, 9))[-2:])


def test_the_first_verify_on_a_cached_prefix_commits_into_the_new_slot(bound: Bound) -> None:
    row = Row(bound.inputs(12), slot=2)
    extend(bound, row, 5)
    before = snapshot(bound)
    bound.backend.begin(Batch(Mode.VERIFY, [3], [5], [2], [6]))
    bound.call(row.take(5, 3))
    bound.backend.commit([2])
    assert same(before, states(bound), [1, 2, 3, 4, 5])
    row.slot, row.done = 6, 7
    extend(bound, row, 2)
    assert close(row.outputs[-1], bound.alone(row.take(0, 9))[-2:])


def test_counts_may_stay_on_the_device(bound: Bound) -> None:
    row = Row(bound.inputs(12), slot=4)
    extend(bound, row, 5)
    verify(bound, [row], [row.take(5, WIDTH)])
    bound.backend.commit(torch.tensor([3], dtype=torch.int32))
    row.done += 3
    extend(bound, row, 1)
    assert close(row.outputs[-1], bound.alone(row.take(0, 9))[-1:])


def test_no_rows_and_rows_without_drafts_are_legal(bound: Bound) -> None:
    bound.backend.begin(Batch(Mode.VERIFY))
    assert bound.call(bound.inputs(0)).shape[0] == 0
    bound.backend.commit([])
    row = Row(bound.inputs(12), slot=2)
    extend(bound, row, 5)
    before = snapshot(bound)
    assert verify(bound, [row], [bound.inputs(0)]).shape[0] == 0
    bound.backend.commit([0])
    assert same(before, states(bound), range(1, 7))


def test_the_order_of_calls_is_held(bound: Bound) -> None:
    row = Row(bound.inputs(12), slot=1)
    extend(bound, row, 5)
    with pytest.raises(StepOrderError, match="commit without a verify"):
        bound.backend.commit([1])
    before = snapshot(bound)
    bound.backend.begin(Batch(Mode.VERIFY, [2], [5], [1], [1]))
    with pytest.raises(StepOrderError, match="did not run in the verify step"):
        bound.backend.commit([1])
    bound.call(row.take(5, 2))
    with pytest.raises(StepOrderError, match="step after an uncommitted verify"):
        bound.backend.begin(Batch(Mode.DECODE, [1], [5], [1], [1]))
    assert same(before, states(bound), range(7))
    bound.backend.commit([0])
    with pytest.raises(StepOrderError, match="commit without a verify"):
        bound.backend.commit([0])


@pytest.mark.parametrize(
    ("accepted", "message"),
    [
        ([3], "commit: 3 accepted in row 0, width is 2"),
        ([-1], "commit: -1 accepted in row 0, width is 2"),
        ([1, 1], "commit: 2 counts, the verify step had 1 rows"),
    ],
)
def test_counts_outside_the_step_are_refused_and_may_be_corrected(
    bound: Bound, accepted: list[int], message: str
) -> None:
    row = Row(bound.inputs(12), slot=5)
    extend(bound, row, 5)
    verify(bound, [row], [row.take(5, 2)])
    before = snapshot(bound)
    with pytest.raises(ValueError, match=message):
        bound.backend.commit(accepted)
    assert same(before, states(bound), range(7))
    bound.backend.commit([2])


def test_a_backend_without_speculation_has_no_verify() -> None:
    plain = FAMILIES["short_conv"]()
    with pytest.raises(ValueError, match="begin: mode VERIFY was not selected for"):
        plain.backend.begin(Batch(Mode.VERIFY, [1], [0], [-1], [1]))
