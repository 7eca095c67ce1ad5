"""What both forms of the delta rule do with queries and keys first."""

from typing import Final

import torch
from torch import Tensor

L2_EPS: Final = 1e-6
"""Added to the sum of squares, inside the root."""


def keys_and_queries(q: Tensor, k: Tensor, qk_l2norm: bool) -> Tensor:
    """Keys and scaled queries of every key head in float32: `[T, H, 2, K]`, the key first."""
    both = torch.stack((k, q), dim=2).float()
    if qk_l2norm:
        both.mul_((both * both).sum(-1, keepdim=True).add_(L2_EPS).rsqrt_())
    both[:, :, 1].mul_(q.shape[-1] ** -0.5)
    return both
