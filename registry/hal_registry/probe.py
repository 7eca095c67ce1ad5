"""Look at the machine: libraries by their metadata, the device through the provider's probe."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hal_registry.guard import Failure, attempt
from hal_registry.reasons import Code, Reason
from hal_registry.registry import Candidate, broken


@dataclass(frozen=True, slots=True)
class Presence:
    """What a provider's probe found: how many devices, and the arch of the one asked for.

    `count` 0 means that the device is absent, and `detail` says how that was seen.
    """

    count: int
    arch: str = ""
    detail: str = ""


def library_reasons(candidate: Candidate) -> Iterator[Reason]:
    """Libraries that are missing or of the wrong version; nothing is imported."""
    from packaging.requirements import Requirement as LibraryRequirement

    manifest = candidate.manifest
    for text in manifest.needs:
        need = LibraryRequirement(text)
        if need.marker is not None and not need.marker.evaluate():
            continue
        hint = manifest.hints.get(need.name, f"pip install '{text}'")
        try:
            found = version(need.name)
        except PackageNotFoundError:
            yield Reason(Code.LIBRARY_MISSING, need.name, str(need), "not installed", fix=hint)
            continue
        if not need.specifier.contains(found, prereleases=True):
            yield Reason(Code.LIBRARY_VERSION, need.name, str(need), f"version {found}", fix=hint)


def device_presence(candidate: Candidate, index: int | None) -> Presence | Reason:
    """Ask the provider's probe; without one the device is taken to be there."""
    path, device = candidate.manifest.probe, candidate.manifest.device
    if not path:
        return Presence(count=1 + (index or 0))
    found = attempt(lambda: load(path)(index))
    if not isinstance(found, Presence):
        text = found.text if isinstance(found, Failure) else repr(found)
        return broken(candidate.name, f"a Presence from its probe {path}", text)
    if found.count > (index or 0):
        return found
    return Reason(
        Code.DEVICE_ABSENT,
        subject=device,
        needed=f"{device}:{index or 0}",
        offered=f"{found.count} devices",
        detail=found.detail,
        fix=f"run where {device}:{index or 0} is; `hal check` answers without the device",
    )


def load(path: str) -> Any:
    """Import the object of a dotted path "module:name"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
