"""The verdict: how far answers to one prompt are apart, in nats, held against the dtype's bar."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf, isfinite
from typing import Final

from hal.integrations.verify.programs import AGAIN, ALONE, SHARED
from hal.integrations.verify.record import Answer, Facts, Record, Step, Ways

BARS: Final[Mapping[str, float]] = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.2}
"""Largest gap in nats that rounding alone explains, by dtype."""

COARSEST: Final = max(BARS.values())
"""The bar of a dtype that has none of its own."""


class Check(StrEnum):
    """What is held against what."""

    DECODE = "decode vs re-prefill"
    BATCH = "batch vs solo"
    RESUME = "resumed vs fresh"


class Verdict(StrEnum):
    """How a way of serving did."""

    OK = "ok"
    WRONG = "WRONG"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Gap:
    """The largest gap of one prompt: nats, at which new token, over how many compared.

    `parted` is the new token at which the two answers went on with another one; nothing behind it
    is compared.
    """

    nats: float
    token: int
    compared: int
    parted: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One way of serving in the table: its prompts' gaps, and why it did not run if it did not."""

    check: Check
    way: str
    gaps: Mapping[int, Gap]
    bar: float
    why_not: str = ""

    @property
    def worst(self) -> tuple[int, Gap] | None:
        """The prompt with the largest gap."""
        return max(self.gaps.items(), key=lambda item: item[1].nats, default=None)

    @property
    def verdict(self) -> Verdict:
        """Whether every gap is within the bar."""
        if self.worst is None:
            return Verdict.NOT_RUN
        return Verdict.OK if self.worst[1].nats <= self.bar else Verdict.WRONG


@dataclass(frozen=True, slots=True)
class Judgement:
    """The whole self-check of one engine and model."""

    model: str
    facts: Facts
    bar: float
    lengths: Sequence[int]
    rows: Sequence[Row]

    @property
    def missing(self) -> list[Check]:
        """Checks of which no way ran."""
        ran = {row.check for row in self.rows if row.gaps}
        return [check for check in Check if check not in ran]

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong and no check is missing."""
        return not self.missing and all(row.verdict is not Verdict.WRONG for row in self.rows)


def judge(
    model: str,
    lengths: Sequence[int],
    whole: Record,
    again: Record | str,
    bar: float | None = None,
) -> Judgement:
    """Hold the fresh record against itself and the resumed one, or why there is none, against it.

    `bar` None is the dtype's.
    """
    limit = BARS.get(whole.facts.dtype, COARSEST) if bar is None else bar
    alone = whole.ways[ALONE]
    decoded = {i: _against_scores(answer, whole.scores[i]) for i, answer in alone.items()}
    rows = [Row(Check.DECODE, ALONE, decoded, limit)]
    others = {way: found for way, found in whole.ways.items() if way != ALONE}
    rows += _rows(Check.BATCH, others, alone, limit)
    if isinstance(again, str):
        rows.append(Row(Check.RESUME, "in chunks", {}, limit, again))
    else:
        rows += _rows(Check.RESUME, again.ways, alone, limit, again.facts.no_prefix)
    return Judgement(model, whole.facts, limit, lengths, rows)


def _rows(
    check: Check,
    ways: Ways,
    alone: Mapping[int, Answer],
    bar: float,
    no_prefix: str | None = None,
) -> Iterator[Row]:
    for way, answers in ways.items():
        gaps = {i: apart(alone[i], answer) for i, answer in answers.items()}
        yield Row(check, way, gaps, bar, "" if gaps else _unused(way))
    if no_prefix is not None:
        yield Row(check, "from a cached prefix", {}, bar, no_prefix)


def _unused(way: str) -> str:
    if way in (SHARED, AGAIN):
        return "the engine found no prompt's prefix in its cache"
    return "no prompt is long enough"


def _against_scores(answer: Answer, scores: Sequence[float]) -> Gap:
    return _largest([_distance(s.logprob, p) for s, p in zip(answer.steps, scores, strict=True)])


def apart(one: Answer, other: Answer) -> Gap:
    """The largest gap between two answers, up to and with the first token at which they part."""
    found: list[float] = []
    for number, (mine, theirs) in enumerate(zip(one.steps, other.steps, strict=False)):
        if mine.token != theirs.token:
            found.append(max(_at_least(mine, theirs), _at_least(theirs, mine)))
            return _largest(found, number)
        found.append(_distance(mine.logprob, theirs.logprob))
    return _largest(found)


def _at_least(mine: Step, theirs: Step) -> float:
    """How far apart the two are on the token that `mine` chose.

    Where `theirs` does not list it, it is at most as likely as the last one listed.
    """
    listed = {**theirs.top, theirs.token: theirs.logprob}
    if mine.token in listed:
        return _distance(mine.logprob, listed[mine.token])
    return _distance(max(mine.logprob, floor := min(listed.values())), floor)


def _distance(one: float, other: float) -> float:
    return abs(one - other) if isfinite(one) and isfinite(other) else inf


def _largest(gaps: Sequence[float], parted: int | None = None) -> Gap:
    token = max(range(len(gaps)), key=gaps.__getitem__)
    return Gap(gaps[token], token, len(gaps), parted)
