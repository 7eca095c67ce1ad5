"""The result of a run as data: what was tested, where, with which versions, and the counts."""

from __future__ import annotations

import json
import platform
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

if TYPE_CHECKING:
    from hal.testing.examined import Examined

Key = tuple[str, str, str, str]
"""Provider, stand-in, operation ("" for the declaration) and dtype of a test."""


@dataclass(slots=True)
class Tally:
    """Counts of outcomes by provider, operation and dtype, and what was tested."""

    counts: dict[Key, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    origins: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    ran: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    planned: dict[str, int] = field(default_factory=dict)

    def add(self, key: Key, outcome: str) -> None:
        """Count one result."""
        self.counts[key][outcome] += 1

    def note(self, key: Key, facts: Mapping[str, Any]) -> None:
        """Keep what a result says of its suite: the tests planned there, and what is tested."""
        self.planned[facts["suite"]] = facts["planned"]
        self.ran[facts["suite"]] |= {facts["test"]} - {""}
        self.origins[key[:2]] = facts["origin"]

    def complete(self) -> bool:
        """Whether every planned test of the suites has a result, however the others were lost."""
        return all(len(self.ran[suite]) == planned for suite, planned in self.planned.items())

    def providers(self) -> list[tuple[str, str]]:
        """The providers and stand-ins that had tests."""
        return sorted({(provider, stand_in) for provider, stand_in, _, _ in self.counts})

    def idle(self) -> list[str]:
        """The providers of which no operation was executed."""
        busy = {
            (provider, stand_in)
            for (provider, stand_in, operation, _), found in self.counts.items()
            if operation and found.total() > found["skipped"]
        }
        return [name[0] for name in self.providers() if name not in busy]

    def to_json(self) -> str:
        """The report; `complete` says that every planned test has a result in it."""
        found = {
            "schema": 1,
            "date": datetime.now(UTC).date().isoformat(),
            "complete": self.complete(),
            "providers": [self._provider(*name) for name in self.providers()],
        }
        return json.dumps(found, indent=1) + "\n"

    def _provider(self, provider: str, stand_in: str) -> dict[str, Any]:
        mine = {k[2:]: found for k, found in self.counts.items() if k[:2] == (provider, stand_in)}
        operations: dict[str, Counter[str]] = defaultdict(Counter)
        dtypes: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
        for (operation, dtype), found in mine.items():
            operations[operation] += found
            if dtype:
                dtypes[operation][dtype] += found
        declaration = operations.pop("", Counter())
        for verify in [name for name in operations if name.endswith(".verify")]:
            commit = verify.replace(".verify", ".commit")  # judged together, never apart
            operations[commit], dtypes[commit] = operations[verify], dtypes[verify]
        return {
            "provider": provider,
            **self.origins.get((provider, stand_in), {}),
            "declaration": dict(declaration),
            "operations": {
                name: {**found, "dtypes": {d: dict(n) for d, n in dtypes[name].items()}}
                for name, found in sorted(operations.items())
            },
        }


def origin(examined: Examined, provider: str, stand_in: str) -> dict[str, Any]:
    """Which declaration is tested, from which distribution, with which libraries, and where."""
    return {**_identity(examined), "device": _device(examined, provider, stand_in)}


def _identity(examined: Examined) -> dict[str, Any]:
    found = examined.candidate
    if found is None:
        return {"digest": "", "distribution": "", "version": "", "versions": {}}
    needs = [Requirement(need).name for need in found.manifest.needs]
    versions = {name: _version(name) for name in dict.fromkeys(["hybrid-hal", "torch", *needs])}
    return {
        "digest": found.manifest.digest(),
        "distribution": found.distribution,
        "version": found.version,
        "versions": {"python": platform.python_version(), **versions},
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _device(examined: Examined, provider: str, stand_in: str) -> dict[str, Any]:
    """Where it ran; a stand-in is no proof by hardware."""
    return {
        "type": provider.partition(".")[0],
        "arch": "" if stand_in else examined.arch,
        "stand_in": stand_in,
        "level": "interpreter" if stand_in else "hardware",
        "machine": platform.machine(),
    }
