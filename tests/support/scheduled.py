"""A scheduler run on slots that hold token tuples in place of states, so that any mix-up shows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hal.runtime.batch import Limits, Mode, check
from hal.runtime.drafts import Drafter
from hal.runtime.placement import PrefixCache
from hal.runtime.prefix import PrefixIndex
from hal.runtime.request import FinishReason
from hal.runtime.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hal.runtime.plan import Plan

STOP = 7
MODES = frozenset({Mode.DECODE, Mode.EXTEND, Mode.MIXED, Mode.VERIFY, Mode.IDLE})
LOST = (-1,)
"""What a slot holds that nobody may read."""


def next_token(history: Sequence[int]) -> int:
    """The model of these tests: 3, 4, 5, 6 go round, all else is odd, and 7 comes up at times."""
    if 3 <= history[-1] <= 6 and len(history) % 7:
        return 3 + (history[-1] - 2) % 4
    token = (sum(history[-2:]) * 31 + len(history) // 9) % 11
    return 8 if token == STOP and len(history) % 5 else token


@dataclass
class World:
    """Slots, their contents, and what a step of a plan does to them."""

    count: int
    states: dict[int, tuple[int, ...]] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)

    @property
    def free_slots(self) -> int:
        return self.count - len(self.used)

    def alloc(self, count: int = 1) -> list[int]:
        taken = [slot for slot in range(1, self.count + 1) if slot not in self.used][:count]
        assert len(taken) == count
        self.used.update(taken)
        self.states |= dict.fromkeys(taken, LOST)
        return taken

    def free(self, slots: list[int]) -> None:
        """Take slots back; a step that runs may still read and write them, as a real one does."""
        for slot in slots:
            assert slot in self.used
            self.used.remove(slot)

    def rows(self, plan: Plan) -> list[tuple[int, ...]]:
        """Every row's tokens from its beginning, those of the step included."""
        tokens, batch = deque(plan.tokens), plan.batch
        found = []
        for row, length in enumerate(batch.lengths):
            before = self.states[batch.src[row]] if batch.src[row] > 0 else ()
            assert len(before) == batch.start[row]
            found.append((*before, *(tokens.popleft() for _ in range(length))))
        assert not tokens
        return found

    def run(self, plan: Plan) -> list[int]:
        """Move the states as the step does, and sample; a VERIFY step moves none."""
        batch, histories = plan.batch, self.rows(plan)
        if batch.mode is Mode.VERIFY:
            return [
                next_token(histories[row][: batch.start[row] + i + 1])
                for row in plan.samples
                for i in range(batch.lengths[row])
            ]
        for row, position, slot in batch.track:
            assert slot in self.used
            self.states[slot] = histories[row][:position]
        for row, history in enumerate(histories):
            self.states[batch.dst[row]] = history
        return [next_token(histories[row]) for row in plan.samples]

    def commit(self, plan: Plan, accepted: list[int]) -> None:
        """Keep the accepted tokens of every row."""
        batch, histories = plan.batch, self.rows(plan)
        for row, count in enumerate(accepted):
            if count:
                self.states[batch.dst[row]] = histories[row][: batch.start[row] + count]


@dataclass
class Setting:
    """What a scheduler is made with, and what is asked of it."""

    prompts: list[tuple[list[int], int, int]]
    """Each with max_new_tokens, and the step of its submission."""
    slots: int = 6
    max_batch: int = 3
    budget: int = 8
    max_len: int = 60
    width: int = 0
    grid: int = 0
    cancels: list[tuple[int, int]] = field(default_factory=list)
    within: list[tuple[int, int, int]] = field(default_factory=list)
    """Requests that are cancelled within a step: the request, the step and its phase, 0 to 2."""
    failures: frozenset[int] = frozenset()
    """Steps that fail, after which all is cancelled."""


def alone(prompt: Sequence[int], new: int, max_len: int) -> list[int]:
    """What a request gives by itself."""
    history = list(prompt)
    while True:
        history.append(next_token(history))
        made = len(history) - len(prompt)
        if history[-1] == STOP or made == new or len(history) == max_len:
            return history[len(prompt) :]


