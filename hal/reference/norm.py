"""The output step of a delta-rule layer."""

import torch
from torch import Tensor


def gated_rms_norm(
    o: Tensor, z: Tensor, weight: Tensor, eps: float = 1e-6, *, activation: str = "silu"
) -> Tensor:
    """o / sqrt(mean(o * o) + eps) * weight * act(z) over the last axis, float64.

    `activation` is "silu" (Gated DeltaNet) or "sigmoid" (Kimi Delta).
    """
    o, z = o.double(), z.double()
    normed = o / torch.sqrt((o * o).mean(-1, keepdim=True) + eps) * weight.double()
    gate = torch.sigmoid(z)
    return normed * (z * gate if activation == "silu" else gate)
