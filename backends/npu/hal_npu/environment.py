"""Switches of the vendor's package that change what its functions compute."""

import os
from collections.abc import Iterator, Mapping
from typing import Final

from hal_registry import Code, Reason

SWITCHES: Final[Mapping[str, tuple[str, str]]] = {
    "GDN_USE_MEGA_GDN": ("0", "it runs prefill in float16, the state included, by chunks of 128"),
    "FLA_USE_FAST_OPS": ("0", "it takes less exact exponentials"),
    "GDN_RECOMPUTE_SUPPRESS_LEVEL": ("0", "it changes which intermediates a prefill returns"),
}
"""Environment variables with the value that leaves them off, and what they do otherwise."""


def switched() -> Iterator[Reason]:
    """A reason for every switch that is on; read once, when a provider is probed or built."""
    for name, (off, effect) in SWITCHES.items():
        value = os.environ.get(name, off)
        if value != off:
            yield Reason(
                Code.MODE_UNSUPPORTED, name, f"{off} or unset", value, effect, f"unset {name}"
            )
