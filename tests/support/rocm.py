"""The AMD provider without its device: the tables of an arch, on tensors of the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from hal_registry import Reason, Registry, Requirement
from hal_rocm.plugin import MANIFEST, check
from hal_rocm.provider import TritonProvider, tuning
from hal_rocm.tables import table


def provider(
    arch: str, device: str = "rocm", options: Mapping[str, object] | None = None
) -> TritonProvider:
    """The provider as it ships for an arch."""
    return TritonProvider(device, {**(options or {}), "tuning": tuning(arch)})


VERBS = {
    "chunks": "prefill",
    "walk": "prefill",
    "prepare": "prefill",
    "recurrent": "prefill",
    "channel_chunks": "prefill",
    "channel_walk": "prefill",
    "drafts": "verify",
}
"""Of names in a table, the verb of the operation that launches such a kernel."""

gfx942 = partial(provider, "gfx942")
gfx1100 = partial(provider, "gfx1100")


def _check(arch: str, need: Requirement) -> Iterable[Reason]:
    return check(replace(need, arch=arch))


def registry(arch: str, *operations: str) -> Registry:
    """The provider alone, by its declaration for an arch, of some operations or of all."""
    offers = {
        name: offer
        for name, offer in MANIFEST.offers.items()
        if name in operations or not operations
    }
    load, asked = f"{__name__}:{arch}", partial(_check, arch)
    return Registry.of(
        replace(MANIFEST, load=load, probe="", needs=(), check=asked, offers=offers, proofs=())
    )


def apart(arch: str, other: str) -> list[str]:
    """The operations that the tables of two archs launch in different ways.

    A verify and its commit are judged together, so that neither stands alone.
    """
    mine, theirs = table(arch), table(other)
    differ = {tuple(name.split(".")[:2]) for name in mine if mine[name] != theirs[name]}
    found = {f"{interface}.{VERBS.get(part, part)}" for interface, part in differ}
    pairs = {op.replace("verify", "commit") for op in found}
    return sorted(found | pairs | {op.replace("commit", "verify") for op in found})
