"""Trials beyond one field at a time: two that kernels branch on together, and large sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Final

from hal.testing.borders import members
from hal.testing.sheets import Settings, states_with
from hal_registry import Offer, interface_of

Batch = Sequence[tuple[int, str]]
Point = tuple[str, Settings, Batch]

CHUNK_EDGES: Final = ((63, "fork"), (64, "fresh"), (65, "continue"), (130, "fork"))
KINDS: Final = ("continue", "fork", "fresh", "stateless", "twin", "score")
LONG_ROW: Final = ((600, "fork"), (2, "continue"))
ONE_TOKEN: Final = tuple((1, kind) for kind in ("continue", "fork", "fresh", "stateless"))
FEW: Final = ((3, "fork"), (1, "continue"), (2, "fresh"))
CHANNELS: Final = 1100
HEADS: Final = 51
DECODE_ROWS: Final = 67
PREFILL_ROWS: Final = 37
DRAFT_ROWS: Final = 23
"""More than a launch is likely to be cut for, and few enough for an interpreter of kernels."""

_WORDS: Final = {
    "dtype": "dtypes",
    "state_dtype": "state_dtypes",
    "gate": "gates",
    "kind": "kinds",
    "activation": "activations",
    "verify": "verify",
}
"""Settings that a kernel is compiled for, and the fields that declare them."""


def pairwise(offer: Offer, base: Settings) -> Iterator[Point]:
    """Every two values that differ from the base, of every two fields that kernels branch on."""
    for one, two in combinations(_fields(offer, base), 2):
        for (left, changed, rows), (right, also, others) in product(one, two):
            yield f"{left}, {right}", {**changed, **also}, rows or others


def _fields(offer: Offer, base: Settings) -> Iterator[list[Point]]:
    """The values of each field beside that of the base."""
    for name, declared in _WORDS.items():
        if name in base:
            words = [word for word in getattr(offer, declared) if word != base[name]]
            yield [(f"{name}={word}", {name: word}, ()) for word in words]
    for name in ("layout", "conv_layout"):
        if name in base:
            yield [(f"{name}={word}", {name: word}, ()) for word in _layouts(offer, base[name])]
    if "conv_layout" in base:
        yield [("norm", {"norm": True}, ())]
    yield [(f"track={grid}", {"track": grid}, ()) for grid in members(offer.track)[:1]]
    yield [("chunk edges", {}, CHUNK_EDGES)]


def _layouts(offer: Offer, first: str) -> list[str]:
    """The other layouts of the state that has the first."""
    states = states_with(first)
    return [name for name in offer.layouts if states_with(name) == states and name != first]


def large(operation: str, offer: Offer, base: Settings) -> Iterator[Point]:
    """Many channels or heads, many rows, and a row of many tokens."""
    interface, verb = interface_of(operation), operation.partition(".")[2]
    one_token = verb in ("decode", "decode_fused")
    lengths = (1,) if one_token else (1, 2, 3)
    few = [(min(n, lengths[-1]), kind) for n, kind in FEW]
    yield from ((label, changes, few) for label, changes in _wide(interface, offer, base))
    count = DECODE_ROWS if one_token else DRAFT_ROWS if verb == "verify" else PREFILL_ROWS
    pattern = ((lengths[i % len(lengths)], KINDS[i % len(KINDS)]) for i in range(1, count))
    yield f"{count} rows", {}, [(1, "fork"), *pattern]
    if not one_token:
        length = base.get("verify_width", 5)
        yield "rows of one token", {}, ONE_TOKEN
        yield f"rows of {length} tokens", {}, [(length, kind) for _, kind in ONE_TOKEN]
    if verb in ("prefill", "prefill_fused"):
        yield "long row", {}, LONG_ROW


def _wide(interface: str, offer: Offer, base: Settings) -> Iterator[tuple[str, Settings]]:
    if interface in ("conv", "short_conv"):
        yield "wide", {"channels": CHANNELS}
    elif interface == "delta_rule":
        yield "wide", {"H": -(-HEADS // base["ratio"])}
    for kind in offer.kinds if interface == "scan" else ():
        size = {"G": -(-HEADS // base.get("ratio", 2))}
        wide = size | ({"P": -(-CHANNELS // HEADS)} if kind == "mamba1" else {})
        yield f"wide, kind={kind}", {"kind": kind, **wide}
