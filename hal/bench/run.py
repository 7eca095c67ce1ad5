"""Measure: providers and peers on each shape, checked first, then timed in turn."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from hal.bench import peers
from hal.bench.contest import RIGHT, Contest, Line, Ours
from hal.bench.present import Present, presents
from hal.bench.refusal import NotMeasured
from hal.bench.shapes import CARD, HOST, OPERATIONS, Shape, chosen, default_dtype
from hal.bench.timers import Timer, current, timer_of
from hal.device import Device
from hal.testing.plan import Trial
from hal_registry import Code, Reason, Registry
from hal_registry import judge as judged


@dataclass(frozen=True, slots=True)
class Asked:
    """What a command line asks to measure; empty sequences mean all that there is."""

    device: Device
    operations: Sequence[str] = ()
    shapes: Sequence[str] = ()
    peers: Sequence[str] = ()
    provider: str = ""
    dtype: str = ""
    rounds: int = 15


@dataclass(frozen=True, slots=True)
class Report:
    """All lines of a run with where it ran; the first line of a shape is the provider's."""

    environment: dict[str, Any]
    lines: tuple[Line, ...]
    notes: tuple[str, ...]

    @property
    def sound(self) -> bool:
        """Whether every provider was right wherever it was asked."""
        ours = set(self.environment["providers"])
        return not any(line.entrant in ours and line.verdict != RIGHT for line in self.lines)


def measure(asked: Asked, registry: Registry, say: Callable[[str], None]) -> Report:
    """Check and time everything that was asked for; what cannot be is refused or a line."""
    ours = presents(asked.device, asked.provider, registry)
    timer = timer_of(asked.device)
    others, notes = peers.found(asked.device.type, asked.peers)
    shapes = _shapes(asked, ours)
    lines: list[Line] = []
    lacks: list[Reason] = []
    with torch.no_grad(), current(asked.device):
        for shape in shapes:
            fitting, reasons = _fitting(shape, ours, asked.dtype)
            lacks += reasons
            if fitting:
                say(f"{shape.operation} {shape.name}")
                lines += Contest(asked.device, timer, asked.rounds, shape, fitting, others).lines()
    if not lines:
        raise NotMeasured(f"nothing can be measured on {asked.device}", lacks or [_shapeless(ours)])
    dropped = [f"{reason}" for reason in dict.fromkeys(lacks) if asked.shapes or asked.operations]
    return Report(_environment(asked, timer, ours), tuple(lines), (*notes, *dropped))


def _shapeless(ours: Sequence[Present]) -> Reason:
    """Why providers without any reason against them have no line: no shape is of what they do."""
    offered = [operation for each in ours for operation in each.candidate.manifest.offers]
    return Reason(
        Code.OPERATION_MISSING,
        ", ".join(each.candidate.name for each in ours),
        needed=f"one of {', '.join(OPERATIONS)}",
        offered=", ".join(offered) or "nothing",
        fix="name a --provider that offers one of them",
    )


def _shapes(asked: Asked, ours: Sequence[Present]) -> tuple[Shape, ...]:
    """Those of the device's kind; where an operation has none of it, all that it has."""
    offered = {operation for each in ours for operation in each.candidate.manifest.offers}
    on = HOST if asked.device.type == "cpu" else CARD
    shapes = chosen(on, asked.operations, asked.shapes)
    shapes = shapes or chosen(CARD if on == HOST else HOST, asked.operations)
    if missing := [name for name in asked.operations if name not in offered]:
        able = [each.candidate.name for each in ours]
        reasons = [
            Reason(
                Code.OPERATION_MISSING,
                name,
                needed="a provider that offers it",
                offered=", ".join(sorted(offered)),
                fix=f"install a provider for {asked.device.type} that offers {name}",
            )
            for name in missing
        ]
        raise NotMeasured(f"{', '.join(missing)}: {', '.join(able)} cannot be asked", reasons)
    return tuple(shape for shape in shapes if shape.operation in offered)


def _fitting(shape: Shape, ours: Sequence[Present], dtype: str) -> tuple[list[Ours], list[Reason]]:
    """The providers that serve a shape, and why others do not."""
    fitting: list[Ours] = []
    reasons: list[Reason] = []
    for present in ours:
        offer = present.candidate.manifest.offers.get(shape.operation)
        if offer is None:
            continue
        settings = shape.settings(offer, dtype or default_dtype(shape))
        trial = Trial(shape.operation, shape.name, settings, offer, shape.batch(shape.lengths))
        need = replace(trial.need, arch=present.presence.arch, why=shape.name)
        found = judged(present.candidate, [need])
        if found.fits(shape.operation):
            fitting.append(Ours(present, trial))
        reasons += found.reasons[shape.operation]
    return fitting, reasons


def _environment(asked: Asked, timer: Timer, ours: Sequence[Present]) -> dict[str, Any]:
    """Where a run took place, and how it was timed."""
    return {
        "device": str(asked.device),
        "machine": _machine(asked.device),
        "arch": ours[0].presence.arch,
        "providers": {each.candidate.name: each.candidate.version for each in ours},
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "threads": torch.get_num_threads(),
        "timer": timer.name,
        "rounds": asked.rounds,
    }


def _machine(device: Device) -> str:
    if device.type == "cpu":
        return platform.processor() or platform.machine()
    return torch.cuda.get_device_name(torch.device(device.torch_name))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
