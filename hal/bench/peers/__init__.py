"""Adapters of other libraries, imported when one is asked for; `hal.peers` is for those outside.

An entry point of the group `hal.peers` is a `Peer`; its name is the one that `--peer` takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Final

from hal.bench.entrant import Entrant, Make
from hal_registry import Failure, attempt, load

GROUP: Final = "hal.peers"

BUILT_IN: Final[Mapping[str, str]] = {
    "transformers": "hal.bench.peers.transformers:PEER",
    "fla": "hal.bench.peers.fla:PEER",
    "mamba_ssm": "hal.bench.peers.mamba_ssm:PEER",
    "flashinfer": "hal.bench.peers.flashinfer:PEER",
    "sglang": "hal.bench.peers.sglang:PEER",
    "flash_kda": "hal.bench.peers.flash_kda:PEER",
}
"""Where the adapters of this distribution are, by the peer's name."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way of a peer to do an operation; `label` tells it from its others, "" where alone.

    `equal` is for those that take rows of one length alone.
    """

    operation: str
    make: Make
    label: str = ""
    equal: bool = False


@dataclass(frozen=True, slots=True)
class Peer:
    """Another library: the distribution that has to be installed, and what it does where."""

    name: str
    distribution: str
    devices: tuple[str, ...]
    ways: tuple[Way, ...]

    def installed(self) -> str | None:
        """The version that is installed, None where none is."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return None

    def entrants(self, operation: str) -> Iterator[Entrant]:
        """The peer's ways of an operation."""
        for way in self.ways:
            if way.operation == operation:
                name = f"{self.name} ({way.label})" if way.label else self.name
                yield Entrant(name, self.installed() or "", way.make, way.equal)


def found(device: str, names: Sequence[str] = ()) -> tuple[list[Peer], list[str]]:
    """The installed peers that run on a device type, and lines about those left out.

    With `names` these alone; one that is not known is refused. "none" asks for no peer.
    """
    paths = {**BUILT_IN, **{each.name: each.value for each in entry_points(group=GROUP)}}
    for name in names:
        if name not in paths and name != "none":
            raise ValueError(f"--peer {name}: expected one of {', '.join([*paths, 'none'])}")
    peers, notes = [], []
    for name in names or paths:
        peer = None if name == "none" else attempt(partial(load, paths[name]))
        if isinstance(peer, Failure) or not isinstance(peer, Peer | None):
            what = peer.text if isinstance(peer, Failure) else f"{paths[name]} is no Peer"
            notes.append(f"{name}: the adapter is broken: {what}")
        elif peer is not None and device not in peer.devices:
            notes += [f"{name}: it runs on {', '.join(peer.devices)} alone"] if names else []
        elif peer is not None and not peer.installed():
            notes.append(f"{name}: {peer.distribution} is not installed")
        elif peer is not None:
            peers.append(peer)
    return peers, notes
