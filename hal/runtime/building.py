"""What a selection comes to where it is built: its providers, and what a batch may be."""

from __future__ import annotations

from math import lcm
from operator import index
from typing import TYPE_CHECKING, Final

from hal.binding import build
from hal.runtime.batch import Limits, Mode
from hal.runtime.packing import Frame

if TYPE_CHECKING:
    from hal.device import Device
    from hal.interfaces import Provider
    from hal.selection import Selection

SERVED: Final = frozenset({Mode.DECODE, Mode.EXTEND, Mode.MIXED, Mode.IDLE})
"""Modes of every selection; a speculative one has two more."""

DRAFTED: Final = frozenset({Mode.VERIFY, Mode.DRAFT_EXTEND})
"""Modes of a speculative selection alone."""


def providers_of(selection: Selection, place: Device) -> dict[str, Provider]:
    """The chosen providers by name, each built once."""
    candidates = {choice.provider: choice.candidate for choice in selection.choices.values()}
    return {
        name: build(candidate, place, selection.layouts) for name, candidate in candidates.items()
    }


def limits_of(selection: Selection, slots: int, max_batch: int, max_tokens: int) -> Limits:
    """What a batch of a backend of these sizes may be, in plain integers, which never wrap."""
    slots, max_batch, max_tokens = index(slots), index(max_batch), index(max_tokens)
    if max_batch < 1 or max_tokens < 1:
        raise ValueError(
            f"backend: max_batch {max_batch}, max_tokens {max_tokens}: expected at least 1"
        )
    sizes, track = (slots, max_batch, max_tokens), track_grid(selection)
    speculative = selection.options.speculative
    if speculative is None:
        return Limits(*sizes, SERVED, track)
    return Limits(*sizes, SERVED | DRAFTED, track, speculative.width, speculative.tree)


def track_grid(selection: Selection) -> int | None:
    """Where track points may be for all chosen operations at once; None without prefix_cache.

    Each operation stores states at multiples of its granularity, so that a layer of several has
    its common multiples.
    """
    if selection.options.prefix_cache is False:
        return None
    offers = (c.candidate.manifest.offers[op].track for op, c in selection.choices.items())
    grids = [min(offered) for offered in offers if offered]
    return lcm(*grids) if grids else None


def largest_frame(limits: Limits) -> Frame:
    """The largest step that begins often; a ring grows where one is larger."""
    tokens = limits.max_batch * max(1, limits.width)
    return Frame(limits.max_batch, tokens, limits.max_batch, limits.tree, 1)
