"""What stands around the recurrences: ready-made gates, and the gated norms of the outputs."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import softplus

from hal.interfaces import Gate
from hal.model.spec import GateKind


def ready(gate: Gate, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Log decay and beta in float32 from raw a `[T, HV]` or `[T, HV, K]` and b `[T, HV]`."""
    beta = torch.sigmoid(b.float()) * gate.beta_scale
    raw = a.float() + gate.dt_bias
    scale = gate.A_log.exp()
    if gate.kind is not GateKind.SCALAR:
        scale = scale.unsqueeze(-1)
    if gate.kind is GateKind.SAFE and gate.lower_bound is not None:
        return gate.lower_bound * torch.sigmoid(scale * raw), beta
    return -scale * softplus(raw), beta


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float, kind: GateKind) -> Tensor:
    """rms(o) * weight, times silu(z) (scalar gate) or sigmoid(z) (channel gates), in float32.

    o, z `[T, HV, V]`, weight `[V]`; one rounding, to o's dtype.
    """
    x, gate = o.float(), z.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
    factor = torch.sigmoid(gate)
    return (x * (gate * factor if kind is GateKind.SCALAR else factor)).to(o.dtype)


def grouped_norm(
    y: Tensor,
    z: Tensor,
    weight: Tensor,
    eps: float,
    groups: int,
    norm_before_gate: bool,
    over_ranks: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """rms in groups of I / G channels, times weight, and the gate silu(z), in float32.

    y, z `[T, I]`, weight `[I]`. The gate is applied to what is normed, or after it. `over_ranks`
    gives the mean of a mean square over the ranks that share a group.
    """
    x, gate = y.float(), torch.nn.functional.silu(z.float())
    x = x if norm_before_gate else x * gate
    grouped = x.view(-1, groups, x.shape[1] // groups)
    square = grouped.square().mean(-1, keepdim=True)
    if over_ranks is not None:
        square = over_ranks(square)
    normed = (grouped * torch.rsqrt(square + eps)).view_as(x) * weight.float()
    return (normed * gate if norm_before_gate else normed).to(y.dtype)
