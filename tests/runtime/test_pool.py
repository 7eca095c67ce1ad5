"""The pool hands out whole slots, keeps slot 0 to itself and loses nothing on a failed call."""

from collections.abc import Iterable
from contextlib import nullcontext
from time import perf_counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hal.errors import PoolExhausted
from hal.model import read
from hal.runtime.pool import Pool, Slot
from hal.states import StateSpec, plan_states
from support.model_configs import real
from support.slots import FORM

STATES = (
    StateSpec(0, "conv", (6, 3), "bfloat16", "CW", (("x", 6, 0),)),
    StateSpec(0, "recurrent", (2, 4, 3), "float32", "VK", (("v_heads", 2, 0),)),
    StateSpec(3, "conv", (5, 2), "float32", "CW", (("x", 5, 0),)),
)


def make(slots: int = 4) -> Pool:
    """A pool whose every slot holds its own number."""
    pool = Pool(STATES, slots, torch.device("cpu"))
    for layer in (0, 3):
        for tensor in pool.tensors(layer).values():
            for slot in range(slots + 1):
                tensor[slot] = slot
    return pool


def bits(pool: Pool) -> list[torch.Tensor]:
    """Every byte of the pool."""
    return [t.clone() for layer in (0, 3) for t in pool.tensors(layer).values()]


def same(before: list[torch.Tensor], pool: Pool) -> bool:
    """Whether no byte changed."""
    return all(torch.equal(a, b) for a, b in zip(before, bits(pool), strict=True))


def test_planned_bytes_are_allocated_bytes_reserved_slot_included() -> None:
    assert make(slots=18).bytes == 19 * sum(spec.bytes for spec in STATES)


def test_asking_for_eighteen_slots_gives_eighteen_and_never_slot_zero() -> None:
    pool = make(slots=18)
    slots = pool.alloc(18)
    assert sorted(slots) == list(range(1, 19))


def test_exhaustion_says_the_numbers_and_hands_out_nothing() -> None:
    pool = make()
    pool.alloc(3)
    with pytest.raises(PoolExhausted) as caught:
        pool.alloc(2)
    assert str(caught.value) == (
        "pool: 2 slots asked for, 1 of 4 are free; free some, or build the backend with more slots"
    )
    assert pool.free_slots == 1


@pytest.mark.parametrize("given", [[3], [1, 1], [1, 4], [0], [-1], [9]])
def test_freeing_what_is_not_in_use_once_is_an_error_and_frees_nothing(given: list[int]) -> None:
    pool = make()
    pool.alloc(2)
    with pytest.raises(ValueError, match="not in use exactly once"):
        pool.free([Slot(slot) for slot in given])
    assert pool.free_slots == 2


def test_freeing_many_slots_at_once_takes_time_by_their_number_not_its_square() -> None:
    pool = Pool(STATES[2:], 30_000, torch.device("cpu"))
    slots = pool.alloc(30_000)
    began = perf_counter()
    pool.free(slots)
    assert perf_counter() - began < 5
    assert pool.free_slots == 30_000


def test_a_freed_slot_keeps_its_bytes_and_comes_back() -> None:
    pool = make(slots=1)
    before = bits(pool)
    (slot,) = pool.alloc(1)
    pool.free([slot])
    assert pool.alloc(1) == [slot]
    assert same(before, pool)


def test_a_fork_copies_every_tensor_of_the_slot_and_writes_no_other() -> None:
    pool = make()
    source, _ = pool.alloc(2)
    target = pool.fork(source)
    for layer in (0, 3):
        for tensor in pool.tensors(layer).values():
            assert torch.equal(tensor[target], tensor[source])
            others = [slot for slot in range(5) if slot != target]
            assert all((tensor[slot] == slot).all() for slot in others)


def test_a_fork_of_a_free_slot_is_refused_and_takes_none() -> None:
    pool = make()
    with pytest.raises(ValueError, match="slot 2 is not in use"):
        pool.fork(Slot(2))
    assert pool.free_slots == 4


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        ([1, 2], [3], "copy of 2 slots to 1 slots"),
        ([1, 2], [3, 3], "targets must be distinct and no sources"),
        ([1, 2], [2, 3], "targets must be distinct and no sources"),
        ([1], [0], r"slot 0, pool has slots 1\.\.4"),
        ([5], [1], r"slot 5, pool has slots 1\.\.4"),
    ],
)
def test_a_copy_that_cannot_be_meant_writes_nothing(
    sources: list[int], targets: list[int], message: str
) -> None:
    pool = make()
    before = bits(pool)
    with pytest.raises(ValueError, match=message):
        pool.copy(sources, targets)
    assert same(before, pool)


def test_a_copy_skips_pairs_without_a_slot_and_keeps_nan_bits() -> None:
    pool = make()
    for layer in (0, 3):
        for tensor in pool.tensors(layer).values():
            tensor[2] = float("nan")
    pool.copy([2, -1, 1], [4, 3, -1])
    for layer in (0, 3):
        for tensor in pool.tensors(layer).values():
            assert tensor[4].isnan().all()
            assert (tensor[3] == 3).all() and (tensor[1] == 1).all()


def test_clear_zeroes_nan_in_every_tensor_of_the_slot_alone() -> None:
    pool = make()
    for layer in (0, 3):
        for tensor in pool.tensors(layer).values():
            tensor[2] = float("nan")
    pool.clear([2, -7])
    for layer in (0, 3):
        for tensor in pool.tensors(layer).values():
            assert (tensor[2] == 0).all()
            assert all((tensor[slot] == slot).all() for slot in (0, 1, 3, 4))


