"""Everybody on one shape: each is held to the oracle, then those that are right are timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Final

import torch

from hal.bench.entrant import Attempt, Entrant, NotComparable, Outcome, of_provider
from hal.bench.judge import EQUAL, Verdict, checked_lengths, judge, like
from hal.bench.peers import Peer
from hal.bench.present import Present
from hal.bench.shapes import Shape
from hal.bench.timers import Timer
from hal.device import Device
from hal.testing.case import Case, Pools
from hal.testing.plan import Trial
from hal_registry import Failure, attempt

RIGHT: Final = "right"
WRONG: Final = "wrong"
FAILED: Final = "failed"
SKIPPED: Final = "not comparable"
VERDICTS: Final = (RIGHT, WRONG, FAILED, SKIPPED)


Expected = tuple[torch.Tensor, Pools]
"""A result and the pools after it, as the oracle says."""


@dataclass(frozen=True, slots=True)
class Line:
    """One entrant on one shape: the verdict, and its readings in microseconds where it is right.

    `rows` are the lengths on which the oracle was run. `why` says what is wrong.
    """

    operation: str
    shape: str
    dtype: str
    entrant: str
    version: str
    verdict: str
    rows: tuple[int, ...] = ()
    check: Verdict | None = None
    why: str = ""
    cold: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Ours:
    """A provider that serves a shape, and the trial that names it so."""

    present: Present
    trial: Trial


@dataclass(frozen=True, slots=True)
class Contest:
    """Everybody on one shape."""

    device: Device
    timer: Timer
    rounds: int
    shape: Shape
    ours: Sequence[Ours]
    peers: Sequence[Peer]

    def lines(self) -> list[Line]:
        """Check every entrant, then time those that are right in turn."""
        trial, lengths = self.ours[0].trial, self.shape.lengths
        small = _case(trial, self.shape.batch(checked_lengths(lengths)))
        wanted, large = small.expect_all(), _case(trial, self.shape.batch(lengths))
        lines: list[tuple[Line, list[Attempt]]] = []
        first: Outcome | None = None
        for own, entrant in self._entrants():
            cases = self._cases(own, entrant, (small, large))
            want = wanted if cases[0] is small else cases[0].expect_all()
            line = self._checked(own, entrant, cases, want)
            calls: list[Attempt] = []
            if line.verdict == RIGHT:
                line, calls, outcome = self._prepared(line, own, entrant, cases[1], first)
                first = first or outcome
            lines.append((line, calls))
        ready = {n: [each.run for each in calls] for n, (_, calls) in enumerate(lines) if calls}
        failed = self._time(ready, [line for line, _ in lines])
        return [
            replace(line, verdict=FAILED, why=failed[n], cold=[], warm=[]) if n in failed else line
            for n, (line, _) in enumerate(lines)
        ]

    def _is_first(self, trial: Trial) -> bool:
        """Whether a trial has the inputs and layouts of the first provider's."""
        return trial.settings == self.ours[0].trial.settings

    def _entrants(self) -> Iterator[tuple[Trial, Entrant]]:
        """The providers, then the peers at the first provider's trial."""
        for own in self.ours:
            provider = own.present.provider(own.trial.layouts)
            candidate = own.present.candidate
            yield own.trial, of_provider(candidate.name, candidate.version, provider)
        for peer in self.peers:
            for entrant in peer.entrants(self.shape.operation):
                yield self.ours[0].trial, entrant

    def _cases(self, trial: Trial, entrant: Entrant, first: tuple[Case, Case]) -> tuple[Case, Case]:
        """What an entrant is checked and timed on: the first provider's cases where it can be."""
        lengths, same = self.shape.lengths, self._is_first(trial)
        rows = checked_lengths(lengths)
        odd = entrant.equal and len(set(rows)) > len(set(lengths)) == 1
        if same and not odd:
            return first
        small = _case(trial, self.shape.batch(EQUAL if odd else rows))
        return small, first[1] if same else _case(trial, self.shape.batch(lengths))

    @property
    def place(self) -> torch.device:
        """Where tensors live."""
        return torch.device(self.device.torch_name)

    def _checked(
        self, trial: Trial, entrant: Entrant, cases: tuple[Case, Case], want: Expected
    ) -> Line:
        """One entrant against the oracle.

        What is timed runs first: who tunes itself at its first call has to tune for that.
        """
        case, timed = cases
        line = partial(
            Line, self.shape.operation, self.shape.name, trial.settings["dtype"], entrant.name,
            entrant.version, rows=case.rows.lengths,
        )  # fmt: skip
        try:
            if timed.rows.lengths != case.rows.lengths:
                entrant.make(trial, timed, self.place).run()
            made = entrant.make(trial, case, self.place)
            check = judge(case, made.kind or trial.kind, want, made.outcome())
        except NotComparable as lack:
            return line(verdict=SKIPPED, why=str(lack))
        except Exception as fault:  # whatever a peer raises is a finding about it
            return line(verdict=FAILED, why=f"{type(fault).__name__}: {fault}"[:300])
        return line(verdict=RIGHT if check.right else WRONG, check=check, why=_why(check))

    def _prepared(
        self, line: Line, trial: Trial, entrant: Entrant, case: Case, first: Outcome | None
    ) -> tuple[Line, list[Attempt], Outcome | None]:
        """Copies to time; at a size that no oracle saw, the outcome has to be like the first's."""
        made = attempt(partial(self._copies, trial, entrant, case))
        if isinstance(made, Failure):
            return replace(line, verdict=FAILED, why=made.text[:300]), [], None
        calls, outcome = made
        if first is None or case.rows.lengths == line.rows or not self._is_first(trial):
            return line, calls, outcome
        check = like(case, calls[0].kind or trial.kind, first, outcome)
        if check.right:
            return line, calls, outcome
        why = f"at the timed size it differs from {self.ours[0].present.candidate.name}: "
        return replace(line, verdict=WRONG, check=check, why=why + _why(check)), [], None

    def _copies(self, trial: Trial, entrant: Entrant, case: Case) -> tuple[list[Attempt], Outcome]:
        """The calls of one entrant on memory of their own, and what the first of them gave."""
        pool = case.args[case.pools[0]]
        touched = len(case.rows.lengths) * prod(pool.shape[1:]) * pool.element_size()
        step = trial.decode or trial.operation.endswith(".verify")
        count = self.timer.copies(touched, step)
        calls = [entrant.make(trial, case, self.place) for _ in range(count)]
        outcome = calls[0].outcome()
        pools = outcome.pools and {name: pool.clone() for name, pool in outcome.pools.items()}
        return calls, Outcome(outcome.result.clone(), pools)

    def _time(
        self, ready: Mapping[int, Sequence[Callable[[], object]]], lines: Sequence[Line]
    ) -> dict[int, str]:
        """Read everybody in turn, cold and warm, and say who failed, by number.

        Who begins changes from round to round. A graph that cannot be captured is such a failure.
        """
        failed: dict[int, str] = {}
        order = list(ready)
        for number in range(self.rounds if ready else 0):
            turn = number % len(order)
            for each in (*order[turn:], *order[:turn]):
                if each not in failed:
                    found = attempt(partial(self._read, ready[each], lines[each]))
                    failed |= {each: found.text[:300]} if isinstance(found, Failure) else {}
        return failed

    def _read(self, calls: Sequence[Callable[[], object]], line: Line) -> None:
        line.cold.append(self.timer.cold(calls))
        line.warm.append(self.timer.warm(calls))


def _case(trial: Trial, batch: Sequence[tuple[int, str]]) -> Case:
    return trial.case(batch, pads=0)


def _why(check: Verdict) -> str:
    """What of a verdict is beyond its limit, "" where nothing is."""
    if check.right:
        return ""
    state = "-" if check.state is None else f"{check.state:.1e}"
    return (
        f"errors {check.result:.1e} of the result and {state} of the state, allowed "
        f"{check.limits[0]:.0e} and {check.limits[1]:.0e}"
    )
