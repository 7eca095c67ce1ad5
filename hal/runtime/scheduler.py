"""Continuous batching on the host: which request feeds which tokens in the next step.

Pure Python: it knows slots and tokens, and neither torch nor a model.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hal.errors import PoolExhausted, StepOrderError
from hal.runtime.batch import Mode
from hal.runtime.drafts import agreed
from hal.runtime.placement import Placement
from hal.runtime.plan import Event, Plan, Row, make_plan
from hal.runtime.request import Counts, FinishReason, Request, check_request

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hal.runtime.drafts import Drafter
    from hal.runtime.placement import Slots


@dataclass(frozen=True, slots=True)
class _Step:
    """A plan, and the rows that it was made of."""

    plan: Plan
    rows: tuple[Row, ...]


class Scheduler:
    """First come, first served, in steps of at most `max_batch` rows and `token_budget` tokens.

    Decode rows go first, then prompts, in chunks where the budget cuts them; a request keeps its
    slot from its first chunk to its end. `max_len` bounds prompt and output together.

    With a `drafter`, decode rows make VERIFY steps while any of them has drafts; where prompts
    wait too, such steps alternate with others, since no prompt is fed in them. `placement` may be
    a `PrefixCache`, over the same slots.
    """

    def __init__(
        self,
        slots: Slots,
        max_batch: int,
        token_budget: int,
        max_len: int,
        *,
        placement: Placement | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        if max_batch < 1 or token_budget < 1:
            raise ValueError(
                f"scheduler: max_batch {max_batch}, token_budget {token_budget}: "
                f"expected at least 1"
            )
        self.max_batch = max_batch
        self.token_budget = token_budget
        self.max_len = max_len
        self._placement = Placement(slots) if placement is None else placement
        self._drafter = drafter
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._step: _Step | None = None
        self._verified = False
        self.verified = 0
        """How many VERIFY steps ran."""
        self.counts: list[Counts] = []
        """What each request was spared, by id."""

    @property
    def idle(self) -> bool:
        """Whether every request has ended."""
        return not self._waiting and not self._running

    def submit(self, prompt: Sequence[int], max_new_tokens: int, stop: Iterable[int] = ()) -> int:
        """Queue a request and return its id; ids count up from 0 in the order of submission.

        Raises `RequestError` for a prompt that could never be served. One that is longer than the
        token budget is served in chunks.
        """
        check_request(len(prompt), max_new_tokens, self.max_len)
        request = Request(len(self.counts), tuple(prompt), max_new_tokens, frozenset(stop))
        self.counts.append(request.counts)
        self._placement.enter(request)
        self._waiting.append(request)
        return request.id

    def schedule(self) -> Plan | None:
        """The next step, or None where nothing is left to do; `complete` has to follow it.

        Raises `PoolExhausted`, and changes nothing, where all that is left has to wait for slots
        that others over the same pool have.
        """
        if self._step is not None:
            raise StepOrderError("schedule was called twice without complete in between")
        rows = self._drafted() or self._filled()
        if not rows:
            self._check_idle()
            return None
        verify = any(row.drafts for row in rows)
        track = [] if verify else self._placement.track([(r.request, r.length) for r in rows])
        self._step = _Step(make_plan(rows, track), rows)
        self._verified = verify
        return self._step.plan

    def accepted(self, sampled: Sequence[int]) -> list[int]:
        """For each row of the VERIFY step under way, how many tokens its commit has to take.

        `sampled` are the tokens that `complete` will get; a request that was cancelled keeps none.
        """
        return [
            0 if row.request.reason is not None else len(kept)
            for row, kept in self._kept(self._checked(sampled), sampled)
        ]

    def complete(self, sampled: Sequence[int]) -> list[Event]:
        """Book the step that ran, with the tokens of the plan's `samples`, row by row in order.

        A VERIFY step has to be committed before, with the counts of `accepted`.
        """
        step = self._checked(sampled)
        self._step = None
        verify = step.plan.batch.mode is Mode.VERIFY
        self.verified += verify
        for row in step.rows:
            row.request.fed += 0 if verify else row.length
        self._placement.settle([row.request for row in step.rows])
        return [
            event
            for row, kept in self._kept(step, sampled)
            if row.request.reason is None
            for event in self._accept(row, kept, verify)
        ]

    def cancel(self, request_id: int) -> Event | None:
        """End a request and free its slot, between steps or within one; None if it had ended."""
        for request in (*self._running, *self._waiting):
            if request.id == request_id:
                request.reason = FinishReason.CANCELLED
                self._leave(request)
                return Event(request_id, None, request.reason)
        return None

    def cancel_all(self) -> list[Event]:
        """End every request, as after a step that failed; the step is forgotten too."""
        self._step = None
        self._placement.give_up()
        ids = sorted(request.id for request in (*self._running, *self._waiting))
        return [event for request in ids if (event := self.cancel(request)) is not None]

    def _check_idle(self) -> None:
        """Where no row could be made, there has to be nobody who waits for one."""
        if not self.idle:
            raise PoolExhausted(
                f"scheduler: {len(self._waiting)} requests wait for a slot each, "
                f"{self._placement.slots.free_slots} are free, and none of its own will be; "
                f"let others over the same pool end, or build the backend with more slots"
            )

    def _filled(self) -> tuple[Row, ...]:
        """Rows of decodes and prompts, as far as the budget goes."""
        rows: list[Row] = []
        budget = self.token_budget
        for request in self._candidates():
            length = self._placement.cut(request, min(request.pending, budget))
            rows.append(Row(request, length))
            budget -= length
            if budget == 0:
                break
        return tuple(rows)

    def _drafted(self) -> tuple[Row, ...]:
        """Decode rows with their drafts, none where no row has any or it is the prompts' turn."""
        if self._drafter is None or (self._verified and self._prompts()):
            return ()
        decoding = [r for r in self._running if r.decoding][: self.token_budget]
        spare, rows = self.token_budget - len(decoding), []
        for request in decoding:
            # The last token of a request is never fed, so a draft of it would be of no use.
            most = min(spare, request.room(self.max_len) - 1)
            drafts = self._drafter.propose(request, most)
            spare -= len(drafts)
            rows.append(Row(request, 1, drafts))
        return tuple(rows) if any(row.drafts for row in rows) else ()

    def _prompts(self) -> bool:
        """Whether a prompt could be fed now."""
        return self._admits() or any(not request.decoding for request in self._running)

    def _admits(self) -> bool:
        waits = bool(self._waiting) and len(self._running) < self.max_batch
        return waits and self._placement.room

    def _candidates(self) -> Iterator[Request]:
        """Decode rows, prompts under way, then new requests as rows and slots allow."""
        yield from [r for r in self._running if r.decoding]
        yield from [r for r in self._running if not r.decoding]
        # Admitted only when asked for, so that nobody holds a slot without a row.
        while self._admits() and self._placement.admit(self._waiting[0]):
            request = self._waiting.popleft()
            self._running.append(request)
            yield request

    def _checked(self, sampled: Sequence[int]) -> _Step:
        """The step under way, if these are as many tokens as it samples."""
        if self._step is None:
            raise StepOrderError("complete was called without schedule")
        plan = self._step.plan
        if len(sampled) != sum(plan.widths):
            what = "tokens" if plan.batch.mode is Mode.VERIFY else "rows"
            raise ValueError(f"complete: {len(sampled)} tokens, {sum(plan.widths)} {what} sample")
        return self._step

    def _kept(self, step: _Step, sampled: Sequence[int]) -> Iterator[tuple[Row, tuple[int, ...]]]:
        """Every sampling row with the tokens that hold."""
        begin = 0
        for sample, width in zip(step.plan.samples, step.plan.widths, strict=True):
            row, chosen = step.rows[sample], tuple(sampled[begin : begin + width])
            begin += width
            yield row, chosen[: agreed(row.drafts, chosen, row.request.stop)]

    def _accept(self, row: Row, kept: tuple[int, ...], verify: bool) -> Iterator[Event]:
        """Append the tokens of a row, and end its request where one of them does."""
        request = row.request
        if verify:
            request.fed += len(kept)
            request.counts.drafted += len(row.drafts)
            request.counts.accepted += len(kept) - 1
        for token in kept:
            request.accept(token, self.max_len)
            if request.reason is not None:
                self._leave(request)
            yield Event(request.id, token, request.reason)

    def _leave(self, request: Request) -> None:
        """Take a request off the lists, and its slot with it."""
        if request.slot is None:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
        self._placement.leave(request)
        if self._drafter is not None:
            self._drafter.forget(request)
