"""Cases of the convolution and of the short convolution around it."""

from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from hal.testing.case import Case
from hal.testing.rows import NAN, Rows, i32, index_args, packed, poisoned_pool

FEW: Final = 4
"""Channels below which a token's outputs may all be near zero by chance."""


def conv_case(
    rows: Rows,
    *,
    channels: int = 24,
    width: int = 4,
    bias: bool = True,
    activation: str | None = "silu",
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype | None = None,
    layout: str = "CW",
    decode: bool = False,
    seed: int = 0,
    gap: int = 0,
    strided: bool = False,
    track: Tensor | None = None,
    scale: float = 1.0,
) -> Case:
    """A convolution over the given rows.

    Of few channels all numbers are positive: a sum of a few that cancel is relative to nothing.
    """
    gen = torch.Generator().manual_seed(seed)
    sign = torch.abs if channels < FEW else torch.positive
    x = sign(scale * torch.randn(rows.tokens, channels, generator=gen)).to(dtype)
    weight_dtype = weight_dtype or dtype
    args: dict[str, Any] = {
        "x": packed(x, rows, gap),
        "weight": sign(torch.randn(channels, width, generator=gen)).to(weight_dtype),
        "bias": sign(torch.randn(channels, generator=gen)).to(weight_dtype) if bias else None,
        "state": window_pool(rows, channels, width, state_dtype or dtype, layout, gen, gap),
        "start": i32(*rows.start),
    } | index_args(rows, decode, strided)
    if channels < FEW:
        args["state"].abs_()
    options: dict[str, Any] = {"activation": activation}
    if track is not None:
        options["track"] = track
    name = "conv.decode" if decode else "conv.prefill"
    return Case(name, args, rows, layout, 0, options, width)


def window_pool(
    rows: Rows,
    channels: int,
    width: int,
    dtype: torch.dtype,
    layout: str,
    gen: torch.Generator,
    gap: int = 0,
) -> Tensor:
    """A poisoned pool of conv windows; a ring's row that the next token takes is NaN too."""
    shape = {"CW": (channels, width - 1), "WC": (width - 1, channels), "ring": (width, channels)}
    pool = poisoned_pool(rows, shape[layout], dtype, gen, pad=gap)
    if layout == "ring":
        for src, start in zip(rows.src, rows.start, strict=True):
            if src >= 0:
                pool[src, start % width] = NAN
    return pool


def short_conv_case(rows: Rows, *, seed: int = 0, gap: int = 0, **settings: Any) -> Case:
    """A short convolution over the given rows: C * Conv(B * x), settings as of `conv_case`."""
    case = conv_case(rows, seed=seed, gap=gap, **{**settings, "activation": None})
    gen = torch.Generator().manual_seed(seed + 5)
    shape, dtype = case.args["x"].shape, case.args["x"].dtype
    gates = {n: packed(torch.randn(shape, generator=gen).to(dtype), rows, gap) for n in "BC"}
    name = case.operation.replace("conv.", "short_conv.")
    options = {n: value for n, value in case.options.items() if n != "activation"}
    return replace(case, operation=name, args={**gates, **case.args}, options=options)
