"""The scheduler's plans: bounds, order, slots and modes, held against a ledger of its own."""

import subprocess
import sys
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal.errors import PoolExhausted, StepOrderError
from hal.runtime.batch import Batch, Limits, Mode, check
from hal.runtime.request import FinishReason, Request, RequestError
from hal.runtime.scheduler import Plan, Scheduler

ALL_MODES = frozenset({Mode.DECODE, Mode.EXTEND, Mode.MIXED, Mode.IDLE})
STOP = 7


class Slots:
    """Slots from 1 up that notice a double free; the last one freed is handed out first."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.free_list = list(range(count, 0, -1))
        self.freed = 0

    @property
    def free_slots(self) -> int:
        return len(self.free_list)

    def alloc(self, count: int = 1) -> list[int]:
        if count > len(self.free_list):
            raise AssertionError("alloc beyond what is free")
        return [self.free_list.pop() for _ in range(count)]

    def free(self, slots: list[int]) -> None:
        for slot in slots:
            assert slot not in self.free_list
            self.free_list.append(slot)
            self.freed += 1


@dataclass
class Case:
    """Requests as (prompt length, max_new_tokens, step of submission), and the limits."""

    requests: list[tuple[int, int, int]]
    slots: int
    max_batch: int
    budget: int
    max_len: int
    cancels: list[tuple[int, int]] = field(default_factory=list)


requests = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 8), st.integers(0, 12)), min_size=1, max_size=8
)
cases = st.builds(
    Case,
    requests=requests,
    slots=st.integers(1, 5),
    max_batch=st.integers(1, 5),
    budget=st.integers(1, 12),
    max_len=st.integers(21, 30),
    cancels=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 30)), max_size=4),
)


def next_token(history: list[int]) -> int:
    """The model of these tests: a token that depends on everything before it; 7 comes up."""
    return (sum(history) * 31 + len(history)) % 11


def prompt_of(number: int, length: int) -> list[int]:
    return [100 * number + i for i in range(length)]


@dataclass
class Ledger:
    """What each request was fed and given, kept without looking into the scheduler."""

    case: Case
    fed: dict[int, list[int]] = field(default_factory=dict)
    known: dict[int, list[int]] = field(default_factory=dict)
    slot: dict[int, int] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    plans: list[Plan] = field(default_factory=list)

    def book(self, plan: Plan) -> list[int]:
        """Check a plan row by row and return what the model of these tests samples."""
        self.plans.append(plan)
        batch, tokens, sampled = plan.batch, deque(plan.tokens), []
        for row, request in enumerate(plan.requests):
            assert request not in self.reasons
            history = self.fed.setdefault(request, [])
            assert batch.start[row] == len(history)
            assert self.slot.setdefault(request, batch.dst[row]) == batch.dst[row]
            assert batch.src[row] == (batch.dst[row] if history else -1)
            history += [tokens.popleft() for _ in range(batch.lengths[row])]
            assert history == self.known[request][: len(history)]
            assert (row in plan.samples) == (history == self.known[request])
            if row in plan.samples:
                sampled.append(next_token(history))
        assert not tokens
        return sampled


def drive(case: Case) -> Ledger:
    """Run a case to its end, checking every plan on the way."""
    slots, ledger = Slots(case.slots), Ledger(case)
    scheduler = Scheduler(slots, case.max_batch, case.budget, case.max_len)
    waiting = deque(sorted(case.requests, key=lambda request: request[2]))
    bound = sum(p + n for p, n, _ in case.requests) + 20
    for step in range(bound):
        while waiting and (waiting[0][2] <= step or scheduler.idle):
            length, new, _ = waiting.popleft()
            prompt = prompt_of(len(ledger.known), length)
            ledger.known[scheduler.submit(prompt, new, {STOP})] = list(prompt)
        for request, when in case.cancels:
            if when == step and (event := scheduler.cancel(request)) is not None:
                ledger.reasons[request] = event.reason
        plan = scheduler.schedule()
        if plan is None:
            assert scheduler.idle
            if not waiting:
                break
            continue
        check_plan(plan, case)
        for event in scheduler.complete(ledger.book(plan)):
            ledger.known[event.request].append(event.token)
            if event.reason is not None:
                ledger.reasons[event.request] = event.reason
    assert scheduler.idle
    assert slots.free_slots == case.slots
    assert slots.freed == len(ledger.slot)
    return ledger


def check_plan(plan: Plan, case: Case) -> None:
    """The limits of the step, and the runtime's own rules for a batch."""
    batch = plan.batch
    assert 1 <= batch.rows <= case.max_batch
    assert 1 <= len(plan.tokens) == sum(batch.lengths) <= case.budget
    assert all(length >= 1 for length in batch.lengths)
    check(batch, Limits(case.slots, case.max_batch, case.budget, ALL_MODES))


