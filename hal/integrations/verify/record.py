"""What an engine is asked and what it answered, as plain data that travels through JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

TOP: Final = 20
"""Likeliest tokens kept of each step, as many as vLLM gives unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Step:
    """One greedy token, its log-probability, and those of the likeliest tokens beside it."""

    token: int
    logprob: float
    top: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Answer:
    """The steps of one prompt; `cached` of its tokens were not fed but found in a prefix cache."""

    steps: tuple[Step, ...]
    cached: int = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        """The new tokens."""
        return tuple(step.token for step in self.steps)

    def to_json(self) -> list[Any]:
        """The answer as lists, with the tokens of `top` as text."""
        steps = [[s.token, s.logprob, {str(t): p for t, p in s.top.items()}] for s in self.steps]
        return [self.cached, steps]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Answer:
        """Read what `to_json` wrote."""
        cached, steps = data
        made = (Step(t, p, {int(i): q for i, q in top.items()}) for t, p, top in steps)
        return cls(tuple(made), cached)


@dataclass(frozen=True, slots=True)
class Setup:
    """How an engine is opened: `chunks` are the sizes in which it is to feed prompts.

    Without chunks every prompt is fed whole and nothing is cached: the fresh engine. `max_len`
    bounds prompt and output together.
    """

    folder: str
    device: str
    dtype: str | None
    max_batch: int
    max_len: int
    vocab_size: int
    chunks: tuple[int, ...] = ()
    prefix: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def top(self) -> int:
        """Likeliest tokens to ask for."""
        return min(TOP, self.vocab_size)

    @property
    def budget(self) -> int:
        """Tokens that a step may take."""
        return max(self.chunks, default=self.max_batch * self.max_len)


@dataclass(frozen=True, slots=True)
class Facts:
    """What was opened: `block` is what one block of the prefix cache holds, where there are any.

    `no_prefix` says why prefixes are not cached, None where they are.
    """

    engine: str
    version: str
    device: str
    dtype: str
    served_by: tuple[str, ...] = ()
    block: int = 1
    no_prefix: str | None = None


class Served(Protocol):
    """An engine that serves one model greedily, whatever end token comes."""

    @property
    def facts(self) -> Facts:
        """What was opened."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], counts: Sequence[int], chunk: int | None
    ) -> list[Answer]:
        """Serve the prompts at once, `counts` new tokens each, fed in one of the setup's chunks."""
        ...

    def score(self, ids: Sequence[int], start: int) -> list[float]:
        """Log-probabilities of `ids[start:]`, by prefill alone: nothing decoded, nothing cached."""
        ...

    def forget(self) -> None:
        """Drop cached prefixes."""
        ...


Ways = dict[str, dict[int, Answer]]
"""Answers by the way in which they were served, and by prompt."""


@dataclass(frozen=True, slots=True)
class Record:
    """What one engine gave: answers by way and prompt, and the re-prefill scores by prompt."""

    facts: Facts
    ways: Ways
    scores: Mapping[int, Sequence[float]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The record as plain data."""
        return {
            "facts": {name: getattr(self.facts, name) for name in Facts.__slots__},
            "ways": {
                way: {str(i): answer.to_json() for i, answer in answers.items()}
                for way, answers in self.ways.items()
            },
            "scores": {str(i): list(found) for i, found in self.scores.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Record:
        """Read what `to_json` wrote."""
        facts = Facts(**{**data["facts"], "served_by": tuple(data["facts"]["served_by"])})
        ways = {
            way: {int(i): Answer.from_json(found) for i, found in answers.items()}
            for way, answers in data["ways"].items()
        }
        return cls(facts, ways, {int(i): found for i, found in data["scores"].items()})
