"""The named shapes of every operation: layers that people run, at batches that matter."""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hal_registry import LAYOUTS, Offer, interface_of

HOST: Final = "host"
CARD: Final = "card"

_draw = random.Random(1)
MIX: Final = (4096, 1, *(int(math.exp(_draw.uniform(0.0, math.log(4096)))) for _ in range(30)))
"""4096, 1 and 30 log-uniform lengths, the same in every run."""

STATES: Final = {
    "conv": "conv",
    "short_conv": "conv",
    "delta_rule": "recurrent",
    "scan": "scan",
}
"""The state of each interface whose layout its settings name."""


@dataclass(frozen=True, slots=True)
class Shape:
    """An operation at one size: dims of a layer by the kit's names, and the tokens of each row.

    Rows continue in their slots; `fresh` ones start from nothing, for peers that take no state.
    `on` says where the shape is measured unless it is asked for by name: a host or a card.
    """

    operation: str
    name: str
    dims: Mapping[str, Any]
    lengths: tuple[int, ...]
    on: str
    fresh: bool = False

    def settings(self, offer: Offer, dtype: str) -> dict[str, Any]:
        """The kit's settings of this shape, in the layouts that an offer names first."""
        state = STATES[interface_of(self.operation)]
        found = {"dtype": dtype, "layout": first_layout(offer, state), **self.dims}
        if state != "conv":
            found.setdefault("state_dtype", "float32")
        if self.operation == "delta_rule.decode_fused":
            found["conv_layout"] = first_layout(offer, "conv")
        return found

    def batch(self, lengths: Sequence[int]) -> list[tuple[int, str]]:
        """Rows of these lengths, as the kit makes them."""
        return [(length, "fresh" if self.fresh else "continue") for length in lengths]


def first_layout(offer: Offer, state: str) -> str:
    """The layout of a state that an offer names first, "" where it knows none."""
    return next((name for name in offer.layouts if name in LAYOUTS[state]), "")


def default_dtype(shape: Shape) -> str:
    """The dtype that a shape is measured in unless another is asked for."""
    return "float32" if shape.on == HOST else "bfloat16"


def gdn(heads: int, dim: int = 128, ratio: int = 2, gate: str = "scalar") -> dict[str, Any]:
    """Dims of a Gated DeltaNet layer; with another gate, of its kin."""
    return {"gate": gate, "H": heads, "ratio": ratio, "K": dim, "V": dim}


def kda(heads: int, gate: str = "channel") -> dict[str, Any]:
    """Dims of a Kimi Delta Attention layer."""
    return gdn(heads, ratio=1, gate=gate)


