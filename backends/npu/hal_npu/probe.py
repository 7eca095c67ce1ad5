"""The provider's probe: libraries, device, package, then every symbol by its signature.

Importing this imports no torch: on a machine without CANN that would raise.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from hal_npu.environment import switched
from hal_npu.machine import absent, device, unimportable
from hal_npu.symbols import Found, find_all, lacking
from hal_registry import Presence, Reason, Requirement


@dataclass(frozen=True, slots=True)
class Machine:
    """The symbols that were found here, and what they allow."""

    found: Mapping[str, Found]

    def check(self, need: Requirement) -> Iterator[Reason]:
        """The reasons against one need."""
        yield from lacking(self.found, need.operation)

    def lines(self) -> tuple[str, ...]:
        """Every symbol with its status."""
        return tuple(each.line() for each in self.found.values())


def presence(index: int | None) -> Presence | Reason:
    """The device with its arch and symbols, or the first reason why there is none."""
    for reason in absent():
        return reason
    there = device(index or 0)
    if isinstance(there, Reason) or there.count <= (index or 0):
        return there
    for reason in (*unimportable(), *switched()):
        return reason
    machine = examine(index or 0)
    return replace(there, notes=machine.lines(), check=machine.check)


@cache
def examine(index: int) -> Machine:
    """Look for the symbols and try them, once a process and device."""
    from hal_npu.smoke import smoke

    return Machine(smoke(find_all(), index))
