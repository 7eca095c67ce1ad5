"""The selective scan: Mamba-2 by head, Mamba-1 by channel, lightning without dt."""

import torch
from torch import Tensor

from hal.reference.delta_rule import softplus
from hal.reference.rows import live_tokens, rows, spread, token_rows


def _steps(
    dt: Tensor | None,
    dt_bias: Tensor | None,
    dt_limit: tuple[float, float],
    dt_softplus: bool,
    shape: tuple[int, int],
) -> Tensor:
    """d of every token and head (or channel), `[T, H or I]`; 1 where there is no dt."""
    if dt is None:
        return torch.ones(shape, dtype=torch.float64)
    d = dt.double() if dt_bias is None else dt.double() + dt_bias.double()
    return (softplus(d) if dt_softplus else d).clamp(*dt_limit)


def _grouped(tensor: Tensor, heads: int) -> Tensor:
    """B or C of every head: head h reads group h // (H/G)."""
    return tensor.double().repeat_interleave(heads // tensor.shape[1], dim=1)


def scan_prefill(
    x: Tensor,
    dt: Tensor | None,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    z: Tensor | None,
    state: Tensor,
    src: Tensor,
    dst: Tensor,
    query_start_loc: Tensor,
    max_len: int,
    *,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    dt_softplus: bool = True,
    track: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S = S exp(d A) + (d x) B^T; y = S C + D x; y = y silu(z) where z is given; x's shape.

    Mamba-2 has x `[T, H, P]` and state `[S, H, P, N]`. Mamba-1 (x `[T, I]`, A `[I, N]`, state
    `[S, I, N]`) is run as I heads of one channel whose decay differs along N.
    """
    heads, shape = x.shape[1], x.shape
    values = x.double() if x.ndim == 3 else x.double().unsqueeze(-1)
    old = state.double()
    d = _steps(dt, dt_bias, dt_limit, dt_softplus, (shape[0], heads))
    rate = A.double().reshape(heads, 1, -1)
    b, c = _grouped(B, heads), _grouped(C, heads)
    skip = torch.zeros(heads, dtype=old.dtype) if D is None else D.double()
    new, out = old.clone(), torch.zeros_like(values)
    for row in rows(src, dst, query_start_loc, track):
        S = torch.zeros(heads, values.shape[2], b.shape[2], dtype=old.dtype)
        if row.src >= 0:
            S = old[row.src].reshape(S.shape).clone()
        for t in range(row.begin, row.end):
            step = d[t].view(heads, 1, 1)
            S = S * (step * rate).exp() + step * values[t].unsqueeze(-1) * b[t].unsqueeze(1)
            out[t] = (S * c[t].unsqueeze(1)).sum(-1) + skip.unsqueeze(-1) * values[t]
            for slot in row.keeps(t + 1 - row.begin):
                new[slot] = S.reshape(new[slot].shape)
    out = out.reshape(shape)
    return (out if z is None else _gate(out, z, int(query_start_loc[-1]))), new


def _gate(y: Tensor, z: Tensor, tokens: int) -> Tensor:
    """y * silu(z) of the tokens that belong to rows; pads stay zero, whatever z holds there."""
    gated = torch.zeros_like(y)
    gated[:tokens] = y[:tokens] * z[:tokens].double() * torch.sigmoid(z[:tokens].double())
    return gated


def scan_decode(
    x: Tensor,
    dt: Tensor | None,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    z: Tensor | None,
    state: Tensor,
    src: Tensor,
    dst: Tensor,
    *,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    dt_softplus: bool = True,
) -> tuple[Tensor, Tensor]:
    """One token a row; a row with neither slot gives zero and writes nothing."""
    live = live_tokens(src, dst)
    tokens, B, C = (tensor[live] for tensor in (x, B, C))
    dt, z = (None if tensor is None else tensor[live] for tensor in (dt, z))
    out, new = scan_prefill(
        tokens, dt, A, B, C, D, dt_bias, z, state, src, dst, token_rows(src, dst), 1,
        dt_limit=dt_limit, dt_softplus=dt_softplus,
    )  # fmt: skip
    return spread(out, live, x.shape[0]), new
