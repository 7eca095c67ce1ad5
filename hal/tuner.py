"""What `hal tune` asks of a distribution: a module `tuner` beside its provider, with a `TUNER`.

`hal_acme.provider:Provider` is tuned by `hal_acme.tuner:TUNER`. A distribution without it has
nothing to tune.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from hal.device import Device


@dataclass(frozen=True, slots=True)
class Tuned:
    """One class of a table: its configuration before and after, and what was dropped on the way.

    `readings` are microseconds by configuration, of those that were timed to the end.
    """

    name: str
    where: str
    shipped: str
    best: str
    readings: Mapping[str, Sequence[float]]
    dropped: Mapping[str, str] = field(default_factory=dict)

    @property
    def changed(self) -> bool:
        """Whether another configuration than the shipped one was chosen."""
        return self.best != self.shipped


@dataclass(frozen=True, slots=True)
class Sweep:
    """The classes that were swept, the file to write, and why it ended early, "" if it did not."""

    classes: Sequence[Tuned]
    document: Mapping[str, Any]
    code: Sequence[str]
    ended: str = ""


class Tuner(Protocol):
    """Sweeps what a provider can be tuned in."""

    @property
    def names(self) -> Sequence[str]:
        """The names of the provider's table that can be swept."""
        ...

    @property
    def unswept(self) -> Mapping[str, str]:
        """The names of the table that cannot be, and why."""
        ...

    def sweep(
        self,
        device: Device,
        names: Sequence[str],
        rounds: int,
        workers: int,
        say: Callable[[str], None],
    ) -> Sweep:
        """Sweep these names on a device, `rounds` readings of those that are left at the end.

        With more than one worker, processes compile the candidates before anything is timed.
        """
        ...
