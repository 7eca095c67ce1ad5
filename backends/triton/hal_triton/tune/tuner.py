"""The tuner that the Triton providers share: classes on a device, through the provider itself."""

from __future__ import annotations

import multiprocessing
import platform
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from math import prod
from typing import Any, cast

import torch
import triton

from hal.bench.entrant import Outcome, bound, moved_args
from hal.bench.judge import like
from hal.bench.shapes import Shape
from hal.bench.timers import Timer, current, timer_of
from hal.device import Device
from hal.interfaces import Provider
from hal.testing.case import Case
from hal.testing.plan import Trial
from hal.tuner import Sweep, Tuned
from hal_registry import Failure, Offer, attempt, load
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

    `path` is where this tuner can be imported, for processes beside this one. `offers` are the
    manifest's, for the layouts and forms of each operation; `arch` names that of a device,
    `shipped` gives what it is tuned with now.
    """

    provider: str
    path: str
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
        return list(dict.fromkeys(each.name for each in self.chosen(())))

    @property
    def unswept(self) -> Mapping[str, str]:
        """The names of operations that the manifest does not offer, with the operation."""
        return {
            each.name: f"{self.provider} does not offer {each.shape.operation}, which reads it"
            for each in self.classes
            if each.name not in self.names
        }

    def chosen(self, names: Sequence[str]) -> list[Class]:
        """The classes of these names, or of all."""
        offered = [each for each in self.classes if each.shape.operation in self.offers]
        return [each for each in offered if not names or each.name in names]

    def sweep(
        self,
        device: Device,
        names: Sequence[str],
        rounds: int,
        workers: int,
        say: Callable[[str], None],
    ) -> Sweep:
        """Sweep these names, or all; winners are the base of what comes after them."""
        if workers > 1:
            say(f"compiled {warm(self.path, str(device), names, workers)} kernels beforehand")
        run = _Run(self, device, self.timer(device), rounds, say)
        with torch.no_grad(), current(device):
            return run.sweep(self.chosen(names))


@dataclass(frozen=True, slots=True)
class _Run:
    """One sweep of a tuner on a device."""

    tuner: TritonTuner
    device: Device
    clock: Timer
    rounds: int
    say: Callable[[str], None]

    def sweep(self, classes: Sequence[Class]) -> Sweep:
        """Name after name, until the device is lost."""
        arch = self.tuner.arch(where_of(self.device))
        base = self.tuner.shipped(arch)
        done: list[Found] = []
        table: dict[str, Sequence[tuple[float, Config]]] = {}
        ended = ""
        for name, group in groupby(classes, key=lambda each: each.name):
            now = replace(base, table={**base.table, **table})
            try:
                found = [(each.limit, self._choose(each, now)) for each in group]
            except DeviceLost as lost:
                ended = str(lost)
                break
            done += [each for _, each in found]
            if any(each.tuned.changed for _, each in found):
                table[name] = tuple((limit, each.config) for limit, each in found)
        made = {**_made(self.tuner.provider, self.device), "classes": plain(done)}
        accounts = [each.tuned for each in done]
        return Sweep(accounts, document(table, arch, made), list(code(table)), ended)

    def _choose(self, each: Class, base: Tuning) -> Found:
        """The configuration of one class; where the shipped one does not run, it stays."""
        self.say(str(each))
        trials = TritonTrials.of(self.tuner, each, base, self.device, self.clock)
        runs = attempt(trials.run_shipped)
        if isinstance(runs, Failure):
            name = shown(trials.shipped)
            gone = Tuned(each.name, str(each), name, name, {}, {name: runs.text[:300]})
            return Found(trials.shipped, gone)
        candidates = self.tuner.candidates[each.name]
        try:
            return choose(each.name, str(each), trials.shipped, candidates, trials, self.rounds)
        finally:
            trials.close()


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

    @classmethod
    def of(
        cls, tuner: TritonTuner, each: Class, base: Tuning, device: Device, clock: Timer
    ) -> TritonTrials:
        """The trials of a class under a base, whose configuration of that work is the shipped."""
        shipped = next(config for limit, config in base.table[each.name] if each.limit <= limit)
        place = torch.device(device.torch_name)
        return cls(tuner, each, base, where_of(device), place, clock, shipped)

    def close(self) -> None:
        """Let the memory of this class go, which the next one needs."""
        self.expected, self.sets = [], []
        if self.place.type != "cpu":
            torch.cuda.empty_cache()

    def touch(self, config: Config) -> int:
        """Run a configuration on every shape so that it is compiled; how many shapes ran."""
        shapes = (self.each.shape, *self.each.guards)
        ran = [attempt(partial(self._outcome, config, *self._case(each))) for each in shapes]
        return sum(not isinstance(each, Failure) for each in ran)

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


def where_of(device: Device) -> str:
    """The device as providers are built for it, with its index."""
    return device.type if device.type == "cpu" else f"{device.type}:{device.index or 0}"


def warm(path: str, device: str, names: Sequence[str], workers: int) -> int:
    """Compile all candidates in processes beside this one, into Triton's cache on disk.

    Gives how many shapes ran. A worker that is lost, as to a compiler that aborts, is not missed:
    what it would have compiled is compiled by the sweep.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        share = partial(warm_share, path, device, names)
        futures = [pool.submit(share, (part, workers)) for part in range(workers)]
        done = [attempt(future.result) for future in futures]
    return sum(each for each in done if not isinstance(each, Failure))


def warm_share(path: str, device: str, names: Sequence[str], part: tuple[int, int]) -> int:
    """One worker's part of all classes and candidates."""
    tuner: TritonTuner = load(path)
    torch.set_num_threads(1)
    place, first, step = Device.parse(device), *part
    base = tuner.shipped(tuner.arch(where_of(place)))
    jobs = [(each, c) for each in tuner.chosen(names) for c in tuner.candidates[each.name]]
    clock = tuner.timer(place)
    with torch.no_grad(), current(place):
        return sum(
            TritonTrials.of(tuner, each, base, place, clock).touch(config)
            for each, config in jobs[first::step]
        )


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
