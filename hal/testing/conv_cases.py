"""Cases of the convolution."""

from typing import Any

import torch
from torch import Tensor

from hal.testing.case import Case
from hal.testing.rows import Rows, i32, index_args, packed, poisoned_pool


def conv_case(
    rows: Rows,
    *,
    channels: int = 24,
    width: int = 4,
    bias: bool = True,
    activation: str | None = "silu",
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype | None = None,
    layout: str = "CW",
    decode: bool = False,
    seed: int = 0,
    gap: int = 0,
    strided: bool = False,
    track: Tensor | None = None,
) -> Case:
    """A convolution over the given rows."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(rows.tokens, channels, generator=gen).to(dtype)
    shape = (channels, width - 1) if layout == "CW" else (width - 1, channels)
    state = poisoned_pool(rows, shape, state_dtype or dtype, gen, pad=gap)
    args: dict[str, Any] = {
        "x": packed(x, rows, gap),
        "weight": torch.randn(channels, width, generator=gen).to(dtype),
        "bias": torch.randn(channels, generator=gen).to(dtype) if bias else None,
        "state": state,
        "start": i32(*rows.start),
    } | index_args(rows, decode, strided)
    options: dict[str, Any] = {"activation": activation}
    if track is not None:
        options["track"] = track
    name = "conv.decode" if decode else "conv.prefill"
    return Case(name, args, rows, layout, 0, options, width)
