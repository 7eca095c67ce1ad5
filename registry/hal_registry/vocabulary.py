"""The words that manifests and requirements share: operations, states, layouts, dtypes, features.

Closed on purpose, so that a misspelt word in a manifest is an error and not a missing offer.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

API: Final = (1, 0)
"""(major, minor) of the contract between `hal` and its providers."""


def speaks(api: tuple[int, int]) -> bool:
    """Whether a plugin of that API is understood: the same major, no newer minor."""
    return api[0] == API[0] and api[1] <= API[1]


NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,39}")
"""Form of device types and arches: what a device string such as "cuda:sm_90" can name."""

DTYPES: Final = ("float32", "bfloat16", "float16")

LAYOUTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"conv": ("CW", "WC", "ring"), "recurrent": ("VK", "KV"), "scan": ("PN",)}
)
"""Axis orders by state. The names of two states never collide, so an offer lists them together."""

_STATES: Final = {
    "conv": ("conv",),
    "conv_state": ("conv",),
    "delta_rule": ("recurrent",),
    "scan": ("scan",),
    "short_conv": ("conv",),
    "cca": ("conv",),
}
_VERBS: Final = {
    "conv": ("prefill", "decode", "verify", "commit"),
    "conv_state": ("step",),
    "delta_rule": ("prefill", "decode", "verify", "commit", "decode_fused", "prefill_fused"),
    "scan": ("prefill", "decode", "verify", "commit"),
    "short_conv": ("prefill", "decode", "verify"),
    "cca": ("prefill", "decode", "verify"),
}

OPERATIONS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        f"{interface}.{verb}": _STATES[interface] + (("conv",) if verb == "decode_fused" else ())
        for interface, verbs in _VERBS.items()
        for verb in verbs
    }
)
"""Every operation and the states that it touches, its own first."""

TOGETHER: Final = frozenset({"conv", "conv_state"})
"""Interfaces that one provider has to serve together, where a model needs both."""

SCRATCH: Final = frozenset({"verify", "commit"})
"""Verbs of an interface that share private scratch, so that one provider serves them."""

GATES: Final = ("scalar", "channel", "safe", "ready_scalar", "ready_channel")
"""Gate kinds an operation fuses; `ready_*` takes log decay and beta that are made already."""

FEATURES: Final = ("bias", "graph", "negative_slots", "strided", "tf32")
"""What else a caller may rely on: conv bias, graph capture, negative slot ids, strided inputs."""

KINDS: Final = ("mamba2", "mamba1", "lightning", "short_conv", "cca")
"""Layer kinds within an interface: which scans `scan` runs, whose state `conv_state` carries."""

ACTIVATIONS: Final = ("silu", "none")
VERIFY: Final = ("chain", "tree")
LEVELS: Final = ("hardware", "interpreter", "compiled")
"""How an operation was shown to be right, strongest first."""


def interface_of(operation: str) -> str:
    """The interface that an operation belongs to: "delta_rule" of "delta_rule.decode"."""
    return operation.partition(".")[0]


def states_of(operation: str) -> tuple[str, ...]:
    """The states that an operation touches, its own first; none if it is not in the vocabulary."""
    return OPERATIONS.get(operation, ())
