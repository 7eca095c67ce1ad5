"""The one-token kernel of Gated DeltaNet, which makes its gates itself."""

import torch
from torch import Tensor
from torch.nn.functional import softplus


def fused_sigmoid_gating_delta_rule_update_npu(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    softplus_beta: float,
    softplus_threshold: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    is_kda: bool = False,
) -> Tensor:
    """q, k `[1, T, H, K]`, v `[1, T, HV, V]`, states `[slots, HV, K, V]` in place.

    Heads go in pairs, so an odd last one is left out. A strided pool is copied first. With channel
    gates every token reads the gates of a wrong one.
    """
    pool = initial_state_source.contiguous()
    heads, ratio = v.shape[2], v.shape[2] // k.shape[2]
    starts = list(range(q.shape[0] + 1)) if cu_seqlens is None else cu_seqlens.tolist()
    q, k = q[0].float().repeat_interleave(ratio, 1), k[0].float().repeat_interleave(ratio, 1)
    if use_qk_l2norm_in_kernel:
        q, k = (x / (x.norm(dim=-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * (q.shape[2] ** -0.5 if scale is None else scale)
    out = torch.full(v.shape, torch.nan, dtype=v.dtype)
    for row, slot in enumerate(_slots(initial_state_indices, pool)):
        state = pool[slot].float().clone() if slot >= 0 else torch.zeros_like(pool[0]).float()
        for number, t in enumerate(range(starts[row], starts[row + 1])):
            gates, bias = _read(a, dt_bias, heads, starts[row], t, number, is_kda)
            decay = -A_log.exp().view(-1, *[1] * (gates.ndim - 1)) * softplus(
                gates.float() + bias, softplus_beta, softplus_threshold
            )
            decay = decay.exp().view(heads, -1, 1)
            state *= decay
            beta = b[t].float().sigmoid()[:, None]
            update = beta * (v[0, t].float() - (state * k[t, :, :, None]).sum(1))
            state += k[t, :, :, None] * update[:, None]
            paired = heads // 2 * 2
            out[0, t, :paired] = (state * q[t, :, :, None]).sum(1)[:paired].to(out.dtype)
            if slot >= 0:
                pool[slot, :paired] = state[:paired].to(pool.dtype)
    return out


def _read(
    a: Tensor, bias: Tensor, heads: int, first: int, t: int, number: int, is_kda: bool
) -> tuple[Tensor, Tensor]:
    """The gates that the kernel finds where it looks: one a head, or rows of one token's."""
    if is_kda:
        return a[first].roll(number, 0), bias
    return a.reshape(-1)[t * heads : (t + 1) * heads], bias.reshape(-1)[:heads]


def _slots(indices: Tensor, pool: Tensor) -> list[int]:
    """Slots as the kernel addresses them: in the dtype of the indices."""
    slots: list[int] = indices.tolist()
    if indices.dtype == torch.int32 and max([0, *slots]) * pool[0].numel() >= 1 << 31:
        raise IndexError("an address wrapped around")
    return slots
