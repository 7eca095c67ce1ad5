"""The gated delta rule with every kind of gate."""

import torch
from torch import Tensor

from hal.interfaces import Gate
from hal.model.spec import GateKind
from hal.reference.rows import live_tokens, rows, spread, token_rows


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), and x itself above 20."""
    return torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20))))


def gates(a: Tensor, b: Tensor, gate: Gate | None) -> tuple[Tensor, Tensor]:
    """Log decay g `[T, HV, 1 or K]` and beta `[T, HV]`; without a gate they are a and b."""
    a, b = a.double(), b.double()
    if gate is None:
        return (a if a.ndim == 3 else a.unsqueeze(-1)), b
    beta = gate.beta_scale * torch.sigmoid(b)
    rate, biased = gate.A_log.double().exp(), a + gate.dt_bias.double()
    if gate.kind is GateKind.SCALAR:
        return (-rate * softplus(biased)).unsqueeze(-1), beta
    rate = rate.unsqueeze(-1)
    if gate.kind is GateKind.CHANNEL:
        return -rate * softplus(biased), beta
    return float(gate.lower_bound or 0.0) * torch.sigmoid(rate * biased), beta


def l2(x: Tensor) -> Tensor:
    """x / sqrt(sum(x * x) + 1e-6) over the last axis."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _matrices(state: Tensor, layout: str) -> Tensor:
    return state if layout == "VK" else state.transpose(-1, -2)


def delta_rule_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gate: Gate | None,
    state: Tensor,
    src: Tensor,
    dst: Tensor,
    query_start_loc: Tensor,
    max_len: int,
    *,
    qk_l2norm: bool = True,
    track: Tensor | None = None,
    layout: str = "VK",
) -> tuple[Tensor, Tensor]:
    """S = S exp(g); u = beta (v - S k'); S = S + u k'^T; o = S q'; result `[T, HV, V]`."""
    q, k, v, old = q.double(), k.double(), v.double(), state.double()
    g, beta = gates(a, b, gate)
    if qk_l2norm:
        q, k = l2(q), l2(k)
    ratio = v.shape[1] // q.shape[1]
    q = q.repeat_interleave(ratio, dim=1) * q.shape[-1] ** -0.5
    k = k.repeat_interleave(ratio, dim=1)
    new, out = old.clone(), torch.zeros_like(v)
    read, written = _matrices(old, layout), _matrices(new, layout)
    for row in rows(src, dst, query_start_loc, track):
        S = read[row.src].clone() if row.src >= 0 else torch.zeros_like(read[0])
        for t in range(row.begin, row.end):
            S = S * g[t].exp().unsqueeze(-2)
            u = beta[t].unsqueeze(-1) * (v[t] - (S * k[t].unsqueeze(-2)).sum(-1))
            S = S + u.unsqueeze(-1) * k[t].unsqueeze(-2)
            out[t] = (S * q[t].unsqueeze(-2)).sum(-1)
            for slot in row.keeps(t + 1 - row.begin):
                written[slot] = S
    return out, new


def delta_rule_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gate: Gate | None,
    state: Tensor,
    src: Tensor,
    dst: Tensor,
    *,
    qk_l2norm: bool = True,
    layout: str = "VK",
) -> tuple[Tensor, Tensor]:
    """One token a row; a row with neither slot gives zero and writes nothing."""
    live = live_tokens(src, dst)
    q, k, tokens, a, b = (tensor[live] for tensor in (q, k, v, a, b))
    out, new = delta_rule_prefill(
        q, k, tokens, a, b, gate, state, src, dst, token_rows(src, dst), 1,
        qk_l2norm=qk_l2norm, layout=layout,
    )  # fmt: skip
    return spread(out, live, v.shape[0]), new
