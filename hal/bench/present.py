"""The providers that are here: installed, with their libraries, on a device that exists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hal.bench.refusal import NotMeasured
from hal.binding import build
from hal.device import Device
from hal.interfaces import Provider
from hal_registry import (
    Candidate,
    Code,
    Presence,
    Reason,
    Registry,
    device_presence,
    library_reasons,
)


@dataclass(frozen=True, slots=True, eq=False)
class Present:
    """A candidate whose device was found; providers are built once for each set of layouts."""

    candidate: Candidate
    device: Device
    presence: Presence
    built: dict[tuple[tuple[str, str], ...], Provider] = field(default_factory=dict)

    def provider(self, layouts: Mapping[str, str]) -> Provider:
        """The provider built for these layouts."""
        key = tuple(sorted(layouts.items()))
        if key not in self.built:
            self.built[key] = build(self.candidate, self.device, layouts)
        return self.built[key]


def presents(device: Device, name: str, registry: Registry) -> list[Present]:
    """The providers of a device, highest priority first, or the one named.

    A name that nobody has is bad input; a device or library that is not there is a refusal.
    """
    candidates = sorted(registry.on(device.type), key=lambda c: (-c.manifest.priority, c.name))
    if not candidates:
        raise NotMeasured(f"nothing serves {device}", [_nobody(device, registry)])
    if name and name not in (known := [candidate.name for candidate in candidates]):
        raise ValueError(f"--provider {name}: expected one of {', '.join(known)}")
    found, reasons = [], []
    for candidate in (c for c in candidates if name in ("", c.name)):
        lacks = list(library_reasons(candidate))
        presence = lacks[0] if lacks else device_presence(candidate, device.index)
        if isinstance(presence, Presence):
            found.append(Present(candidate, device, presence))
        else:
            reasons += lacks or [presence]
    if not found:
        raise NotMeasured(f"no provider can run on {device} here", reasons)
    return [_of_arch(each, device) for each in found]


def _of_arch(present: Present, device: Device) -> Present:
    """Refuse a device of another arch than the one asked for."""
    if device.arch in ("", present.presence.arch):
        return present
    reason = Reason(
        Code.ARCH_UNSUPPORTED,
        str(device),
        needed=device.arch,
        offered=present.presence.arch or "a device without an arch",
        fix=f"use --device {device.type}",
    )
    raise NotMeasured(f"the device is no {device.arch}", [reason])


def _nobody(device: Device, registry: Registry) -> Reason:
    known = ", ".join(registry.devices()) or "none"
    return Reason(
        Code.DEVICE_ABSENT,
        device.type,
        needed="an installed provider",
        offered=f"providers for {known}",
        fix=f"install a provider for {device.type}, or use a --device of {known}",
    )
