"""On which shapes the names of a table are tuned, and up to which amount of work each shape holds.

A name with several classes has one configuration for little work and another for more. `guards` are
other layers that use the same entry: a configuration that does not fit them is no candidate.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from hal.bench.shapes import CARD, LONG, Shape, conv, drafts, gdn, kda, mamba1, ssd
from hal_triton.tuning import UNBOUNDED

Dims = Mapping[str, Any]
Sized = tuple[float, str, Dims, Sequence[int]]
"""A limit, a label, the dims of a layer and the lengths of its rows."""

FEW: Final = (70, 3, 1)
"""Rows of a guard's prompt: longer than a chunk, shorter than a window, and one token."""


@dataclass(frozen=True, slots=True)
class Class:
    """A name, the most work that its configuration is for, the shape to time, and the guards."""

    name: str
    limit: float
    shape: Shape
    dtype: str = "bfloat16"
    guards: tuple[Shape, ...] = ()

    def __str__(self) -> str:
        """The name and the shape."""
        kind = "" if self.dtype == "bfloat16" else f", {self.dtype}"
        return f"{self.name} ({self.shape.operation} {self.shape.name}{kind})"


def _shape(operation: str, label: str, dims: Dims, lengths: Sequence[int]) -> Shape:
    return Shape(operation, label, dims, tuple(lengths), CARD)


def _guards(shape: Shape, others: Sequence[Dims]) -> tuple[Shape, ...]:
    """The same operation over a few rows, with the dims of other layers."""
    verb = shape.operation.partition(".")[2]
    width = shape.dims.get("verify_width", 0)
    lengths = (1,) * 3 if verb.startswith("decode") else (width, 1) if width else FEW
    return tuple(
        replace(shape, name=f"guard {number}", dims={**shape.dims, **dims}, lengths=lengths)
        for number, dims in enumerate(others, 1)
    )


NARROW: Final = ({"K": 64, "V": 96}, {"K": 96, "V": 192}, {"K": 16, "V": 24})
WIDE: Final = ({"K": 128, "V": 64}, {"K": 256, "V": 256})
FUSED: Final = ({"K": 64, "V": 96}, {"K": 16, "V": 24})
STATES: Final = ({"P": 128, "N": 128}, {"P": 24, "N": 16})
LARGE: Final = ({"P": 64, "N": 256}, {"P": 24, "N": 16})
CHANNELS: Final = ({"channels": 24}, {"channels": 1000, "width": 8}, {"width": 2})


def _of(
    name: str,
    shapes: Sequence[Sized],
    operation: str,
    guards: Sequence[Dims],
    dtype: str = "bfloat16",
) -> Iterator[Class]:
    """The classes of a name over (limit, label, dims, lengths)."""
    for limit, label, dims, lengths in shapes:
        shape = _shape(operation, label, dims, lengths)
        yield Class(name, limit, shape, dtype, _guards(shape, guards))


def _convs() -> Iterator[Class]:
    short = {"channels": 2048, "width": 3, "bias": False}
    for interface, dims, others in (
        ("conv", conv(8192), CHANNELS),
        ("short_conv", short, ({"channels": 24}, {"width": 7})),
    ):
        long = [(UNBOUNDED, "1x32768", dims, (32768,))]
        for dtype in ("bfloat16", "float32"):
            name = f"{interface}.prefill" + (".float32" if dtype == "float32" else "")
            yield from _of(name, long, f"{interface}.prefill", others, dtype)
        steps = [(UNBOUNDED, "B512", dims, (1,) * 512)]
        yield from _of(f"{interface}.decode", steps, f"{interface}.decode", others)
    drafted = [(UNBOUNDED, "B128-T4", drafts(conv(8192), 4), (4,) * 128)]
    for verb in ("verify", "commit"):
        yield from _of(f"conv.{verb}", drafted, "conv.verify", CHANNELS)


def _delta_steps() -> Iterator[Class]:
    fused = {**gdn(16), "width": 4, "bias": False, "activation": "silu"}
    two = [(2048, "B32", gdn(16), (1,) * 32), (UNBOUNDED, "B128", gdn(16), (1,) * 128)]
    yield from _of("delta_rule.decode", two, "delta_rule.decode", (*NARROW, *WIDE))
    channel = {**fused, **kda(32)}
    for name, dims in (("", fused), (".norm", {**fused, "norm": True}), (".channel", channel)):
        few, some = (64, "B1", dims, (1,)), (512, "B16", dims, (1,) * 16)
        sizes = (few, some, (UNBOUNDED, "B128", dims, (1,) * 128))
        yield from _of(f"delta_rule.decode_fused{name}", sizes, "delta_rule.decode_fused", FUSED)
    normed = [(UNBOUNDED, "16x2048", {**gdn(16), "norm": True}, LONG["16x2048"])]
    yield from _of("norm", normed, "delta_rule.prefill_fused", ())


