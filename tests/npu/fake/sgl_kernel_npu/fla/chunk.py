"""Prefill of Gated DeltaNet in chunks of 64 tokens."""

from itertools import pairwise

import torch
from torch import Tensor

CHUNK = 64
_SEEN: list[tuple[Tensor, list[int]]] = []
"""The last four bounds by identity, with the lengths that they had when they were first seen."""


def chunk_gated_delta_rule_npu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k `[1, T, H, K]`, v `[1, T, HV, V]`, states `[N, HV, K, V]`, of 16-bit activations.

    Above 128 a dim gives NaN, and so does an empty sequence in front of another.
    """
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype != torch.float32, "float32 is not supported"
    assert beta.ndim == 3, "beta must be of shape [B, T, H]"
    if head_first:
        raise DeprecationWarning("head_first is deprecated")
    if cu_seqlens is None:
        raise UnboundLocalError("cannot access local variable 'i_n'")
    if q.shape[0] != 1:
        raise ValueError(f"The batch size is expected to be 1 rather than {q.shape[0]}")
    starts = cu_seqlens.tolist()
    if initial_state is None or initial_state.shape[0] != len(starts) - 1:
        raise ValueError("The number of initial states is expected to be that of sequences")
    if g.dtype != torch.float32 or not all(t.is_contiguous() for t in (q, k, v, g, beta)):
        raise RuntimeError("the kernels read dense memory, and decay in float32")
    if len(starts) < 2 or starts[-1] == 0:
        raise RuntimeError("cannot reshape tensor of 0 elements")
    lengths = _cached_lengths(cu_seqlens, starts)
    if lengths != [e - b for b, e in pairwise(starts)]:
        raise IndexError("chunk indices of other bounds: a write behind the result")
    out = torch.full_like(v, torch.nan)
    ends = initial_state.float().clone()
    for row, length in enumerate(lengths):
        span = slice(starts[row], starts[row] + length)
        tokens = (t[0, span].float() for t in (q, k, v, g, beta))
        out[0, span] = _advance(*tokens, ends[row], scale, use_qk_l2norm_in_kernel)
    later = any(lengths[i] == 0 and any(lengths[i + 1 :]) for i in range(len(lengths)))
    if later or k.shape[3] > 128 or v.shape[3] > 128:
        out.fill_(torch.nan)
        ends.fill_(torch.nan)
    chunks = sum(-(-length // CHUNK) for length in lengths)
    return out, ends, torch.zeros(1, chunks, v.shape[2], k.shape[3], v.shape[3], dtype=k.dtype)


def _cached_lengths(bounds: Tensor, starts: list[int]) -> list[int]:
    for seen, lengths in _SEEN:
        if seen is bounds:
            return lengths
    lengths = [e - b for b, e in pairwise(starts)]
    _SEEN[:] = [*_SEEN[-3:], (bounds, lengths)]
    return lengths


def _advance(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    scale: float | None,
    norm: bool,
) -> Tensor:
    """Advance one sequence's state `[HV, K, V]` in place."""
    if norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    ratio = v.shape[1] // k.shape[1]
    q = q.repeat_interleave(ratio, 1) * (q.shape[2] ** -0.5 if scale is None else scale)
    k = k.repeat_interleave(ratio, 1)
    results = []
    for t in range(q.shape[0]):
        state *= g[t].exp()[:, None, None]
        update = beta[t, :, None] * (v[t] - (state * k[t, :, :, None]).sum(1))
        state += k[t, :, :, None] * update[:, None]
        results.append((state * q[t, :, :, None]).sum(1))
    return torch.stack(results) if results else v
