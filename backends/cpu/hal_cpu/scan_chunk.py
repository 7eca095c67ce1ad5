"""Chunks of the scan: matrix form for Mamba-2 and lightning, one pass over time for Mamba-1.

Within a chunk that starts from state S, G_i is the sum of d A up to token i. The output is
`exp(G_i) S C_i + sum_j<=i exp(G_i - G_j) (C_i.B_j) d_j x_j`; B and C belong to a group, so that
their products are made once for all its heads. No difference that is used is above zero.
"""

from typing import Final

import torch
from torch import Tensor

from hal_cpu.chunk import LOG2_E
from hal_cpu.scan_inputs import Operands, Rates, Tokens
from hal_cpu.scan_step import read

HEAD_CHUNK: Final = 64
"""Tokens of a chunk in matrix form."""

CHANNEL_ELEMENTS: Final = 1 << 18
"""Elements of a Mamba-1 chunk: decays and updates of its tokens stay in cache."""


def chunk_size(tokens: Tokens, state: Tensor) -> int:
    """Tokens of a chunk; `state` is one slot."""
    if tokens.x.ndim == 3:
        return HEAD_CHUNK
    return max(1, CHANNEL_ELEMENTS // max(1, state.numel()))


def advance_chunk(tokens: Tokens, rates: Rates, state: Tensor) -> Tensor:
    """Run a chunk of one row; dense state `[H, P, N]` is advanced in place, result float32."""
    if tokens.x.ndim == 2:
        return _by_time(Operands.of(tokens, rates), state).view(tokens.x.shape)
    return _by_matrix(tokens, rates, state)


def _by_time(operands: Operands, state: Tensor) -> Tensor:
    """One addition a token: every update becomes the state after it."""
    states = operands.update.unsqueeze(-1) * operands.B.unsqueeze(2)
    held = state
    for after, decay in zip(states.unbind(0), operands.decay.unbind(0), strict=True):
        held = after.addcmul_(held, decay)
    state.copy_(held)
    return read(states, operands)


def _by_matrix(tokens: Tokens, rates: Rates, state: Tensor) -> Tensor:
    heads, value_dim, size = state.shape
    B, C = (t.float().transpose(0, 1).contiguous() for t in (tokens.B, tokens.C))
    (groups, length, _), ratio = B.shape, heads // B.shape[0]
    d = tokens.steps(rates)
    fall = d.double().mul_(rates.A).mul_(LOG2_E).cumsum(0).t().contiguous()
    update = torch.mul(tokens.x.float(), d.unsqueeze(-1)).transpose(0, 1).contiguous()
    flat = state.view(groups, ratio * value_dim, size)
    carried = torch.bmm(C, flat.transpose(1, 2)).view(groups, length, ratio, value_dim)
    y = torch.bmm(_weights(torch.bmm(C, B.transpose(1, 2)), fall), update)
    grouped, grown = y.view(groups, ratio, length, value_dim), fall.float().exp2_()
    grouped.addcmul_(carried.transpose(1, 2), grown.view(groups, ratio, length, 1))
    total = fall[:, -1:]
    kept = update.mul_((total - fall).float().exp2_().unsqueeze(-1))
    kept = kept.transpose(1, 2).reshape(groups, ratio * value_dim, length)
    state.mul_(total.float().exp2_().unsqueeze(-1))
    flat.baddbmm_(kept, B)
    return y.transpose(0, 1)


def _weights(products: Tensor, fall: Tensor) -> Tensor:
    """C_i.B_j decayed from j to i, `[H, c, c]`, zero above the diagonal."""
    heads, length = fall.shape
    decay = (fall.unsqueeze(2) - fall.unsqueeze(1)).float().clamp_(max=0).exp2_().tril_()
    weights = decay.view(products.shape[0], -1, length, length).mul_(products.unsqueeze(1))
    return weights.view(heads, length, length)
