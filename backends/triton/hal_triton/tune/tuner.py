"""The tuner that the Triton providers share: classes on a device, through the provider itself."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import prod
from typing import Any, cast

import torch
import triton

from hal.bench.entrant import Outcome, bound, moved_args
from hal.bench.judge import like
from hal.bench.shapes import Shape
from hal.bench.timers import Timer, timer_of
from hal.device import Device
from hal.interfaces import Provider
from hal.testing.case import Case
from hal.testing.plan import Trial
from hal.tuner import Sweep, Tuned
from hal_registry import Failure, Offer, attempt
from hal_triton.launch import watching
from hal_triton.table_file import code, document
from hal_triton.tune.candidates import CANDIDATES
from hal_triton.tune.classes import CLASSES, Class
from hal_triton.tune.sweep import DeviceLost, Found, Run, choose, plain, shown
from hal_triton.tuning import Config, Tuning

Build = Callable[[str, Mapping[str, object]], object]


@dataclass(frozen=True, slots=True)
class TritonTuner:
    """Sweeps the table of a provider that `options["tuning"]` tunes.

    `offers` are the manifest's, for the layouts and forms of each operation; `arch` names that of a
    device, `shipped` gives what it is tuned with now.
    """

    provider: str
    offers: Mapping[str, Offer]
    arch: Callable[[str], str]
    shipped: Callable[[str], Tuning]
    build: Build
    classes: Sequence[Class] = CLASSES
    candidates: Mapping[str, Sequence[Config]] = field(default_factory=lambda: CANDIDATES)
    timer: Callable[[Device], Timer] = timer_of

    @property
    def names(self) -> Sequence[str]:
        """The names of the table, of operations that the manifest offers."""
        return list(dict.fromkeys(each.name for each in self._offered()))

    def _offered(self) -> Iterator[Class]:
        return (each for each in self.classes if each.shape.operation in self.offers)

    def sweep(
        self, device: Device, names: Sequence[str], rounds: int, say: Callable[[str], None]
    ) -> Sweep:
        """Sweep these names, or all; winners are the base of what comes after them."""
        where = f"{device.type}:{device.index or 0}" if device.type != "cpu" else "cpu"
        arch = self.arch(where)
        base = self.shipped(arch)
        classes = [each for each in self._offered() if not names or each.name in names]
        done: list[Found] = []
        accounts: list[Tuned] = []
        table: dict[str, Sequence[tuple[float, Config]]] = {}
        ended, clock = "", self.timer(device)
        for name, group in groupby(classes, key=lambda each: each.name):
            now = replace(base, table={**base.table, **table})
            try:
                entries = [
                    (each.limit, self._choose(each, now, device, where, clock, rounds, say))
                    for each in group
                ]
            except DeviceLost as lost:
                ended = str(lost)
                break
            accounts += [found.tuned for _, found in entries]
            done += [found for _, found in entries]
            if any(found.tuned.changed for _, found in entries):
                table[name] = tuple((limit, found.config) for limit, found in entries)
        made = {**_made(self.provider, device), "classes": plain(done)}
        return Sweep(accounts, document(table, arch, made), list(code(table)), ended)

    def _choose(
        self,
        each: Class,
        base: Tuning,
        device: Device,
        where: str,
        clock: Timer,
        rounds: int,
        say: Callable[[str], None],
    ) -> Found:
        """The configuration of one class; where the shipped one does not run, it stays."""
        shipped = next(config for limit, config in base.table[each.name] if each.limit <= limit)
        place, say_name = torch.device(device.torch_name), str(each)
        say(say_name)
        trials = TritonTrials(self, each, base, where, place, clock, shipped)
        runs = attempt(trials.run_shipped)
        if isinstance(runs, Failure):
            name = shown(shipped)
            gone = Tuned(each.name, say_name, name, name, {}, {name: runs.text[:300]})
            return Found(shipped, gone)
        candidates = self.candidates[each.name]
        return choose(each.name, say_name, shipped, candidates, trials, rounds)


@dataclass(slots=True)
class TritonTrials:
    """One class on a device; the shipped configuration's outcomes are what others are held to."""

    tuner: TritonTuner
    each: Class
    base: Tuning
    where: str
    place: torch.device
    clock: Timer
    shipped: Config
    expected: list[tuple[Trial, Case, Outcome]] = field(default_factory=list)
    sets: list[dict[str, Any]] = field(default_factory=list)

    def run_shipped(self) -> None:
        """Run it on the class's shape and on every guard, and keep what it gives."""
        shapes = (self.each.shape, *self.each.guards)
        self.expected = [self._outcome(self.shipped, *self._case(shape)) for shape in shapes]

    def fault(self, config: Config) -> str:
        """What spills, or gives another result than the shipped configuration."""
        for trial, case, want in self.expected:
            with watching() as kernels:
                _, _, got = self._outcome(config, trial, case)
            if spilled := [found for kernel in kernels if (found := _spills(kernel))]:
                return f"spills in {trial.label}: {', '.join(spilled)}"
            check = like(case, trial.kind, want, got)
            if not check.right:
                return (
                    f"another result in {trial.label}: {check.result:.1e} and {check.state:.1e}, "
                    f"allowed {check.limits[0]:.0e} and {check.limits[1]:.0e}"
                )
        return ""

    def runs(self, config: Config) -> Sequence[Run]:
        """Calls on copies that all configurations share: states go on from one to the next."""
        trial, case, _ = self.expected[0]
        if not self.sets:
            pool = case.args[case.pools[0]]
            touched = len(case.rows.lengths) * prod(pool.shape[1:]) * pool.element_size()
            step = trial.decode or trial.operation.endswith(".verify")
            count = self.clock.copies(touched, step)
            self.sets = [moved_args(case, self.place) for _ in range(count)]
        provider = self._provider(config, trial)
        return [bound(provider, trial, case, given).run for given in self.sets]

    def read(self, runs: Sequence[Run]) -> float:
        """Microseconds with cold caches."""
        return self.clock.cold(runs)

    def _case(self, shape: Shape) -> tuple[Trial, Case]:
        offer = self.tuner.offers[shape.operation]
        settings, batch = shape.settings(offer, self.each.dtype), shape.batch(shape.lengths)
        trial = Trial(shape.operation, shape.name, settings, offer, batch)
        return trial, trial.case(batch, pads=0)

    def _outcome(self, config: Config, trial: Trial, case: Case) -> tuple[Trial, Case, Outcome]:
        provider = self._provider(config, trial)
        given = bound(provider, trial, case, moved_args(case, self.place))
        found = given.outcome()
        pools = {name: pool.cpu() for name, pool in (found.pools or {}).items()}
        return trial, case, Outcome(found.result.cpu(), pools)

    def _provider(self, config: Config, trial: Trial) -> Provider:
        tuned = replace(self.base, overrides={self.each.name: config})
        built = self.tuner.build(self.where, {"tuning": tuned, "layouts": trial.layouts})
        return cast("Provider", built)


def _spills(kernel: Any) -> str:
    """A compiled kernel that spills, by name, "" where it does not or nothing was compiled."""
    count = getattr(kernel, "n_spills", None) or 0
    return f"{kernel.metadata.name} {count} registers" if count else ""


def _made(provider: str, device: Device) -> dict[str, object]:
    """Where a sweep took place, and with what."""
    machine = platform.machine()
    if device.type != "cpu":
        machine = torch.cuda.get_device_name(torch.device(device.torch_name))
    versions = {"python": platform.python_version(), "torch": torch.__version__,
                "triton": triton.__version__}  # fmt: skip
    return {"provider": provider, "machine": machine, **versions}
