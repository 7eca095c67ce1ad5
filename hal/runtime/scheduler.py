"""Continuous batching on the host: which request feeds which tokens in the next step.

Pure Python: it knows slots and tokens, and neither torch nor a model.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hal.errors import StepOrderError
from hal.runtime.batch import NO_SLOT, Batch, Mode
from hal.runtime.request import FinishReason, Request, check_request

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hal.runtime.pool import Slot


class Slots(Protocol):
    """Where a request's state lives; `hal.runtime.pool.Pool` is one."""

    @property
    def free_slots(self) -> int:
        """How many slots `alloc` can still hand out."""
        ...

    def alloc(self, count: int = 1) -> list[Slot]:
        """Hand out `count` slots."""
        ...

    def free(self, slots: Iterable[Slot]) -> None:
        """Take slots back."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: the batch, its packed tokens, and for every row the request it belongs to.

    `samples` are the rows whose last token gets a successor: decode rows, and prefill rows that
    reach the end of their prompt.
    """

    batch: Batch
    tokens: tuple[int, ...]
    requests: tuple[int, ...]
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """What a step did to a request: a new token, an end, or both at once."""

    request: int
    token: int | None
    reason: FinishReason | None


class Scheduler:
    """First come, first served, in steps of at most `max_batch` rows and `token_budget` tokens.

    Decode rows go first, then prompts, in chunks where the budget cuts them; a request keeps its
    slot from its first chunk to its end. `max_len` bounds prompt and output together.
    """

    def __init__(self, slots: Slots, max_batch: int, token_budget: int, max_len: int) -> None:
        if max_batch < 1 or token_budget < 1:
            raise ValueError(
                f"scheduler: max_batch {max_batch}, token_budget {token_budget}: "
                f"expected at least 1"
            )
        self.max_batch = max_batch
        self.token_budget = token_budget
        self.max_len = max_len
        self._slots = slots
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._step: tuple[Plan, list[Request]] | None = None
        self._submitted = 0

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
        request = Request(self._submitted, tuple(prompt), max_new_tokens, frozenset(stop))
        self._submitted += 1
        self._waiting.append(request)
        return request.id

    def schedule(self) -> Plan | None:
        """The next step, or None where nothing is left to do; `complete` has to follow it."""
        if self._step is not None:
            raise StepOrderError("schedule was called twice without complete in between")
        rows: list[tuple[Request, int]] = []
        budget = self.token_budget
        for request in self._candidates():
            length = min(request.pending, budget)
            rows.append((request, length))
            budget -= length
            if budget == 0:
                break
        if not rows:
            return None
        plan = _plan(rows)
        self._step = plan, [request for request, _ in rows]
        return plan

    def complete(self, sampled: Sequence[int]) -> list[Event]:
        """Book the step that ran, with one token for each of the plan's `samples`, in order."""
        if self._step is None:
            raise StepOrderError("complete was called without schedule")
        plan, requests = self._step
        if len(sampled) != len(plan.samples):
            raise ValueError(f"complete: {len(sampled)} tokens, {len(plan.samples)} rows sample")
        self._step = None
        for request, length in zip(requests, plan.batch.lengths, strict=True):
            request.fed += length
        return [
            self._accept(requests[row], token)
            for row, token in zip(plan.samples, sampled, strict=True)
            if requests[row].reason is None
        ]

    def cancel(self, request_id: int) -> Event | None:
        """End a request and free its slot, between steps or within one; None if it had ended."""
        for request in (*self._running, *self._waiting):
            if request.id == request_id:
                request.reason = FinishReason.CANCELLED
                self._release(request)
                return Event(request_id, None, request.reason)
        return None

    def cancel_all(self) -> list[Event]:
        """End every request, as after a step that failed; the step is forgotten too."""
        self._step = None
        ids = sorted(request.id for request in (*self._running, *self._waiting))
        return [event for request in ids if (event := self.cancel(request)) is not None]

    def _candidates(self) -> Iterator[Request]:
        """Decode rows, prompts under way, then new requests as rows and slots allow."""
        yield from [r for r in self._running if r.decoding]
        yield from [r for r in self._running if not r.decoding]
        while self._waiting and self._slots.free_slots and len(self._running) < self.max_batch:
            # Admitted only when asked for, so that nobody holds a slot without a row.
            yield self._admit()

    def _admit(self) -> Request:
        (slot,) = self._slots.alloc(1)
        request = self._waiting.popleft()
        request.slot = slot
        self._running.append(request)
        return request

    def _accept(self, request: Request, token: int) -> Event:
        request.accept(token, self.max_len)
        if request.reason is not None:
            self._release(request)
        return Event(request.id, token, request.reason)

    def _release(self, request: Request) -> None:
        if request.slot is None:
            self._waiting.remove(request)
            return
        self._running.remove(request)
        self._slots.free([request.slot])
        request.slot = None


def _plan(rows: Sequence[tuple[Request, int]]) -> Plan:
    starts = [request.fed for request, _ in rows]
    slots = [NO_SLOT if request.slot is None else request.slot for request, _ in rows]
    src = [slot if start else NO_SLOT for slot, start in zip(slots, starts, strict=True)]
    lengths = [length for _, length in rows]
    return Plan(
        Batch(_mode(rows), lengths, starts, src, slots),
        tuple(token for request, length in rows for token in request.next_tokens(length)),
        tuple(request.id for request, _ in rows),
        tuple(i for i, (request, length) in enumerate(rows) if length == request.pending),
    )


def _mode(rows: Sequence[tuple[Request, int]]) -> Mode:
    """DECODE is for one-token continuations alone: the last token of a cut prompt is one too."""
    if all(request.fed and length == 1 for request, length in rows):
        return Mode.DECODE
    return Mode.MIXED if any(request.decoding for request, _ in rows) else Mode.EXTEND
