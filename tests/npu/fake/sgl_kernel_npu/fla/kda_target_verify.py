"""A fixed number of steps a row with channel gates, and the state after each."""

import torch
from torch import Tensor
from torch.nn.functional import softplus


def kda_target_verify_npu(
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    intermediate_states_buffer: Tensor,
    intermediate_state_indices: Tensor,
    cache_steps: int,
    scale: float | None = None,
    gates_are_preactivated: bool | None = None,
    lower_bound: float | None = None,
) -> Tensor:
    """q, k `[1, B*T, H, K]`, v `[1, B*T, HV, V]`; pool `[slots, HV, V, K]` of any strides, read.

    Every row is computed, those without a slot from zeros; q and k are divided by their length.
    """
    ready = a.ndim == 4 if gates_are_preactivated is None else gates_are_preactivated
    _check(q, k, v, a, b, cache_steps)
    a, b = (x.squeeze(0) if x.ndim > dims else x for x, dims in ((a, 3), (b, 2)))
    _check_gates(A_log, dt_bias, q, k, v, a, b, ready, lower_bound)
    source, snapshots = initial_state_source, intermediate_states_buffer
    indices = (initial_state_indices, intermediate_state_indices)
    _check_states(source, snapshots, indices, q, v, cache_steps)
    heads = v.shape[2]
    decay, beta = _gates(A_log, dt_bias, a, b, ready, lower_bound)
    decay = decay.repeat_interleave(heads // decay.shape[1], 1)
    q, k = (
        (x / (x.norm(dim=-1, keepdim=True) + 1e-6)).repeat_interleave(heads // x.shape[1], 1)
        for x in (q[0].float(), k[0].float())
    )
    q = q * (q.shape[2] ** -0.5 if scale is None else scale)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    rows = zip(*(index.tolist() for index in indices), strict=True)
    for row, (slot, place) in enumerate(rows):
        state = source[slot].float().clone() if slot >= 0 else torch.zeros_like(source[0]).float()
        for step in range(cache_steps):
            t = row * cache_steps + step
            state = state * decay[t].exp()[:, None]
            update = beta[t, :, None] * (v[0, t].float() - (state * k[t][:, None]).sum(2))
            state = state + update[:, :, None] * k[t][:, None]
            out[0, t] = (state * q[t][:, None]).sum(2)
            if place >= 0:
                snapshots[place, step] = state
    return out


def _gates(
    A_log: Tensor, dt_bias: Tensor, a: Tensor, b: Tensor, ready: bool, bound: float | None
) -> tuple[Tensor, Tensor]:
    if ready:
        return a.float(), b.float()
    raw = a.float() + dt_bias.view(a.shape[1:])
    rate = A_log.exp().view(-1, 1)
    decay = -rate * softplus(raw) if bound is None else bound * (rate * raw).sigmoid()
    return decay, b.float().sigmoid()


def _check(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, steps: int) -> None:
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError("q, k, and v must have shape [1, tokens, heads, dim]")
    if not q.shape[0] == k.shape[0] == v.shape[0] == 1:
        raise ValueError("the leading q, k, and v dimension must be one")
    if steps <= 0 or q.shape[1] % steps:
        raise ValueError("tokens must be divisible by positive cache_steps")
    if not q.shape[1] == k.shape[1] == v.shape[1]:
        raise ValueError("q, k, and v token dimensions must match")
    if (a.ndim == 4) != (b.ndim == 3):
        raise ValueError("a and b must use the leading singleton together")
    if q.shape[3] != k.shape[3]:
        raise ValueError("q and k key dimensions must match")
    if v.shape[2] % q.shape[2] or v.shape[2] % k.shape[2]:
        raise ValueError("value heads must be divisible by q and k heads")
    if q.shape[3] > 256:
        raise ValueError("key dimensions greater than 256 are unsupported")


def _check_gates(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    ready: bool,
    bound: float | None,
) -> None:
    tokens, keys, dim = k.shape[1:]
    if a.shape != (tokens, keys, dim):
        raise ValueError("a must have shape [tokens, H_k, K]")
    if b.shape != (tokens, v.shape[2]):
        raise ValueError("b must have shape [tokens, H_v]")
    if not ready and (A_log.numel() != keys or dt_bias.numel() != keys * dim):
        raise ValueError("A_log and dt_bias shapes do not match KDA heads")
    if ready and bound is not None:
        raise ValueError("lower_bound must already be reflected in preactivated gates")


def _check_states(
    source: Tensor,
    snapshots: Tensor,
    indices: tuple[Tensor, Tensor],
    q: Tensor,
    v: Tensor,
    steps: int,
) -> None:
    heads, (value, key) = v.shape[2], (v.shape[3], q.shape[3])
    if source.shape[1:] != (heads, value, key):
        raise ValueError("initial state must have shape [pool, H_v, V, K]")
    if snapshots.shape[1:] != (steps, heads, value, key):
        raise ValueError("intermediate state must have shape [scratch, T, H_v, V, K]")
    if source.dtype != snapshots.dtype:
        raise ValueError("persistent and intermediate state dtypes must match")
    for index in indices:
        if index.ndim != 1 or index.numel() < q.shape[1] // steps:
            raise ValueError("state indices must contain at least B entries")
        if index.dtype not in (torch.int32, torch.int64):
            raise ValueError("state indices must be int32 or int64")
