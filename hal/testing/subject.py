"""The provider under test, and calls of it with tensors made on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from hal.binding import construct
from hal.device import Device
from hal.interfaces import Provider
from hal.testing.case import Call
from hal.testing.plan import Trial
from hal_registry import Candidate, Presence, Reason, device_presence, library_reasons


@dataclass(frozen=True, slots=True)
class Absent:
    """Why the provider cannot be run here."""

    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A candidate on a device; providers are built once for each set of layouts.

    `tensors` is the torch device where its tensors live. Where that is not the manifest's device it
    stands in for it: an interpreter, or a device whose memory is the host's.
    """

    candidate: Candidate
    tensors: str
    presence: Presence
    built: dict[tuple[tuple[str, str], ...], Provider] = field(default_factory=dict)

    @classmethod
    def find(cls, candidate: Candidate, stand_in: str) -> Subject | Absent:
        """Look for libraries and the device; with a stand-in the device is not looked for."""
        if missing := [str(reason) for reason in library_reasons(candidate)]:
            return Absent("; ".join(missing))
        if stand_in:
            return cls(candidate, stand_in, Presence(1))
        presence = device_presence(candidate, None)
        if isinstance(presence, Reason):
            return Absent(str(presence))
        return cls(candidate, Device(candidate.manifest.device).torch_name, presence)

    def provider(self, layouts: Mapping[str, str]) -> Provider:
        """The provider built for these layouts."""
        key = tuple(sorted(layouts.items()))
        if key not in self.built:
            device = Device(self.candidate.manifest.device)
            self.built[key] = construct(self.candidate, device, layouts)
        return self.built[key]

    @property
    def place(self) -> torch.device:
        """The torch device, which has to be known to torch by the time an operation runs."""
        return torch.device(self.tensors)

    def call(self, trial: Trial, verb: str = "") -> Call:
        """An operation of a trial's interface, its own or another, as a call on CPU tensors."""
        provider = self.provider(trial.layouts)
        interface, _, own = trial.operation.partition(".")
        method = getattr(getattr(provider, interface), verb or own)
        return _Moved(provider, method, self.place).run


HERE: Final = torch.device("cpu")
"""Tensors are taken as they are; "cpu:0" copies them to and fro, as any other device."""

_WEIGHTS: Final = (("weight", "bias"), ("conv_weight", "conv_bias"))


@dataclass(frozen=True, slots=True, eq=False)
class _Moved:
    """A call whose tensors go to a device and come back; on the CPU they are passed as they are."""

    provider: Provider
    method: Call
    place: torch.device

    def run(self, **args: Any) -> Any:
        """Call on the device; whatever the provider wrote to an argument is written back."""
        there = {name: _there(value, self.place) for name, value in args.items()}
        result = self.method(**prepared(self.provider, there))
        if self.place == HERE:
            return result
        for name, value in args.items():
            _write_back(value, there[name])
        if result is there.get("out"):
            return args.get("out")  # commit gives nothing and takes no `out`
        return result.cpu()


def prepared(provider: Provider, args: dict[str, Any]) -> dict[str, Any]:
    """Arguments with conv weights as the provider lays them out at bind."""
    for weight, bias in _WEIGHTS:
        if weight in args:
            given = {"conv_weight": args[weight], "conv_bias": args[bias]}
            ready = provider.prepare(given)
            args = {**args, weight: ready["conv_weight"], bias: ready["conv_bias"]}
    return args


def _flat(view: Tensor) -> Tensor:
    """The whole storage under a view."""
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(view.untyped_storage())


def _there(value: Any, place: torch.device) -> Any:
    """A value with its tensors on the device, same strides, memory between them included."""
    if place == HERE:
        return value
    if isinstance(value, Tensor):
        if value.device.type == place.type != "cpu":
            return value
        flat = _flat(value).to(place, copy=True)
        return flat.as_strided(value.shape, value.stride(), value.storage_offset())
    if isinstance(value, (list, tuple)):
        return type(value)(_there(item, place) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        moved = {f.name: _there(getattr(value, f.name), place) for f in fields(value)}
        return replace(value, **moved)
    return value


def _write_back(here: Any, there: Any) -> None:
    if isinstance(here, Tensor) and here is not there:
        _flat(here).copy_(_flat(there))
    elif isinstance(here, (list, tuple)):
        for mine, other in zip(here, there, strict=True):
            _write_back(mine, other)
    elif is_dataclass(here) and not isinstance(here, type):
        for each in fields(here):
            _write_back(getattr(here, each.name), getattr(there, each.name))
