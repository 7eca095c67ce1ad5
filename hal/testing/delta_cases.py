"""Cases of the delta rule."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hal.interfaces import Gate
from hal.model.spec import GateKind
from hal.testing.case import Case
from hal.testing.rows import Rows, index_args, packed, poisoned_pool


@dataclass(frozen=True, slots=True)
class Delta:
    """Dims and inputs of a delta-rule case."""

    H: int = 2
    HV: int = 4
    K: int = 16
    V: int = 24
    gate: GateKind | None = GateKind.SCALAR
    per_channel: bool = False
    beta_scale: float = 1.0
    hard: bool = False
    log_g: float | None = None
    scale: float = 1.0
    v_scale: float = 1.0
    qk_l2norm: bool = True
    bound: float = -5.0
    tail: bool = False
    """Whether raw gates lie about 10, up to where softplus is linear, and decay slowly."""

    @property
    def by_channel(self) -> bool:
        """Whether every key channel decays by itself, and a gated norm by sigmoid follows."""
        return self.per_channel or self.gate in (GateKind.CHANNEL, GateKind.SAFE)


def make_gate(dims: Delta, gen: torch.Generator) -> Gate | None:
    """A gate as models initialise it: A in 1..16, dt in 1e-3..0.1."""
    if dims.gate is None:
        return None
    shape = (dims.HV,) if dims.gate is GateKind.SCALAR else (dims.HV, dims.K)
    dt = torch.exp(torch.rand(shape, generator=gen) * 4.6 - 6.9)
    bound = dims.bound if dims.gate is GateKind.SAFE else None
    rates = 1 + 15 * torch.rand(dims.HV, generator=gen)
    A_log = torch.log(rates / 400 if dims.tail else rates)
    bias = dt + torch.log(-torch.expm1(-dt))
    return Gate(dims.gate, A_log, bias, bound, dims.beta_scale)


def _raw_gates(
    dims: Delta, tokens: int, dtype: torch.dtype, gen: torch.Generator
) -> tuple[Tensor, Tensor]:
    shape = (tokens, dims.HV, dims.K) if dims.by_channel else (tokens, dims.HV)
    a = torch.randn(shape, generator=gen)
    if dims.tail:
        a = 10 + 8 * a
    b = torch.randn(tokens, dims.HV, generator=gen) * (2 if dims.hard else 1)
    if dims.gate is not None:
        return a.to(dtype), b.to(dtype)
    g = -a.abs() * (0.1 if dims.log_g is None else 0.0) + (dims.log_g or 0.0)
    return g, dims.beta_scale * torch.sigmoid(b)


def _away_from(q: Tensor, k: Tensor) -> Tensor:
    """Queries that are nowhere almost orthogonal to their token's key.

    The output of a lone token is a multiple of q.k, and nothing is right relative to nothing.
    """
    cosine = torch.cosine_similarity(q, k, dim=-1).unsqueeze(-1)
    return torch.where(cosine.abs() < 0.05, q + 0.5 * k, q)


def delta_case(
    rows: Rows,
    dims: Delta = Delta(),
    *,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    layout: str = "VK",
    decode: bool = False,
    seed: int = 0,
    gap: int = 0,
    strided: bool = False,
    track: Tensor | None = None,
) -> Case:
    """A delta rule over the given rows; hard inputs share most of their keys."""
    gen = torch.Generator().manual_seed(seed)
    tokens, H, HV, K, V = rows.tokens, dims.H, dims.HV, dims.K, dims.V
    q, v = torch.randn(tokens, H, K, generator=gen), torch.randn(tokens, HV, V, generator=gen)
    k = torch.randn(tokens, H, K, generator=gen)
    if dims.hard:
        k = torch.randn(1, H, K, generator=gen) + 0.3 * k
    q = _away_from(q, k)
    a, b = _raw_gates(dims, tokens, dtype, gen)
    shape = (HV, V, K) if layout == "VK" else (HV, K, V)
    args: dict[str, Any] = {
        "q": packed((q * dims.scale).to(dtype), rows, gap),
        "k": packed((k * dims.scale).to(dtype), rows, gap),
        "v": packed((v * dims.v_scale).to(dtype), rows, gap),
        "a": packed(a, rows, gap),
        "b": packed(b, rows, gap),
        "gate": make_gate(dims, gen),
        "state": poisoned_pool(rows, shape, state_dtype, gen, pad=gap),
    } | index_args(rows, decode, strided)
    options: dict[str, Any] = {"qk_l2norm": dims.qk_l2norm}
    if track is not None:
        options["track"] = track
    name = "delta_rule.decode" if decode else "delta_rule.prefill"
    return Case(name, args, rows, layout, HV, options)
