"""Choose a configuration: sound first, then fast, and the shipped one where nothing is faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, Final, Protocol

from hal.tuner import Tuned
from hal_registry import Failure, attempt
from hal_triton.tuning import Config

MARGIN: Final = 0.02
"""By how much a median has to be below the shipped one's: runs of one differ by as much."""

KEPT: Final = 5
"""Candidates beside the shipped one that are timed to the end."""

Run = Callable[[], object]


class DeviceLost(Exception):
    """The shipped configuration ran and no longer does; the text names the candidate before it."""


class Trials(Protocol):
    """One class as the sweep sees it: what runs, what a configuration does wrong, the clock."""

    def run_shipped(self) -> None:
        """Run the shipped configuration once more, and raise where it does not run."""
        ...

    def fault(self, config: Config) -> str:
        """Why a configuration is no candidate, "" where it is one; it may raise instead."""
        ...

    def runs(self, config: Config) -> Sequence[Run]:
        """Calls to time, on memory that all configurations share."""
        ...

    def read(self, runs: Sequence[Run]) -> float:
        """Microseconds of one call."""
        ...


def shown(config: Config) -> str:
    """A configuration as one word."""
    blocks = ",".join(f"{name}{size}" for name, size in config.blocks.items())
    limit = f"r{config.registers}" if config.registers else ""
    parts = (blocks, f"w{config.warps}", f"s{config.stages}", config.evict, limit)
    return ",".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Found:
    """A class after its sweep: the configuration to use, and the account of it."""

    config: Config
    tuned: Tuned


@dataclass(slots=True)
class _Race:
    """The candidates of one class on their way."""

    trials: Trials
    shipped: Config
    dropped: dict[str, str] = field(default_factory=dict)

    def sound(self, candidates: Sequence[Config]) -> list[Config]:
        """Those without a fault; a crash is one, and must leave the device usable."""
        return [config for config in candidates if self._is_sound(config)]

    def _is_sound(self, config: Config) -> bool:
        fault = attempt(partial(self.trials.fault, config))
        if isinstance(fault, Failure):
            self.dropped[shown(config)] = fault.text[:300]
            self._survives(config)
            return False
        if fault:
            self.dropped[shown(config)] = fault
        return not fault

    def _survives(self, after: Config) -> None:
        again = attempt(self.trials.run_shipped)
        if isinstance(again, Failure):
            text = f"{shown(self.shipped)} does not run after {shown(after)}: {again.text[:300]}"
            raise DeviceLost(f"the shipped {text}")

    def runs(self, configs: Sequence[Config]) -> dict[str, Sequence[Run]]:
        """The calls of each configuration that still runs."""
        found = {}
        for config in configs:
            made = attempt(partial(self.trials.runs, config))
            if not isinstance(made, Failure):
                found[shown(config)] = made
            elif config == self.shipped:
                raise DeviceLost(f"the shipped {shown(config)} cannot be timed: {made.text[:300]}")
            else:
                self.dropped[shown(config)] = made.text[:300]
                self._survives(config)
        return found

    def read(self, ready: Mapping[str, Sequence[Run]], rounds: int) -> dict[str, list[float]]:
        """Readings of everybody in turn; who begins changes from round to round."""
        times: dict[str, list[float]] = {name: [] for name in ready}
        order = list(ready)
        for number in range(rounds):
            turn = number % len(order)
            for name in (*order[turn:], *order[:turn]):
                if name not in self.dropped:
                    self._reading(name, ready[name], times)
        return {name: each for name, each in times.items() if name not in self.dropped}

    def _reading(self, name: str, runs: Sequence[Run], times: dict[str, list[float]]) -> None:
        found = attempt(partial(self.trials.read, runs))
        if not isinstance(found, Failure):
            times[name].append(found)
        elif name == shown(self.shipped):
            raise DeviceLost(f"the shipped {name} cannot be timed: {found.text[:300]}")
        else:
            self.dropped[name] = found.text[:300]


def choose(
    name: str,
    where: str,
    shipped: Config,
    candidates: Sequence[Config],
    trials: Trials,
    rounds: int,
) -> Found:
    """The fastest sound configuration of a class, by medians of interleaved rounds.

    The shipped one is what results are held to, and it stays unless another is faster by `MARGIN`.
    """
    race = _Race(trials, shipped)
    others = [config for config in candidates if config != shipped]
    by_name: dict[str, Config] = {shown(config): config for config in (shipped, *others)}
    sound = race.sound(others)
    first = race.read(race.runs([shipped, *sound]), 1)
    ranked = sorted((each for each in first if each != shown(shipped)), key=lambda n: first[n][0])
    left = [by_name[each] for each in (shown(shipped), *ranked[:KEPT])]
    times = race.read(race.runs(left), rounds)
    best = min(times, key=lambda each: median(times[each]))
    if median(times[best]) > (1 - MARGIN) * median(times[shown(shipped)]):
        best = shown(shipped)
    tuned = Tuned(name, where, shown(shipped), best, times, dict(race.dropped))
    return Found(by_name[best], tuned)


def plain(found: Sequence[Found]) -> list[dict[str, Any]]:
    """The accounts as plain data, for a file."""
    return [
        {
            "name": each.tuned.name,
            "where": each.tuned.where,
            "shipped": each.tuned.shipped,
            "best": each.tuned.best,
            "us": {name: median(times) for name, times in each.tuned.readings.items()},
            "dropped": dict(each.tuned.dropped),
        }
        for each in found
    ]
