"""A commit or a tracked copy that is owed never reaches a slot that has a new tenant."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import hal
from hal.errors import StepOrderError
from hal.model.spec import ShortConvDims
from hal.runtime.backend import Backend
from hal.runtime.batch import Batch, DeviceSlots, Mode, Track
from hal.runtime.params import ShortConvParams
from support.backends import backend_for
from support.bound import LFM2_CONFIG

WIDTH = 3
ROWS = 3
MARK = 7.5


class Served:
    """A backend with a short conv layer, three requests of four tokens in slots 1, 2 and 3."""

    def __init__(self, **options: object) -> None:
        asked = {"speculative": hal.Speculative(WIDTH), "prefix_cache": True, **options}
        self.backend: Backend = backend_for(LFM2_CONFIG, slots=8, **asked)
        spec = next(self.backend.selection.model.stateful_layers())
        assert isinstance(spec.dims, ShortConvDims)
        self.hidden = spec.dims.hidden
        params = ShortConvParams(torch.ones(self.hidden, spec.dims.W), None)
        self.layer = cast("Any", self.backend.layer(spec.index, params))
        self.state = self.backend.pool.tensors(spec.index)["conv"].fill_(0)
        self.slots = self.backend.pool.alloc(ROWS)
        self.run(Batch(Mode.EXTEND, [4] * ROWS, [0] * ROWS, [-1] * ROWS, self.slots))

    def inputs(self, tokens: int) -> list[Tensor]:
        rng = torch.Generator().manual_seed(tokens)
        return [torch.randn(tokens, self.hidden, generator=rng) for _ in range(3)]

    def run(self, batch: Batch) -> None:
        self.backend.begin(batch)
        self.layer(*self.inputs(batch.tokens))
        self.backend.end()

    def verify(self, dst: Sequence[int] | None = None, track: Sequence[Track] = ()) -> None:
        lengths, start = [WIDTH] * ROWS, [4] * ROWS
        self.run(Batch(Mode.VERIFY, lengths, start, self.slots, dst or self.slots, track))

    def hand_over(self, slots: Sequence[int]) -> None:
        """Free slots, and let new tenants write them."""
        self.backend.pool.free(slots)
        assert set(slots) <= set(self.backend.pool.alloc(self.backend.pool.free_slots))
        self.state[list(slots)] = MARK


@given(
    gone=st.sets(st.integers(0, ROWS - 1), min_size=1, max_size=ROWS - 1),
    accepted=st.lists(st.integers(0, WIDTH), min_size=ROWS, max_size=ROWS),
)
def test_a_new_tenant_is_never_committed_to(gone: set[int], accepted: list[int]) -> None:
    served, twin = Served(), Served()
    twin.verify()
    twin.backend.commit([0 if row in gone else n for row, n in enumerate(accepted)])
    served.verify()
    served.hand_over([served.slots[row] for row in gone])
    if any(accepted[row] for row in gone):
        before = served.state.clone()
        with pytest.raises(StepOrderError, match="which were freed since the verify; accept 0"):
            served.backend.commit(accepted)
        assert torch.equal(served.state, before)
        accepted = [0 if row in gone else n for row, n in enumerate(accepted)]
    served.backend.commit(accepted)
    for row, slot in enumerate(served.slots):
        wanted = torch.full_like(twin.state[slot], MARK) if row in gone else twin.state[slot]
        assert torch.equal(served.state[slot], wanted)


def test_counts_that_stay_on_the_device_are_refused_where_a_slot_is_gone() -> None:
    served = Served()
    served.verify()
    served.hand_over(served.slots[:1])
    before = served.state.clone()
    with pytest.raises(StepOrderError, match="row 0 accepts a count from the device"):
        served.backend.commit(torch.tensor([0, 1, 2], dtype=torch.int32))
    assert torch.equal(served.state, before)
    served.backend.abandon()
    served.run(Batch(Mode.DECODE, [1], [4], served.slots[1:2], served.slots[1:2]))


@pytest.mark.parametrize("committed", [False, True])
def test_where_all_rows_are_gone_the_commit_may_be_left_out(committed: bool) -> None:
    served = Served()
    served.verify()
    served.hand_over(served.slots)
    with pytest.raises(StepOrderError, match="row 0 accepts 1 tokens"):
        served.backend.commit([1] * ROWS)
    if committed:
        served.backend.commit([0] * ROWS)
    served.run(Batch(Mode.IDLE))
    with pytest.raises(StepOrderError, match="commit without a verify"):
        served.backend.commit([0] * ROWS)
    assert bool((served.state[list(served.slots)] == MARK).all())


def test_a_fork_into_a_freed_slot_is_refused_even_where_it_accepts_nothing() -> None:
    served = Served()
    targets = served.backend.pool.alloc(ROWS)
    served.verify(targets)
    served.hand_over(targets[1:2])
    with pytest.raises(StepOrderError, match="row 1 accepts 0 tokens"):
        served.backend.commit([1, 0, 1])


@pytest.mark.parametrize("accepted", range(WIDTH + 1))
def test_a_freed_track_slot_is_refused_where_the_commit_reaches_it(accepted: int) -> None:
    served = Served()
    (point,) = served.backend.pool.alloc()
    served.verify(track=[(0, 6, point)])
    served.hand_over([point])
    counts = [accepted, 0, 0]
    if accepted < 2:
        served.backend.commit(counts)
    else:
        with pytest.raises(StepOrderError, match=rf"would use slots \[{point}\]"):
            served.backend.commit(counts)
    assert bool((served.state[point] == MARK).all())


def test_a_row_without_tokens_owes_nothing_whatever_became_of_its_slots() -> None:
    served = Served()
    (target,) = served.backend.pool.alloc()
    lengths, dst = [WIDTH, 0, WIDTH], [served.slots[0], target, served.slots[2]]
    for gone in (target, served.slots[1]):
        served.run(Batch(Mode.VERIFY, lengths, [4] * ROWS, served.slots, dst))
        served.hand_over([gone])
        served.backend.commit([2, 0, 1])
        assert bool((served.state[gone] == MARK).all())


def test_where_all_rows_with_tokens_are_gone_the_commit_may_be_left_out() -> None:
    served = Served()
    served.run(Batch(Mode.VERIFY, [WIDTH, 0, 1], [4] * ROWS, served.slots, served.slots))
    served.hand_over([served.slots[0], served.slots[2]])
    served.run(Batch(Mode.IDLE))


def test_a_refusal_that_no_count_mends_names_no_count() -> None:
    served = Served()
    targets = served.backend.pool.alloc(ROWS)
    served.verify(targets)
    served.hand_over(targets[:1])
    with pytest.raises(StepOrderError, match="freed since the verify; abandon the step"):
        served.backend.commit([0, 1, 1])


@pytest.mark.parametrize("accepted", range(WIDTH + 1))
def test_slots_on_the_device_do_not_hide_a_point_that_was_freed(accepted: int) -> None:
    """Rows' slots are then the engine's to watch; a point's slot is known on the host."""
    served, twin = Served(), Served()
    ids = torch.tensor(served.slots, dtype=torch.int32)
    for each in (served, twin):
        (point,) = each.backend.pool.alloc()
        held, track = DeviceSlots(ids, ids, 8), [(1, 6, point)]
        each.run(Batch(Mode.VERIFY, [WIDTH] * ROWS, [4] * ROWS, track=track, held=held))
    served.hand_over([point])
    counts = [1, accepted, 0]
    if accepted >= 2:
        with pytest.raises(StepOrderError, match=rf"row 1 .* would use slots \[{point}\]"):
            served.backend.commit(counts)
        counts[1] = 0
    twin.backend.commit(counts)
    served.backend.commit(counts)
    assert bool((served.state[point] == MARK).all())
    for slot in served.slots:
        assert torch.equal(served.state[slot], twin.state[slot])


