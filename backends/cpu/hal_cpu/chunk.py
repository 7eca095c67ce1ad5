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

from hal_cpu.halves import Decayed, by_channel
from hal_cpu.keys import keys_and_queries

SCALAR_CHUNK: Final = 64
"""Tokens of a chunk where a head decays as a whole."""

CHANNEL_CHUNK: Final = 64
"""Tokens of a chunk where every key channel decays by itself."""

LOG2_E: Final = 1 / log(2)
"""Sums of log decays are kept to base two: `exp2` takes less than half the time of `exp`."""


def chunk_size(*, scalar: bool) -> int:
    """Tokens of a chunk for a scalar or a channel gate."""
    return SCALAR_CHUNK if scalar else CHANNEL_CHUNK


def advance_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, qk_l2norm: bool
) -> Tensor:
    """Run a chunk of one row; state `[HV, K, V]` is advanced in place, result `[c, HV, V]`.

    q, k `[c, H, K]`, v `[c, HV, V]`, g `[c, HV, 1 or K]`, beta `[c, HV]`. R value heads share a key
    head. Keys and queries lie in pairs, token by token: `[H, c, 2, K]`.
    """
    (length, key_heads, _), heads = q.shape, v.shape[1]
    pairs = keys_and_queries(q, k, qk_l2norm).transpose(0, 1).contiguous()
    decayed = _decayed(pairs, g)
    shared = (key_heads, heads // key_heads, length, -1)
    grown, left = decayed.grown.reshape(shared), decayed.left.reshape(shared)
    readers = pairs.unsqueeze(1) * grown.unsqueeze(3)
    read = torch.bmm(readers.view(heads, 2 * length, -1), state).view(heads, length, 2, -1)
    against_keys, against_queries = decayed.products.unbind(2)
    wanted = v.float().permute(1, 2, 0).sub(read[:, :, 0].transpose(1, 2))
    update = _solve(against_keys, wanted, beta.float().t().unsqueeze(1))
    result = torch.baddbmm(read[:, :, 1], against_queries.tril_(), update)
    kept = (pairs[:, :, 0].unsqueeze(1) * left).flatten(0, 1)
    _carry(state, kept, decayed.whole, update)
    return result.transpose(0, 1)


def _decayed(pairs: Tensor, g: Tensor) -> Decayed:
    """The chunk's products and decays; g `[c, HV, 1 or K]` with a natural base."""
    if g.shape[-1] > 1:
        return by_channel(pairs, (g * LOG2_E).transpose(0, 1).contiguous())
    summed = g.double().mul_(LOG2_E).cumsum(0).transpose(0, 1).contiguous()
    total = summed[:, -1:]
    left = (total - summed).float().exp2_()
    return Decayed(
        _by_head(pairs, summed), summed.float().exp2_(), left, total[:, 0].float().exp2_()
    )


def _by_head(pairs: Tensor, summed: Tensor) -> Tensor:
    """Products under one decay a head, `[HV, c, 2, c]`.

    The difference of sums is taken in float64: sums of strong decays have no digits left for weak
    ones.
    """
    key_heads, length, _, _ = pairs.shape
    plain = torch.bmm(pairs.flatten(1, 2), pairs[:, :, 0].transpose(1, 2))
    fall = (summed - summed.transpose(1, 2)).float().clamp_(max=0).exp2_()
    fall = fall.view(key_heads, -1, length, 1, length)
    return (plain.view(key_heads, 1, length, 2, length) * fall).flatten(0, 1)


def _solve(against_keys: Tensor, wanted: Tensor, beta: Tensor) -> Tensor:
    """The updates u `[HV, c, V]` from `wanted` `[HV, V, c]`.

    Solved as `u^T (I + L)^T = wanted^T`: the form that the library takes without a copy.
    """
    lower = against_keys.mul(beta.transpose(1, 2)).transpose(1, 2)
    right = wanted.mul_(beta).contiguous()
    update: Tensor = torch.linalg.solve_triangular(
        lower, right, upper=True, left=False, unitriangular=True
    )
    return update.transpose(1, 2)


def _carry(state: Tensor, kept: Tensor, whole: Tensor, update: Tensor) -> None:
    """Decay the state over the chunk and add every update; `kept` are keys at the chunk's end."""
    state.mul_(whole.unsqueeze(-1))
    if state.stride(-1) == 1:
        state.baddbmm_(kept.transpose(1, 2), update)
    else:
        state.transpose(1, 2).baddbmm_(update.transpose(1, 2), kept)
