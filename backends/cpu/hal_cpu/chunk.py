"""One chunk of the delta rule in matrix form, with a triangular solve.

Within a chunk that starts from state S, G_i is the sum of the log decays up to token i. The
updates u solve `(I + L) u = beta * (v - (exp(G) k) S)`, where below the diagonal
`L_ij = beta_i * k_i.k_j * exp(G_i - G_j)`. Only differences with i >= j are kept and none is above
zero, so nothing overflows.
"""

from math import log
from typing import Final

import torch
from torch import Tensor

from hal_cpu.keys import keys_and_queries

SCALAR_CHUNK: Final = 64
"""Tokens of a chunk where a head decays as a whole."""

LOG2_E: Final = 1 / log(2)
"""Sums of log decays are kept to base two: `exp2` takes less than half the time of `exp`."""

CHANNEL_CHUNK: Final = 16
"""Tokens of a chunk where every key channel decays by itself: decays are chunk x chunk x K."""


def chunk_size(*, scalar: bool) -> int:
    """Tokens of a chunk for a scalar or a channel gate."""
    return SCALAR_CHUNK if scalar else CHANNEL_CHUNK


def advance_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, qk_l2norm: bool
) -> Tensor:
    """Run a chunk of one row; state `[HV, K, V]` is advanced in place, result `[c, HV, V]`.

    q, k `[c, H, K]`, v `[c, HV, V]`, g `[c, HV, 1 or K]`, beta `[c, HV]`. R value heads share a key
    head; inside, keys are `[H, 1, ...]` and all that a value head owns is `[H, R, ...]`.
    """
    (length, key_heads, _), heads = q.shape, v.shape[1]
    ratio = heads // key_heads
    both = keys_and_queries(q, k, qk_l2norm).permute(1, 2, 0, 3).contiguous().unsqueeze(1)
    summed = g.double().mul_(LOG2_E).cumsum(0).view(length, key_heads, ratio, -1)
    summed = summed.permute(1, 2, 0, 3).contiguous()
    against_keys, against_queries = _products(both, summed)
    readers = both * summed.float().exp2_().unsqueeze(2)
    read = torch.bmm(readers.view(heads, 2 * length, -1), state)
    wanted = v.float().permute(1, 2, 0).sub(read[:, :length].transpose(1, 2))
    update = _solve(against_keys, wanted, beta.float().t().unsqueeze(1))
    result = torch.baddbmm(read[:, length:], against_queries.tril_(), update)
    _carry(state, both[:, :, 0], summed, update)
    return result.transpose(0, 1)


def _solve(against_keys: Tensor, wanted: Tensor, beta: Tensor) -> Tensor:
    """The updates u `[HV, c, V]` from `wanted` `[HV, V, c]`.

    Solved as `u^T (I + L)^T = wanted^T`: the form that the library takes without a copy.
    """
    lower = against_keys.mul_(beta.transpose(1, 2)).transpose(1, 2)
    right = wanted.mul_(beta).contiguous()
    update: Tensor = torch.linalg.solve_triangular(
        lower, right, upper=True, left=False, unitriangular=True
    )
    return update.transpose(1, 2)


def _products(both: Tensor, summed: Tensor) -> tuple[Tensor, Tensor]:
    """k_i.k_j and q_i.k_j, each decayed from j to i: two `[HV, c, c]`, valid for i >= j."""
    key_heads, _, _, length, key_dim = both.shape
    ratio = summed.shape[1]
    fall = _fall(summed)
    if summed.shape[-1] == 1:
        flat = both.view(key_heads, 2 * length, key_dim)
        plain = torch.bmm(flat, flat[:, :length].transpose(1, 2))
        decayed = plain.view(key_heads, 1, 2, length, length) * fall.squeeze(-1).unsqueeze(2)
        decayed = decayed.flatten(0, 1)
        return decayed[:, 0], decayed[:, 1]
    keys = fall.mul_(both[:, :, 0].unsqueeze(2)).view(-1, length, key_dim)
    readers = both.transpose(2, 3).expand(-1, ratio, -1, -1, -1).reshape(-1, 2, key_dim)
    decayed = torch.bmm(readers, keys.transpose(1, 2)).view(-1, length, 2, length)
    return decayed[:, :, 0], decayed[:, :, 1].contiguous()


def _fall(summed: Tensor) -> Tensor:
    """The decay from j to i, `[H, R, c, c, 1 or K]`; 1 above the diagonal, where nobody looks.

    The difference is taken in float64: sums of strong decays have no digits left for weak ones.
    """
    return (summed.unsqueeze(3) - summed.unsqueeze(2)).float().clamp_(max=0).exp2_()


def _carry(state: Tensor, keys: Tensor, summed: Tensor, update: Tensor) -> None:
    """Decay the state over the chunk and add every update, decayed to the chunk's end."""
    total = summed[:, :, -1:]
    kept = (keys * (total - summed).float().exp2_()).flatten(0, 1)
    state.mul_(total.float().exp2_().flatten(0, 1).transpose(1, 2))
    if state.stride(-1) == 1:
        state.baddbmm_(kept.transpose(1, 2), update)
    else:
        state.transpose(1, 2).baddbmm_(update.transpose(1, 2), kept)