class Drive:
    """Runs a setting to its end, checking every plan; keeps what happened."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.world = World(setting.slots)
        self.index = PrefixIndex()
        self.cache = (
            PrefixCache(self.world, self.index, "model", setting.grid) if setting.grid else None
        )
        self.drafter = Drafter(setting.width) if setting.width else None
        self.scheduler = Scheduler(
            self.world,
            setting.max_batch,
            setting.budget,
            setting.max_len,
            placement=self.cache,
            drafter=self.drafter,
        )
        self.plans: list[Plan] = []
        self.output: dict[int, list[int]] = {}
        self.reasons: dict[int, FinishReason] = {}
        self.submitted: list[int] = []
        """Requests in the order of submission, as indices of the setting's prompts."""

    def run(self) -> Drive:
        waiting = deque(sorted(range(len(self.setting.prompts)), key=self._when))
        for step in range(2000):
            while waiting and (self._when(waiting[0]) <= step or self.scheduler.idle):
                self._submit(waiting.popleft())
            for request, when in self.setting.cancels:
                if when == step and (event := self.scheduler.cancel(request)) is not None:
                    self.reasons[request] = event.reason
            if not self._step(step) and not waiting:
                break
        self._finish()
        return self

    def _when(self, number: int) -> int:
        return self.setting.prompts[number][2]

    def _submit(self, number: int) -> None:
        prompt, new, _ = self.setting.prompts[number]
        request = self.scheduler.submit(prompt, new, {STOP})
        assert request == len(self.submitted)
        self.submitted.append(number)
        self.output[request] = []

    def _step(self, number: int) -> bool:
        plan = self.scheduler.schedule()
        if plan is None:
            assert self.scheduler.idle
            return False
        self.plans.append(plan)
        self._check(plan)
        kept = {slot: self.world.states[slot] for slot in self.index.slots}
        if number in self.setting.failures:
            for slot in (*plan.batch.dst, *(point[2] for point in plan.batch.track)):
                self.world.states[slot] = LOST
            for event in self.scheduler.cancel_all():
                self.reasons[event.request] = event.reason
        else:
            self._cancel_within(number, 0)
            sampled = self.world.run(plan)
            self._cancel_within(number, 1)
            if plan.batch.mode is Mode.VERIFY:
                self.world.commit(plan, self.scheduler.accepted(sampled))
            self._cancel_within(number, 2)
            for event in self.scheduler.complete(sampled):
                self.output[event.request].append(event.token)
                if event.reason is not None:
                    self.reasons[event.request] = event.reason
        assert all(self.world.states[slot] == state for slot, state in kept.items())
        self._check_index()
        return True

    def _cancel_within(self, number: int, phase: int) -> None:
        for request, *when in self.setting.within:
            if when == [number, phase] and (event := self.scheduler.cancel(request)) is not None:
                self.reasons[request] = event.reason

    def _check(self, plan: Plan) -> None:
        """The limits, and the runtime's own rules for a batch."""
        setting, batch = self.setting, plan.batch
        limits = Limits(
            setting.slots,
            setting.max_batch,
            setting.budget,
            MODES,
            setting.grid or None,
            setting.width,
        )
        check(batch, limits)
        assert all(length >= 1 for length in batch.lengths)
        cached = set(self.index.slots)
        written = {*batch.dst, *(point[2] for point in batch.track)}
        assert not written & cached
        for row, request in enumerate(plan.requests):
            assert request not in self.reasons
            assert batch.src[row] in (-1, batch.dst[row]) or batch.src[row] in cached
            history = self.world.rows(plan)[row]
            prompt = self.setting.prompts[self.submitted[request]][0]
            known = (*prompt, *self.output[request])
            assert history[: len(known)] == known[: len(history)]

    def _check_index(self) -> None:
        """Every cached slot is in use, and holds the state that the index says."""
        for slot in self.index.slots:
            assert slot in self.world.used
            state = self.world.states[slot]
            assert state and state != LOST
            assert self.index.has("model", state)

    def _finish(self) -> None:
        """Everyone ended, and beside cached states nothing is held."""
        assert self.scheduler.idle
        assert len(self.reasons) == len(self.setting.prompts)
        assert self.world.used == set(self.index.slots)
        assert all(not self.index.holders(slot) for slot in self.index.slots)
        assert self.drafter is None or not self.drafter._known
        while self.index.evict() is not None:
            pass
        assert all(not root.children for root in self.index._roots.values())
        for request, number in enumerate(self.submitted):
            prompt, new, _ = self.setting.prompts[number]
            wanted = alone(prompt, new, self.setting.max_len)
            got = self.output[request]
            assert got == wanted[: len(got)]
            assert (got == wanted) or self.reasons[request] is FinishReason.CANCELLED