@given(cases)
def test_every_token_is_fed_once_in_order_to_its_own_slot_and_every_request_ends(
    case: Case,
) -> None:
    ledger = drive(case)
    assert set(ledger.reasons) == set(ledger.known)


@given(cases)
def test_a_request_ends_at_its_stop_token_or_at_a_bound_and_nowhere_else(case: Case) -> None:
    ledger = drive(case)
    by_arrival = sorted(case.requests, key=lambda request: request[2])
    for number, (length, new, _) in enumerate(by_arrival):
        output = ledger.known[number][length:]
        full = len(output) == new or length + len(output) == case.max_len
        match ledger.reasons[number]:
            case FinishReason.EOS:
                assert output[-1] == STOP
            case FinishReason.LENGTH:
                assert full and output[-1] != STOP
            case FinishReason.CANCELLED:
                assert not full
        assert STOP not in output[:-1]


@given(cases)
def test_decode_rows_come_first_and_the_mode_names_what_the_rows_are(case: Case) -> None:
    lengths = [p for p, _, _ in sorted(case.requests, key=lambda request: request[2])]
    for plan in drive(case).plans:
        batch = plan.batch
        decoding = [
            start >= lengths[request]
            for request, start in zip(plan.requests, batch.start, strict=True)
        ]
        assert decoding == sorted(decoding, reverse=True)
        one_token = all(s > 0 and n == 1 for s, n in zip(batch.start, batch.lengths, strict=True))
        wanted = Mode.MIXED if any(decoding) else Mode.EXTEND
        assert batch.mode is (Mode.DECODE if one_token else wanted)


@given(cases)
def test_requests_are_first_fed_in_the_order_they_came(case: Case) -> None:
    first: dict[int, None] = {}
    for plan in drive(case).plans:
        first |= dict.fromkeys(plan.requests)
    assert list(first) == sorted(first)


@given(cases)
def test_budget_is_left_over_only_where_nobody_could_use_it(case: Case) -> None:
    case.cancels = []
    ledger = drive(case)
    by_arrival = sorted(case.requests, key=lambda request: request[2])
    submitted = {number: when for number, (_, _, when) in enumerate(by_arrival)}
    lengths = [p for p, _, _ in by_arrival]
    for step, plan in enumerate(ledger.plans):
        if len(plan.tokens) == case.budget:
            continue
        for row, request in enumerate(plan.requests):
            in_prompt = plan.batch.start[row] < lengths[request]
            assert not in_prompt or row in plan.samples
        later = {r for p in ledger.plans[step + 1 :] for r in p.requests}
        started = {r for p in ledger.plans[: step + 1] for r in p.requests}
        full = len(plan.requests) == min(case.slots, case.max_batch)
        assert full or all(submitted[r] > step for r in later - started)