# A tree whose tips stay on the device: they decide, whatever counts the host was told


def tree(served: Served, dst: Sequence[int]) -> None:
    """Verify a root with two children in every row."""
    links, starts = [(-1, 0, 0)] * ROWS, [4] * ROWS
    served.run(Batch(Mode.VERIFY, [3] * ROWS, starts, served.slots, dst, parents=links))


def test_tips_on_the_device_are_refused_where_a_slot_is_gone() -> None:
    served = Served(speculative=hal.Speculative(WIDTH, tree=True))
    tree(served, served.slots)
    served.hand_over(served.slots[:1])
    before = served.state.clone()
    with pytest.raises(StepOrderError, match="row 0 accepts a count from the device"):
        served.backend.commit([0] * ROWS, torch.tensor([2, -1, -1], dtype=torch.int32))
    assert torch.equal(served.state, before)


@given(
    tips=st.lists(st.integers(-1, 2), min_size=ROWS, max_size=ROWS),
    told=st.lists(st.integers(0, WIDTH), min_size=ROWS, max_size=ROWS),
)
def test_a_fork_follows_tips_on_the_device_and_not_what_the_host_was_told(
    tips: list[int], told: list[int]
) -> None:
    served, twin = (Served(speculative=hal.Speculative(WIDTH, tree=True)) for _ in range(2))
    for each in (served, twin):
        targets = each.backend.pool.alloc(ROWS)
        each.state[targets] = MARK
        tree(each, targets)
    twin.backend.commit([min(tip, 1) + 1 for tip in tips], tips)
    served.backend.commit(told, torch.tensor(tips, dtype=torch.int32))
    assert torch.equal(served.state, twin.state)
    for row, tip in enumerate(tips):
        if tip < 0:
            assert torch.equal(served.state[targets[row]], served.state[served.slots[row]])


# Tracked rows of a replayed decode, copied behind a graph that the engine runs itself


def decoding() -> tuple[Served, list[int]]:
    """A decode of three rows that was replayed, each tracked, whose copies are owed."""
    served = Served(graphs=True, speculative=None)
    points = served.backend.pool.alloc(ROWS)
    inputs = served.inputs(ROWS)
    with served.backend.capture(Mode.DECODE, ROWS, record=False):
        served.layer(*inputs)
    slots, track = served.slots, [(row, 5, slot) for row, slot in enumerate(points)]
    served.backend.replay(Batch(Mode.DECODE, [1] * ROWS, [4] * ROWS, slots, slots, track))
    return served, points


@given(gone=st.sets(st.integers(0, ROWS - 1)))
def test_a_tracked_state_is_not_copied_to_a_new_tenant(gone: set[int]) -> None:
    served, points = decoding()
    served.hand_over([points[row] for row in gone])
    served.backend.end()
    for row, (slot, point) in enumerate(zip(served.slots, points, strict=True)):
        wanted = torch.full_like(served.state[slot], MARK) if row in gone else served.state[slot]
        assert torch.equal(served.state[point], wanted)


def test_a_row_that_is_freed_before_its_state_was_kept_is_refused() -> None:
    served, _ = decoding()
    served.hand_over(served.slots[1:2])
    before = served.state.clone()
    for _ in range(2):
        with pytest.raises(StepOrderError, match=r"end: the state of row 1 .* free it after end"):
            served.backend.end()
    with pytest.raises(StepOrderError, match="or abandon the step"):
        served.backend.begin(Batch(Mode.IDLE))
    assert torch.equal(served.state, before)
    served.backend.abandon()
    served.run(Batch(Mode.IDLE))
    assert torch.equal(served.state, before)
