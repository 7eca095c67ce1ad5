"""Look at the machine: libraries by their metadata, the device through the provider's probe."""

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hal_registry.guard import Failure, attempt
from hal_registry.manifest import Check, is_count, is_text
from hal_registry.reasons import Code, Reason
from hal_registry.registry import Candidate, broken


@dataclass(frozen=True, slots=True)
class Presence:
    """What a provider's probe found: how many devices, and the arch of the one asked for.

    `count` 0 means that the device is absent, and `detail` says how that was seen. `notes` are
    lines for `hal doctor`; `check` holds what was found against a need, as a manifest's does.
    """

    count: int
    arch: str = ""
    detail: str = ""
    notes: tuple[str, ...] = field(default=(), repr=False)
    check: Check | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Refuse a count that is none; the probe that gave it is told."""
        if not (is_count(self.count) and is_text(self.arch) and is_text(self.detail)):
            raise TypeError(f"expected a count of devices and two texts, got {self!r}")
        notes: object = self.notes
        if not isinstance(notes, tuple) or not all(map(is_text, notes)):
            raise TypeError(f"expected a tuple of lines as notes, got {notes!r}")
        if self.check is not None and not callable(self.check):
            raise TypeError(f"expected a function or nothing as check, got {self.check!r}")


def library_reasons(candidate: Candidate) -> Iterator[Reason]:
    """Libraries that are missing or of the wrong version; nothing is imported."""
    for text in candidate.manifest.needs:
        found = attempt(partial(_lack, text, candidate.manifest.hints))
        if isinstance(found, Failure):
            yield broken(text, "a library whose version can be read", found.text)
        elif found is not None:
            yield found


def _lack(text: str, hints: Mapping[str, str]) -> Reason | None:
    from packaging.requirements import Requirement as LibraryRequirement

    need = LibraryRequirement(text)
    if need.marker is not None and not need.marker.evaluate():
        return None
    hint = hints.get(need.name, f"pip install '{text}'")
    try:
        found = version(need.name)
    except PackageNotFoundError:
        return Reason(Code.LIBRARY_MISSING, need.name, str(need), "not installed", fix=hint)
    if need.specifier.contains(found, prereleases=True):
        return None
    return Reason(Code.LIBRARY_VERSION, need.name, str(need), f"version {found}", fix=hint)


def device_presence(candidate: Candidate, index: int | None) -> Presence | Reason:
    """Ask the provider's probe, which may have a reason of its own; without one there is one."""
    path, device = candidate.manifest.probe, candidate.manifest.device
    one = Presence(1, detail="a provider without a probe has one device")
    found = attempt(lambda: load(path)(index)) if path else one
    if isinstance(found, Reason):
        return found
    if not isinstance(found, Presence):
        text = found.text if isinstance(found, Failure) else repr(found)
        return broken(candidate.name, f"a Presence from its probe {path}", text)
    if found.count > (index or 0):
        return found
    return Reason(
        Code.DEVICE_ABSENT,
        subject=device,
        needed=f"{device}:{index or 0}",
        offered="1 device" if found.count == 1 else f"{found.count} devices",
        detail=found.detail,
        fix=f"run where {device}:{index or 0} is; `hal check` answers without the device",
    )


def load(path: str) -> Any:
    """Import the object of a dotted path "module:name"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
