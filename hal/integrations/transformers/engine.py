"""Requests in, tokens out: the scheduler's steps run by the runner, sampled greedily."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import torch

from hal.errors import HalError
from hal.runtime.batch import Mode
from hal.runtime.drafts import Drafter
from hal.runtime.placement import Placement, PrefixCache
from hal.runtime.prefix import model_identity
from hal.runtime.request import RequestError
from hal.runtime.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

    from hal.integrations.transformers.runner import Runner
    from hal.runtime.batch import Limits
    from hal.runtime.plan import Event, Plan


class Observe(Protocol):
    """Sees a step's plan and the logits of the rows that sample, as many as its `widths` say."""

    def __call__(self, plan: Plan, logits: Tensor) -> None:
        """Called once a step, before the tokens are chosen."""
        ...


@dataclass(frozen=True, slots=True)
class DraftStats:
    """What speculation did: `accepted` of `drafted` tokens, in `steps` VERIFY steps."""

    steps: int
    drafted: int
    accepted: int


@dataclass(slots=True)
class Clock:
    """When a request was submitted, first fed, first answered and ended, in seconds."""

    submitted: float
    started: float | None = None
    answered: float | None = None
    ended: float | None = None

    def timings(self) -> dict[str, float]:
        """Seconds in the queue, until the first token, and from there to the end."""
        end = perf_counter() if self.ended is None else self.ended
        started = end if self.started is None else self.started
        answered = end if self.answered is None else self.answered
        return {
            "queue_s": started - self.submitted,
            "prefill_s": answered - started,
            "decode_s": end - answered,
            "total_s": end - self.submitted,
        }


class Engine:
    """Serves requests with continuous batching; the highest logit is the next token.

    It drafts and caches prefixes where the runner's selection was made with `speculative` and
    `prefix_cache`. Drafts change no token, only how many a step gives. Cached states stay in the
    runner's slots when the engine is done, for the next one over the same runner.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        max_batch: int,
        token_budget: int,
        stop: Iterable[int] = (),
        observe: Observe | None = None,
    ) -> None:
        self.runner = runner
        options = runner.backend.selection.options
        _check_room(runner.backend.limits, max_batch, token_budget)
        placement = _placement(runner)
        self.prefixes = placement.stats
        self._speculative = options.speculative
        self.scheduler = Scheduler(
            runner,
            max_batch,
            token_budget,
            runner.max_len,
            placement=placement,
            drafter=Drafter(options.speculative.width) if options.speculative else None,
        )
        self.clocks: list[Clock] = []
        self._stop = frozenset(stop)
        self._observe = observe

    def submit(self, prompt: Sequence[int], max_new_tokens: int) -> int:
        """Queue a prompt and return its id; `RequestError` where it can't be served."""
        check_ids(prompt, self.runner.backend.selection.model.vocab_size)
        request = self.scheduler.submit(prompt, max_new_tokens, self._stop)
        self.clocks.append(Clock(perf_counter()))
        return request

    def run(self) -> Iterator[Event]:
        """Step until every request has ended, and give each new token as it comes."""
        while (events := self.step()) is not None:
            yield from events

    def step(self) -> list[Event] | None:
        """Run one step and say what it did to which request; None where nothing is left to do.

        Raises `PoolExhausted`, and changes nothing, where requests wait for slots that others over
        the same runner have; step again once those end.
        """
        plan = self.scheduler.schedule()
        return None if plan is None else self._run(plan)

    @property
    def drafts(self) -> DraftStats | None:
        """What speculation did, None where it was not selected."""
        if self._speculative is None:
            return None
        counts = self.scheduler.counts
        drafted, accepted = sum(c.drafted for c in counts), sum(c.accepted for c in counts)
        return DraftStats(self.scheduler.verified, drafted, accepted)

    def cancel(self) -> list[Event]:
        """End what has not ended yet, and free the slots; also after a step that failed."""
        self.runner.abandon()
        events = self.scheduler.cancel_all()
        for event in events:
            self.clocks[event.request].ended = perf_counter()
        return events

    def _run(self, plan: Plan) -> list[Event]:
        now = perf_counter()
        for request in plan.requests:
            clock = self.clocks[request]
            clock.started = now if clock.started is None else clock.started
        logits = self.runner.step(plan.batch, plan.tokens, plan.samples)
        if self._observe is not None:
            self._observe(plan, logits)
        sampled = greedy(logits)
        if plan.batch.mode is Mode.VERIFY:
            self.runner.commit(self.scheduler.accepted(sampled))
        events = self.scheduler.complete(sampled)
        now = perf_counter()
        for event in events:
            clock = self.clocks[event.request]
            clock.answered = now if clock.answered is None else clock.answered
            clock.ended = now if event.reason is not None else None
        return events


def _check_room(limits: Limits, max_batch: int, token_budget: int) -> None:
    """Refuse steps that the backend was not built for, before the first of them is planned."""
    for what, asked, most, option in (
        ("max_batch", max_batch, limits.max_batch, "max_batch"),
        ("token_budget", token_budget, limits.max_tokens, "max_tokens"),
    ):
        if asked > most:
            raise ValueError(
                f"engine: {what} {asked}, the backend was built for {most}; "
                f"ask for less, or build it with a larger {option}"
            )


def _placement(runner: Runner) -> Placement:
    """Where requests' states live; with tracking selected, prefixes are cached on its grid."""
    backend = runner.backend
    if backend.limits.track is None:
        return Placement(runner)
    identity = model_identity(backend.selection)
    return PrefixCache(runner, runner.prefixes, identity, backend.limits.track)


def greedy(logits: Tensor) -> list[int]:
    """The highest logit of each row; a row that holds NaN has none, so it is an error."""
    if not logits.shape[0]:
        return []
    values, ids = logits.max(dim=-1)
    if not bool(torch.isfinite(values).all()):
        raise HalError(
            f"the model gave logits that are not finite ({values.tolist()}); "
            f"the weights or the dtype do not hold its values"
        )
    chosen: list[int] = ids.tolist()
    return chosen


def check_ids(prompt: Sequence[int], vocab_size: int) -> None:
    """Refuse ids that the embedding has no row for, and what is no whole number."""
    odd = [token for token in prompt if type(token) is not int]
    if odd:
        raise RequestError(f"token id {odd[0]!r} is no whole number")
    stray = [token for token in prompt if not 0 <= token < vocab_size]
    if stray:
        raise RequestError(
            f"token id {stray[0]} is outside the vocabulary, which has ids 0 to {vocab_size - 1}"
        )