def ssd(heads: int, groups: int) -> dict[str, Any]:
    """Dims of a Mamba-2 layer."""
    return {"kind": "mamba2", "G": groups, "ratio": heads // groups, "P": 64, "N": 128}


def mamba1(inner: int) -> dict[str, Any]:
    """Dims of a Mamba-1 layer of so many channels."""
    return {"kind": "mamba1", "G": 1, "ratio": inner // 64, "P": 64, "N": 16, "z": True}


def conv(channels: int) -> dict[str, Any]:
    """Dims of the convolution in front of a layer."""
    return {"channels": channels, "width": 4, "bias": False, "activation": "silu"}


def drafts(dims: dict[str, Any], width: int) -> dict[str, Any]:
    """The same dims for chains of drafts."""
    return {**dims, "verify": "chain", "verify_width": width}


def _host() -> Iterator[Shape]:
    """What a CPU serves: few rows, short prompts, float32, gates made beforehand."""
    ready, per_channel = "ready_scalar", "ready_channel"
    for name, dims, rows in (
        ("B4-HV32-ready", gdn(16, gate=ready), 4),
        ("B1-HV32-ready", gdn(16, gate=ready), 1),
        ("B8-HV8-ready", gdn(4, gate=ready), 8),
        ("B4-HV4-16x16-ready", gdn(2, 16, gate=ready), 4),
        ("kda-B4-H8-ready", kda(8, per_channel), 4),
    ):
        yield Shape("delta_rule.decode", name, dims, (1,) * rows, HOST)
    for name, dims, tokens in (
        ("T512-HV8-ready", gdn(4, gate=ready), 512),
        ("T512-HV16-ready", gdn(16, ratio=1, gate=ready), 512),
        ("T100-HV4-16x16-ready", gdn(2, 16, gate=ready), 100),
        ("kda-T512-H8-ready", kda(8, per_channel), 512),
    ):
        yield Shape("delta_rule.prefill", name, dims, (tokens,), HOST)
    yield Shape("scan.prefill", "ssd-T512-H32", ssd(32, 1), (512,), HOST)
    yield Shape("scan.prefill", "ssd-T512-H32-G8", ssd(32, 8), (512,), HOST)
    yield Shape("scan.prefill", "mamba1-T512-I2048", mamba1(2048), (512,), HOST, fresh=True)
    yield Shape("scan.decode", "ssd-B4-H32", ssd(32, 1), (1,) * 4, HOST)
    yield Shape("conv.prefill", "T512-C2048", conv(2048), (512,), HOST, fresh=True)
    yield Shape("conv.decode", "B1-C2048", conv(2048), (1,), HOST)
    yield Shape("conv.decode", "B4-C8192", conv(8192), (1,) * 4, HOST)
    for operation, name, dims in (
        ("delta_rule.verify", "B4-T4-HV8", gdn(4)),
        ("scan.verify", "ssd-B4-T4-H32", ssd(32, 1)),
        ("conv.verify", "B4-T4-C2048", conv(2048)),
    ):
        yield Shape(operation, name, drafts(dims, 4), (4,) * 4, HOST)


LONG: Final = {"16x2048": (2048,) * 16, "mix": MIX, "1x8192": (8192,)}
"""Prompts of a card by name."""


def _card() -> Iterator[Shape]:
    """What a card serves: layers of Qwen3-Next, Kimi-Linear, Nemotron-H and LFM2."""
    fused = {**gdn(16), "width": 4, "bias": False, "activation": "silu"}
    for rows in (1, 8, 32, 128):
        yield Shape("delta_rule.decode_fused", f"B{rows}-HV32", fused, (1,) * rows, CARD)
    for rows in (1, 32, 128):
        yield Shape("delta_rule.decode", f"B{rows}-HV32", gdn(16), (1,) * rows, CARD)
        yield Shape("delta_rule.decode", f"kda-B{rows}-H32", kda(32), (1,) * rows, CARD)
    for verb in ("prefill", "prefill_fused"):
        for name, lengths in LONG.items():
            yield Shape(f"delta_rule.{verb}", f"{name}-HV32", gdn(16), lengths, CARD)
        yield Shape(f"delta_rule.{verb}", "1x8192-HV8", gdn(4), (8192,), CARD)
    for name, lengths in LONG.items():
        yield Shape("delta_rule.prefill", f"kda-{name}-H32", kda(32), lengths, CARD)
        safe = kda(32, "safe")
        yield Shape("delta_rule.prefill", f"kda-safe-{name}-H32", safe, lengths, CARD)
        yield Shape("scan.prefill", f"ssd-{name}-H128", ssd(128, 8), lengths, CARD)
    yield from _card_drafts()
    yield from _card_convs()
    for rows in (1, 8, 32, 128):
        yield Shape("scan.decode", f"ssd-B{rows}-H128", ssd(128, 8), (1,) * rows, CARD)
    for rows in (1, 128):
        yield Shape("scan.decode", f"mamba1-B{rows}-I8192", mamba1(8192), (1,) * rows, CARD)
    for name, lengths in (("1x2048", (2048,)), ("16x2048", (2048,) * 16)):
        yield Shape("scan.prefill", f"mamba1-{name}-I8192", mamba1(8192), lengths, CARD)


def _card_drafts() -> Iterator[Shape]:
    """Verify and the commit of every draft, in one reading."""
    for name, dims, rows, width in (
        ("B32-T4-HV32", gdn(16), 32, 4),
        ("B128-T4-HV32", gdn(16), 128, 4),
        ("B128-T8-HV32", gdn(16), 128, 8),
        ("kda-B128-T4-H32", kda(32), 128, 4),
    ):
        yield Shape("delta_rule.verify", name, drafts(dims, width), (width,) * rows, CARD)
    yield Shape("conv.verify", "B128-T4-C8192", drafts(conv(8192), 4), (4,) * 128, CARD)
    yield Shape("scan.verify", "ssd-B128-T4-H128", drafts(ssd(128, 8), 4), (4,) * 128, CARD)


def _card_convs() -> Iterator[Shape]:
    short = {"channels": 2048, "width": 3, "bias": False}
    for operation, channels, dims in (
        ("conv", 8192, conv(8192)),
        ("short_conv", 2048, short),
    ):
        for rows in (1, 512):
            yield Shape(f"{operation}.decode", f"B{rows}-C{channels}", dims, (1,) * rows, CARD)
        for name, lengths in (("1x32768", (32768,)), ("mix", MIX)):
            yield Shape(f"{operation}.prefill", f"{name}-C{channels}", dims, lengths, CARD)


SHAPES: Final = (*_host(), *_card())
"""Every named shape; a name is taken once an operation."""

OPERATIONS: Final = tuple(sorted({shape.operation for shape in SHAPES}))
"""The operations that have shapes; what is timed as verify holds the commit, too."""


def chosen(on: str, operations: Sequence[str] = (), names: Sequence[str] = ()) -> tuple[Shape, ...]:
    """The shapes of a kind of device, or those named, of some operations or all."""
    _known("--op", operations, OPERATIONS)
    of = [shape for shape in SHAPES if not operations or shape.operation in operations]
    _known("--shape", names, sorted({shape.name for shape in of}))
    return tuple(shape for shape in of if (shape.name in names if names else shape.on == on))


def _known(option: str, given: Sequence[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"{option} {name}: expected one of {', '.join(known)}")