def _prompts(dims: Dims, limit: float) -> tuple[Sized, Sized]:
    """One long prompt, and many."""
    return (
        (limit, "1x8192", dims, LONG["1x8192"]),
        (UNBOUNDED, "16x2048", dims, LONG["16x2048"]),
    )


def _delta_prompts() -> Iterator[Class]:
    """Chunks before the walk, whose tokens they lay out."""
    wide = gdn(8, 256)
    operation = "delta_rule.prefill"
    for kind, dims, dtype in (
        ("", gdn(16), "bfloat16"),
        (".wide", wide, "bfloat16"),
        (".float16", gdn(16), "float16"),
        (".float16.wide", wide, "float16"),
    ):
        lone, many = _prompts(dims, 64)
        others = NARROW if dims is not wide else ()
        yield from _of(f"delta_rule.chunks{kind}", [many], operation, others, dtype)
        yield from _of(f"delta_rule.walk{kind}", [lone, many], operation, others, dtype)
    lone, many = _prompts(kda(32), 64)
    yield from _of("delta_rule.channel_chunks", [many], operation, NARROW[:1])
    yield from _of("delta_rule.channel_walk", [lone, many], operation, NARROW[:1])
    slow = [(UNBOUNDED, "16x512", gdn(16), (512,) * 16)]
    yield from _of("delta_rule.recurrent", slow, operation, (*NARROW, *WIDE), "float32")


def _delta_drafts() -> Iterator[Class]:
    operation = "delta_rule.verify"
    four, twelve = drafts(gdn(16), 4), drafts(gdn(16), 12)
    one, many = (64, "B1-T4", four, (4,)), (UNBOUNDED, "B128-T4", four, (4,) * 128)
    long = [(UNBOUNDED, "B128-T12", twelve, (12,) * 128)]
    yield from _of("delta_rule.drafts", [many], operation, NARROW)
    yield from _of("delta_rule.verify", [one, many], operation, NARROW)
    yield from _of("delta_rule.verify.long", long, operation, NARROW)
    cut = [(UNBOUNDED, "kda-B128-T4", drafts(kda(32), 4), (4,) * 128)]
    yield from _of("delta_rule.verify.cut", cut, operation, NARROW)
    cut = [(UNBOUNDED, "kda-B128-T12", drafts(kda(32), 12), (12,) * 128)]
    yield from _of("delta_rule.verify.cut.long", cut, operation, NARROW)
    yield from _of("delta_rule.verify.float32", [many], operation, NARROW, "float32")
    yield from _of("delta_rule.verify.float32.long", long, operation, NARROW, "float32")
    yield from _of("delta_rule.commit", [one, many], operation, NARROW)


def _scans() -> Iterator[Class]:
    heads, channels = ssd(128, 8), mamba1(8192)
    rows: list[Sized] = [
        (262144, "B32", heads, (1,) * 32),
        (UNBOUNDED, "B128", heads, (1,) * 128),
    ]
    yield from _of("scan.decode", rows, "scan.decode", (*STATES, *LARGE))
    steps = [(UNBOUNDED, "B128", channels, (1,) * 128)]
    yield from _of("scan.decode.channel", steps, "scan.decode", ({"N": 8},))
    prompts: list[Sized] = [
        (8192, "1x2048", channels, (2048,)),
        (UNBOUNDED, "16x2048", channels, LONG["16x2048"]),
    ]
    yield from _of("scan.recurrent", prompts, "scan.prefill", ({"N": 8},))
    lone, many = _prompts(heads, 256)
    yield from _of("scan.prepare", [many], "scan.prefill", STATES)
    yield from _of("scan.walk", [lone, many], "scan.prefill", STATES)
    wide = [(UNBOUNDED, "16x2048", {**heads, "N": 256}, LONG["16x2048"])]
    yield from _of("scan.walk.wide", wide, "scan.prefill", ())
    for dtype in ("float16", "float32"):
        yield from _of(f"scan.walk.{dtype}", [many], "scan.prefill", STATES, dtype)
        yield from _of(f"scan.walk.{dtype}.wide", wide, "scan.prefill", (), dtype)
    for kind, dims in (("", heads), (".channel", channels)):
        drafted = [(UNBOUNDED, "B128-T4", drafts(dims, 4), (4,) * 128)]
        for verb in ("verify", "commit"):
            yield from _of(f"scan.{verb}{kind}", drafted, "scan.verify", ({"N": 16},))


CLASSES: Final = (*_convs(), *_delta_steps(), *_delta_prompts(), *_delta_drafts(), *_scans())
"""Every class, in the order in which they are swept; those of a name are neighbours."""
