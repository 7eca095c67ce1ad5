"""Depthwise causal convolution and the short convolution around it."""

import torch
from torch import Tensor

from hal.reference.rows import live_tokens, rows, spread, token_rows


def read_window(state: Tensor, slot: int, start: int, width: int, layout: str) -> Tensor:
    """The last W-1 inputs that `slot` holds before position `start`, oldest first, `[W-1, C]`."""
    if layout == "ring":
        return state[slot][[p % width for p in range(start - width + 1, start)]]
    return state[slot].T if layout == "CW" else state[slot]


def write_window(state: Tensor, slot: int, start: int, window: Tensor, layout: str) -> None:
    """Store `[W-1, C]` as the inputs before position `start`; a ring's free row stays as it is."""
    if layout == "ring":
        width = window.shape[0] + 1
        state[slot][[p % width for p in range(start - width + 1, start)]] = window
    else:
        state[slot] = window.T if layout == "CW" else window


def _activate(y: Tensor, activation: str | None) -> Tensor:
    return y / (1 + torch.exp(-y)) if activation == "silu" else y


def conv_prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    src: Tensor,
    dst: Tensor,
    start: Tensor,
    query_start_loc: Tensor,
    max_len: int,
    *,
    activation: str | None = None,
    track: Tensor | None = None,
    layout: str = "CW",
) -> tuple[Tensor, Tensor]:
    """y[t, c] = act(bias[c] + sum_j weight[c, j] * x[t - (W-1) + j, c]); result `[T, C]`."""
    x, taps, old = x.double(), weight.double(), state.double()
    offset = torch.zeros(x.shape[1], dtype=x.dtype) if bias is None else bias.double()
    new, out, width = old.clone(), torch.zeros_like(x), taps.shape[1]
    for row in rows(src, dst, query_start_loc, track):
        position = int(start[row.index])
        window = torch.zeros(width - 1, x.shape[1], dtype=x.dtype)
        if row.src >= 0:
            window = read_window(old, row.src, position, width, layout)
        for t in range(row.begin, row.end):
            seen = torch.cat((window, x[t : t + 1]))
            out[t] = _activate(offset + (taps.T * seen).sum(0), activation)
            window = seen[1:]
            count = t + 1 - row.begin
            for slot in row.keeps(count):
                write_window(new, slot, position + count, window, layout)
    return out, new


def conv_decode(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    src: Tensor,
    dst: Tensor,
    start: Tensor,
    *,
    activation: str | None = None,
    layout: str = "CW",
) -> tuple[Tensor, Tensor]:
    """One token a row; a row with neither slot gives zero and writes nothing."""
    live, bounds = live_tokens(src, dst), token_rows(src, dst)
    out, new = conv_prefill(
        x[live], weight, bias, state, src, dst, start, bounds, 1,
        activation=activation, layout=layout,
    )  # fmt: skip
    return spread(out, live, x.shape[0]), new


def short_conv_prefill(
    B: Tensor,
    C: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    src: Tensor,
    dst: Tensor,
    start: Tensor,
    query_start_loc: Tensor,
    max_len: int,
    *,
    layout: str = "CW",
) -> tuple[Tensor, Tensor]:
    """C * conv(B * x); the product is the conv's input, so it is rounded to x's dtype first."""
    y, new = conv_prefill(
        B * x, weight, bias, state, src, dst, start, query_start_loc, max_len, layout=layout
    )
    return C.double() * y, new


def short_conv_decode(
    B: Tensor,
    C: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    src: Tensor,
    dst: Tensor,
    start: Tensor,
    *,
    layout: str = "CW",
) -> tuple[Tensor, Tensor]:
    """One token a row of `short_conv_prefill`; pad rows give zero, whatever C holds there."""
    y, new = conv_decode(B * x, weight, bias, state, src, dst, start, layout=layout)
    pad = ((src < 0) & (dst < 0)).unsqueeze(1)
    return torch.where(pad, 0.0, C.double() * y), new