@given(st.integers(1, 40), st.integers(1, 9))
def test_a_prompt_beyond_the_budget_is_cut_into_full_chunks(length: int, budget: int) -> None:
    ledger = drive(Case([(length, 1, 0)], 1, 1, budget, 41))
    chunks = [plan.batch.lengths[0] for plan in ledger.plans]
    assert all(chunk == budget for chunk in chunks[:-1])
    assert len(chunks) == -(-length // budget)
    assert [plan.samples for plan in ledger.plans] == [()] * (len(chunks) - 1) + [(0,)]


def test_slots_are_reused_and_steps_are_mixed() -> None:
    case = Case([(n, 10, 0) for n in (1, 7, 40, 3, 12, 25)], 3, 3, 9, 64)
    ledger = drive(case)
    assert len(set(ledger.slot.values())) == 3
    modes = {plan.batch.mode for plan in ledger.plans}
    assert modes == {Mode.EXTEND, Mode.MIXED, Mode.DECODE}


def test_no_more_requests_run_than_a_step_has_rows() -> None:
    ledger = drive(Case([(1, 4, 0)] * 5, 5, 2, 9, 21))
    assert {slot for slot in ledger.slot.values()} == {1, 2}


@pytest.mark.parametrize("length", [21, 22, 1000])
def test_a_prompt_that_could_never_be_served_is_refused_with_both_numbers(length: int) -> None:
    scheduler = Scheduler(Slots(1), 1, 4, max_len=21)
    with pytest.raises(RequestError, match=rf"{length} tokens, at most 20 fit"):
        scheduler.submit(range(length), 1)
    assert scheduler.idle


def test_the_longest_prompt_that_fits_gets_one_token() -> None:
    ledger = drive(Case([(20, 8, 0)], 1, 1, 4, 21))
    assert len(ledger.known[0]) == 21
    assert ledger.reasons[0] in (FinishReason.LENGTH, FinishReason.EOS)


@pytest.mark.parametrize(
    ("prompt", "new", "text"),
    [([], 1, "the prompt has no tokens"), ([1], 0, "max_new_tokens is 0, expected at least 1")],
)
def test_a_request_for_nothing_is_refused(prompt: list[int], new: int, text: str) -> None:
    with pytest.raises(RequestError, match=text):
        Scheduler(Slots(1), 1, 1, 21).submit(prompt, new)


@pytest.mark.parametrize(("rows", "budget"), [(0, 1), (1, 0), (-1, 5)])
def test_limits_below_one_are_refused(rows: int, budget: int) -> None:
    with pytest.raises(ValueError, match=rf"max_batch {rows}, token_budget {budget}"):
        Scheduler(Slots(1), rows, budget, 21)


def test_schedule_and_complete_alternate() -> None:
    scheduler = Scheduler(Slots(1), 1, 4, 21)
    with pytest.raises(StepOrderError, match="complete was called without schedule"):
        scheduler.complete([])
    scheduler.submit([1], 2)
    scheduler.schedule()
    with pytest.raises(StepOrderError, match="schedule was called twice"):
        scheduler.schedule()


def test_complete_wants_a_token_for_each_row_that_samples() -> None:
    scheduler = Scheduler(Slots(1), 1, 4, 21)
    scheduler.submit([1], 2)
    scheduler.schedule()
    with pytest.raises(ValueError, match="2 tokens, 1 rows sample"):
        scheduler.complete([1, 2])
    assert [event.token for event in scheduler.complete([5])] == [5]


def test_a_request_cancelled_within_a_step_gets_no_token_and_frees_its_slot_once() -> None:
    slots = Slots(2)
    scheduler = Scheduler(slots, 2, 4, 21)
    scheduler.submit([1], 5)
    scheduler.submit([2], 5)
    scheduler.schedule()
    event = scheduler.cancel(0)
    assert event is not None and event.reason is FinishReason.CANCELLED
    assert [event.request for event in scheduler.complete([5, 5])] == [1]
    assert slots.free_slots == 1
    assert scheduler.cancel(0) is None
    assert scheduler.cancel(99) is None


def test_cancel_all_ends_the_waiting_too_and_forgets_the_step() -> None:
    slots = Slots(1)
    scheduler = Scheduler(slots, 1, 4, 21)
    for _ in range(3):
        scheduler.submit([1, 2], 5)
    scheduler.schedule()
    assert [event.request for event in scheduler.cancel_all()] == [0, 1, 2]
    assert scheduler.idle and slots.free_slots == 1
    assert scheduler.schedule() is None


def test_requests_that_nothing_can_be_fed_of_are_an_error_with_both_numbers_not_an_end() -> None:
    slots = Slots(2)
    first, second = Scheduler(slots, 2, 8, 21), Scheduler(slots, 2, 8, 21)
    for scheduler, count in ((first, 2), (second, 3)):
        for _ in range(count):
            scheduler.submit([1, 2], 1)
    assert first.schedule() is not None
    for _ in range(2):
        with pytest.raises(PoolExhausted, match="3 requests wait for a slot each, 0 are free, and"):
            second.schedule()
        assert not second.idle
    assert len(first.complete([5, 5])) == 2
    plan = second.schedule()
    assert plan is not None and plan.requests == (0, 1)


def test_next_tokens_cross_from_the_prompt_into_the_output() -> None:
    request = Request(0, (1, 2, 3), 9, output=[4, 5], fed=2)
    assert request.next_tokens(1) == [3]
    assert request.next_tokens(3) == [3, 4, 5]
    request.fed = 4
    assert request.pending == 1
    assert request.next_tokens(1) == [5]


def test_the_scheduler_imports_no_torch() -> None:
    code = "import sys, hal.runtime.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_idle_scheduler_plans_nothing() -> None:
    scheduler = Scheduler(Slots(1), 1, 1, 21)
    assert scheduler.schedule() is None
    assert Batch(Mode.IDLE).rows == 0
