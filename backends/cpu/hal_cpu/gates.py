"""The gate: log decay and beta from the raw projections.

Where rows share a tensor only `exp` and `log1p` are used, never torch's `sigmoid`, `silu` or
`softplus`: those round the last few elements of a tensor another way than the rest, so a row's bits
would depend on its place in the batch.
"""

from typing import Final

import torch
from torch import Tensor

from hal.interfaces import Gate
from hal.model.spec import GateKind

SOFTPLUS_THRESHOLD: Final = 20.0
"""Above it softplus(x) is x; the step there is smaller than float32 can show."""


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), bitwise the same wherever an element sits."""
    return x.neg().exp_().add_(1).reciprocal_()


def silu_(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)) in place, bitwise the same wherever an element sits."""
    return x.div_(x.neg().exp_().add_(1))


def softplus(x: Tensor) -> Tensor:
    """log1p(exp(x)), and x itself above the threshold."""
    return torch.maximum(x, x.clamp(max=SOFTPLUS_THRESHOLD).exp_().log1p_())


def _decay(a: Tensor, gate: Gate) -> Tensor:
    rate = gate.A_log.float().exp()
    if gate.kind is not GateKind.SCALAR:
        rate = rate.unsqueeze(-1)
    x = a.float() + gate.dt_bias
    if gate.lower_bound is not None and gate.kind is GateKind.SAFE:
        return sigmoid(x * rate).mul_(gate.lower_bound)
    return softplus(x).mul_(rate.neg_())


def log_decay(a: Tensor, gate: Gate | None) -> Tensor:
    """g in float32, natural log: `[T, HV, 1]`, or `[T, HV, K]` for a gate of each key channel.

    Without a gate `a` is g already, of either form.
    """
    g = a.float() if gate is None else _decay(a, gate)
    return g if g.ndim == 3 else g.unsqueeze(-1)


def beta_of(b: Tensor, gate: Gate | None) -> Tensor:
    """beta in float32 `[T, HV]`; without a gate `b` is beta already."""
    if gate is None:
        return b.float()
    beta = sigmoid(b.float())
    return beta if gate.beta_scale == 1.0 else beta.mul_(gate.beta_scale)
