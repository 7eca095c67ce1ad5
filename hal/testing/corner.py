"""The corner opposite to an offer's first words, where every axis is walked once more.

Faults hide where a dtype, a layout and a gate meet that are not the first ones. Two corners cost
twice one; all combinations would cost hundreds of times as much.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from hal.testing.sheets import Settings, states_with
from hal_registry import Offer

_WORDS: Final[Mapping[str, str]] = {
    "dtype": "dtypes",
    "state_dtype": "state_dtypes",
    "gate": "gates",
    "kind": "kinds",
    "activation": "activations",
    "verify": "verify",
}
"""Settings that are words, and the fields that declare them."""

_PLAIN: Final = ("ready_scalar", "ready_channel", "lightning")
"""Words that leave inputs out, so that a corner with them would see less."""


def corner(offer: Offer, base: Settings, fits: Callable[[Settings], bool]) -> Settings:
    """The base with the last word of every field, as far as the manifest's check allows it."""
    found = {**base}
    for name, value in _changes(offer, base):
        changed = {**found, name: value}
        if fits(changed):
            found = changed
    return found


def _changes(offer: Offer, base: Settings) -> Iterator[tuple[str, Any]]:
    for name, declared in _WORDS.items():
        words = [*getattr(offer, declared)] if name in base else []
        if words:
            yield name, next((w for w in words[::-1] if w not in _PLAIN), words[-1])
    for name in ("layout", "conv_layout"):
        if name in base:
            states = states_with(base[name])
            yield name, [word for word in offer.layouts if states_with(word) == states][-1]
    if base.get("bias"):
        yield "bias", False
    if "kind" in base:
        yield "z", True