def test_a_pool_without_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="0 slots, expected at least 1"):
        Pool(STATES, 0, torch.device("cpu"))


def test_more_slots_than_int32_names_are_refused_before_anything_is_allocated() -> None:
    with pytest.raises(ValueError) as caught:
        Pool(STATES, 2**31, torch.device("cpu"))
    assert str(caught.value) == "pool: 2147483648 slots, at most 2147483647 have an int32 id"


def test_offsets_of_a_large_pool_pass_32_bits() -> None:
    """Qwen3-Next: slot 4096 of a layer begins at element 2**31, so offsets are 64 bits wide."""
    states = plan_states(read(real("qwen3-next-80b-a3b.json")), 1, FORM)
    pool = Pool(states, 4097, torch.device("meta"))
    recurrent = pool.tensors(0)["recurrent"]
    assert recurrent[4096].storage_offset() == 2**31
    assert pool.bytes == 4098 * sum(spec.bytes for spec in states)


class Keys:
    """What an engine keeps by slot."""

    def __init__(self) -> None:
        self.held = {slot: f"keys {slot}" for slot in range(1, 5)}

    def release(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.held.pop(slot, None)


def test_what_is_kept_by_slot_goes_with_its_slot() -> None:
    pool, first, second = make(), Keys(), Keys()
    for keyed in (first, second):
        pool.attach(keyed)
    slots = pool.alloc(4)
    pool.free(slots[1:3])
    assert first.held == second.held == {1: "keys 1", 4: "keys 4"}
    with pytest.raises(ValueError):
        pool.free([slots[0], slots[1]])
    assert sorted(first.held) == [1, 4]


def test_a_reset_drops_everything_that_is_kept_by_slot() -> None:
    pool, keyed = make(), Keys()
    pool.attach(keyed)
    pool.alloc(2)
    pool.reset()
    assert keyed.held == {}
    assert pool.free_slots == 4


@pytest.mark.parametrize("one", [True, torch.tensor(1), torch.tensor([1])[0]])
def test_what_counts_as_one_is_slot_one_alone(one: Slot) -> None:
    """torch takes True for a mask, which would be the whole pool."""
    for call in (Pool.clear, Pool.free, lambda pool, slots: pool.copy(slots, [3])):
        pool, twin = make(), make()
        pool.alloc(2), twin.alloc(2)
        call(pool, [one])
        call(twin, [Slot(1)])
        assert all(map(torch.equal, bits(pool), bits(twin)))
        assert pool.free_slots == twin.free_slots
    pool.alloc(1)
    exported = pool.export_state(one, 5)
    assert all((segment.values == 1).all() for segment in exported.segments)
    pool.import_state(one, exported)
    target = pool.fork(one)
    for before, after in zip(bits(make()), bits(pool), strict=True):
        for slot in range(5):
            assert torch.equal(after[slot], before[1 if slot in (target, 3) else slot])


@pytest.mark.parametrize("call", ["clear", "copy", "export_state", "fork", "free", "import_state"])
def test_what_is_no_integer_is_no_slot(call: str) -> None:
    pool = make()
    pool.alloc(2)
    before, state = bits(pool), pool.export_state(Slot(1), 0)
    arguments: dict[str, tuple[object, ...]] = {
        "copy": ([1.0], [3]),
        "export_state": (1.0, 0),
        "fork": (1.0,),
        "import_state": (1.0, state),
    }
    with pytest.raises(TypeError):
        getattr(pool, call)(*arguments.get(call, ([1.0],)))
    assert all(map(torch.equal, bits(pool), before))
    assert pool.free_slots == 2


class Keeper:
    """Something kept by slot; one that fails forgets nothing."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.gone: list[Slot] = []

    def release(self, slots: Iterable[Slot]) -> None:
        if self.fails:
            raise RuntimeError("the engine's own")
        self.gone += slots


@given(st.lists(st.booleans(), max_size=4))
def test_a_keeper_that_fails_keeps_the_news_from_nobody(fails: list[bool]) -> None:
    """One that did not hear would serve the next tenant what the last one left."""
    pool, keepers = make(), [Keeper(each) for each in fails]
    for keeper in keepers:
        pool.attach(keeper)
    taken = pool.alloc(2)
    with pytest.raises(RuntimeError, match="own") if any(fails) else nullcontext():
        pool.free(taken)
    assert pool.free_slots == 4
    assert all(keeper.gone == taken for keeper in keepers if not keeper.fails)


class Accounts(RuleBasedStateMachine):
    """Any history of calls: every slot is free or used, never both, never slot 0."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = make(slots=5)
        self.used: list[Slot] = []

    @rule(count=st.integers(0, 6))
    def alloc(self, count: int) -> None:
        if count > 5 - len(self.used):
            with pytest.raises(PoolExhausted):
                self.pool.alloc(count)
        else:
            fresh = self.pool.alloc(count)
            assert not set(fresh) & set(self.used)
            self.used += fresh

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.used))
        self.pool.free([slot])
        self.used.remove(slot)
        with pytest.raises(ValueError):
            self.pool.free([slot])

    @rule()
    def reset(self) -> None:
        self.pool.reset()
        self.used.clear()

    @invariant()
    def slots_are_conserved(self) -> None:
        assert self.pool.free_slots + len(self.used) == 5
        assert 0 not in self.used


TestAccounts = Accounts.TestCase
TestAccounts.settings = settings(max_examples=40, stateful_step_count=30)
