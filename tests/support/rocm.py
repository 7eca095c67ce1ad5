"""The AMD provider without its device: the tables of an arch, on tensors of the host."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from hal_registry import Offer, Reason, Registry, Requirement
from hal_rocm.plugin import MANIFEST, check
from hal_rocm.provider import TritonProvider, tuning


def provider(
    arch: str, device: str = "rocm", options: Mapping[str, object] | None = None
) -> TritonProvider:
    """The provider as it ships for an arch."""
    return TritonProvider(device, {**(options or {}), "tuning": tuning(arch)})


gfx942 = partial(provider, "gfx942")
gfx1100 = partial(provider, "gfx1100")


def _check(arch: str, need: Requirement) -> Iterable[Reason]:
    return check(replace(need, arch=arch))


def registry(arch: str, *operations: str) -> Registry:
    """The provider alone, by its declaration for an arch, of some operations or of all.

    A program costs the interpreter what a launch costs a GPU: unless HAL_ROCM_KIT is "whole", each
    operation is asked for its smallest heads, one width and one ratio.
    """
    whole = os.environ.get("HAL_ROCM_KIT") == "whole"
    offers = {
        name: offer if whole else _thin(offer)
        for name, offer in MANIFEST.offers.items()
        if name in operations or not operations
    }
    load, asked = f"{__name__}:{arch}", partial(_check, arch)
    return Registry.of(
        replace(MANIFEST, load=load, probe="", needs=(), check=asked, offers=offers, proofs=())
    )


def _thin(offer: Offer) -> Offer:
    """The offer in one layout, two gates and one size of everything that has a size."""
    return replace(
        offer,
        layouts=tuple(name for name in offer.layouts if name not in ("CW", "WC", "KV")),
        gates=tuple(offer.gates)[:2],
        head_dims=tuple(offer.head_dims)[:1],
        ratios=tuple(offer.ratios)[:1],
        widths=tuple(offer.widths)[:1],
        state_sizes=tuple(offer.state_sizes)[1:2],
        verify=tuple(offer.verify)[1:],
        verify_widths=tuple(offer.verify_widths)[2:3],
    )
