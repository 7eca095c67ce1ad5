"""ZAYA's compressed convolutional attention: two convolutions over one window, and a delay."""

import torch
from torch import Tensor

from hal.reference.conv import read_window, write_window
from hal.reference.rows import live_tokens, rows, spread, token_rows

Result = tuple[Tensor, Tensor, Tensor, Tensor]
"""Convolved q and k `[T, C]`, the hidden state before each token `[T, hidden]`, both pools."""


def _stages(
    window: Tensor, depthwise: Tensor, bias: Tensor, grouped: Tensor, grouped_bias: Tensor
) -> Tensor:
    """One token's q and k `[C]` from its raw row and the carry before it, `[carry + 1, C]`.

    The first stage runs over the whole window and pads nothing: where the carry is zero it gives
    its bias, and the second stage reads that.
    """
    width, inner, taps = depthwise.shape[1], grouped.shape[1], grouped.shape[2]
    first = torch.stack(
        [bias + (depthwise.T * window[i : i + width]).sum(0) for i in range(taps)], dim=1
    )
    blocks = first.view(-1, inner, taps)
    weight = grouped.view(-1, inner, inner, taps)
    return torch.einsum("gdt,godt->go", blocks, weight).flatten() + grouped_bias


def cca_prefill(
    r: Tensor,
    h: Tensor,
    depthwise: Tensor,
    depthwise_bias: Tensor | None,
    grouped: Tensor,
    grouped_bias: Tensor | None,
    window: Tensor,
    hidden: Tensor,
    src: Tensor,
    dst: Tensor,
    start: Tensor,
    query_start_loc: Tensor,
    max_len: int,
    *,
    track: Tensor | None = None,
    layout: str = "CW",
) -> Result:
    """Two convolutions without activation over one carry, and h of the token before.

    r `[T, C]` raw, h `[T, hidden]`, depthwise `[C, t0]`, grouped `[C, D, t1]`, window
    `[S, C, t0 + t1 - 2]` by layout, hidden `[S, hidden]`.
    """
    r, h, old, before = r.double(), h.double(), window.double(), hidden.double()
    zeros = torch.zeros(r.shape[1], dtype=r.dtype)
    biases = [zeros if b is None else b.double() for b in (depthwise_bias, grouped_bias)]
    new, kept = old.clone(), before.clone()
    q_k, delayed = torch.zeros_like(r), torch.zeros_like(h)
    carry = depthwise.shape[1] + grouped.shape[2] - 2
    for row in rows(src, dst, query_start_loc, track):
        position = int(start[row.index])
        held, last = zeros.expand(carry, -1), torch.zeros_like(before[0])
        if row.src >= 0:
            held = read_window(old, row.src, position, carry + 1, layout)
            last = before[row.src]
        for t in range(row.begin, row.end):
            seen = torch.cat((held, r[t : t + 1]))
            q_k[t] = _stages(seen, depthwise.double(), biases[0], grouped.double(), biases[1])
            delayed[t], last, held = last, h[t], seen[1:]
            count = t + 1 - row.begin
            for slot in row.keeps(count):
                write_window(new, slot, position + count, held, layout)
                kept[slot] = last
    return q_k, delayed, new, kept


def cca_decode(
    r: Tensor,
    h: Tensor,
    depthwise: Tensor,
    depthwise_bias: Tensor | None,
    grouped: Tensor,
    grouped_bias: Tensor | None,
    window: Tensor,
    hidden: Tensor,
    src: Tensor,
    dst: Tensor,
    start: Tensor,
    *,
    layout: str = "CW",
) -> Result:
    """One token a row; a row with neither slot gives zero and writes nothing."""
    live, bounds = live_tokens(src, dst), token_rows(src, dst)
    weights = (depthwise, depthwise_bias, grouped, grouped_bias)
    q_k, delayed, new, kept = cca_prefill(
        r[live], h[live], *weights, window, hidden, src, dst, start, bounds, 1, layout=layout
    )
    return spread(q_k, live, r.shape[0]), spread(delayed, live, h.shape[0]), new, kept
