"""Stand-ins for the functions of other libraries, over `hal`'s oracle in float64.

Each takes the arguments that its library documents and does what it documents with them.
"""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from hal import reference
from hal.interfaces import Gate
from hal.model.spec import GateKind
from hal.testing.rows import i32


def _rule(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
    scale: float, starts: Tensor, bounds: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs and last states of rows that start from `starts` `[B, HV, V, K]`."""
    rows = range(1, len(starts) + 1)
    pool = torch.cat((torch.zeros_like(starts[:1]), starts))
    out, new = reference.delta_rule_prefill(
        q, k, v, a, b, Gate(GateKind.SCALAR, A_log, dt_bias), pool, i32(*rows), i32(*rows), bounds,
        int(bounds.diff().max()),
    )  # fmt: skip
    return out * scale * q.shape[-1] ** 0.5, new[1:]


def _tokens(rows: int) -> Tensor:
    return torch.arange(rows + 1)


def fla_recurrent(
    *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor,
    scale: float, initial_state: Tensor, output_final_state: bool, state_v_first: bool,
    use_qk_l2norm_in_kernel: bool, use_gate_in_kernel: bool, use_beta_sigmoid_in_kernel: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q `[B, 1, H, K]`, g and beta `[B, 1, HV]`, states `[B, HV, V, K]`; a new state is made."""
    flags = (output_final_state, state_v_first, use_qk_l2norm_in_kernel, use_gate_in_kernel)
    assert all((*flags, use_beta_sigmoid_in_kernel))
    flat = [t.squeeze(1) for t in (q, k, v, g, beta)]
    out, states = _rule(*flat, A_log, dt_bias, scale, initial_state, _tokens(len(q)))
    return out.to(q.dtype).unsqueeze(1), states.float()


def fla_chunk(
    *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor,
    scale: float, cu_seqlens: Tensor, cu_seqlens_cpu: Tensor, output_final_state: bool,
    state_v_first: bool, use_qk_l2norm_in_kernel: bool, use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool, initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q `[1, T, H, K]` with int64 bounds on the device and on the host."""
    flags = (output_final_state, state_v_first, use_qk_l2norm_in_kernel, use_gate_in_kernel)
    assert all((*flags, use_beta_sigmoid_in_kernel))
    assert cu_seqlens.dtype == torch.int64
    assert torch.equal(cu_seqlens.cpu(), cu_seqlens_cpu)
    flat = [t.squeeze(0) for t in (q, k, v, g, beta)]
    if initial_state is None:
        initial_state = torch.zeros(len(cu_seqlens) - 1, v.shape[2], v.shape[3], q.shape[3])
    out, states = _rule(*flat, A_log, dt_bias, scale, initial_state, cu_seqlens)
    return out.to(q.dtype).unsqueeze(0), states.float()


def fla_conv_update(
    x: Tensor, cache: Tensor, *, weight: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """x `[B, D]`, cache `[B, D, W]`, which moves on in place."""
    slots = i32(*range(len(x)))
    out, new = reference.conv_decode(
        x, weight, None, cache[..., 1:].clone(), slots, slots, i32(*[9] * len(x)),
        activation=activation,
    )  # fmt: skip
    cache.copy_(torch.cat((cache[..., 1:2], new.to(cache.dtype)), -1))
    return out.to(x.dtype), cache


def state_update(
    *, state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: None,
    dt_bias: Tensor, dt_softplus: bool, state_batch_indices: Tensor, out: Tensor | None = None,
    algorithm: str = "auto",
) -> Tensor:  # fmt: skip
    """dt, D and dt_bias spread over a head, A over head and state; the pool moves on in place."""
    assert dt_softplus
    assert all(t.stride(-1) == 0 for t in (dt, D, dt_bias, A))
    result, new = reference.scan_decode(
        x, dt[..., 0], A[:, 0, 0], B, C, D[:, 0], dt_bias[:, 0], z, state.clone(),
        state_batch_indices, state_batch_indices,
    )  # fmt: skip
    state.copy_(new)
    return result.to(x.dtype) if out is None else out.copy_(result)


def flashinfer_decode(
    *, q: Tensor, k: Tensor, v: Tensor, state: None, A_log: Tensor, a: Tensor, dt_bias: Tensor,
    b: Tensor, scale: float, output: Tensor, use_qk_l2norm: bool, initial_state: Tensor,
    initial_state_indices: Tensor,
) -> Tensor:  # fmt: skip
    """q `[B, 1, H, K]`, a and b `[B, 1, HV]`, a pool `[S, HV, V, K]` by slot."""
    assert use_qk_l2norm
    flat = [t.squeeze(1) for t in (q, k, v, a, b)]
    held = initial_state[initial_state_indices.long()]
    out, states = _rule(*flat, A_log, dt_bias, scale, held, _tokens(len(q)))
    initial_state[initial_state_indices.long()] = states.float()
    return output.copy_(out.unsqueeze(1))


def sglang_packed(
    *, mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, scale: float,
    use_qk_l2norm_in_kernel: bool, initial_state: Tensor, ssm_state_indices: Tensor, out: Tensor,
) -> Tensor:  # fmt: skip
    """mixed `[B, (2 H K + HV V)]`; heads are read off the states and the result."""
    assert use_qk_l2norm_in_kernel
    HV, V, K = initial_state.shape[1:]
    keys = (mixed_qkv.shape[1] - HV * V) // 2
    q, k, v = mixed_qkv.split([keys, keys, HV * V], 1)
    parts = (q.unflatten(1, (-1, K)), k.unflatten(1, (-1, K)), v.unflatten(1, (HV, V)))
    slots = ssm_state_indices.long()
    made, states = _rule(*parts, a, b, A_log, dt_bias, scale, initial_state[slots],
                         _tokens(len(a)))  # fmt: skip
    initial_state[slots] = states.float()
    return out.copy_(made.unsqueeze(1))


def sglang_conv_update(
    x: Tensor, pool: Tensor, weight: Tensor, bias: None, activation: str, *,
    conv_state_indices: Tensor,
) -> Tensor:  # fmt: skip
    """x `[B, D]`, pool `[S, D, W-1]`."""
    starts = torch.full_like(conv_state_indices, 9)
    out, new = reference.conv_decode(
        x, weight, bias, pool.clone(), conv_state_indices, conv_state_indices, starts,
        activation=activation,
    )  # fmt: skip
    pool.copy_(new)
    return out.to(x.dtype)


def sglang_conv(
    x: Tensor, weight: Tensor, bias: None, pool: Tensor, bounds: Tensor, lengths: list[int], *,
    activation: str | None, cache_indices: Tensor, has_initial_state: Tensor,
) -> Tensor:  # fmt: skip
    """x `[D, T]`, channels first."""
    assert bool(has_initial_state.all())
    assert bounds.diff().tolist() == lengths
    starts = torch.full_like(cache_indices, 9)
    out, new = reference.conv_prefill(
        x.t(), weight, bias, pool.clone(), cache_indices, cache_indices, starts, bounds,
        max(lengths), activation=activation,
    )  # fmt: skip
    pool.copy_(new)
    return out.to(x.dtype).t()


def lfm_decode(
    B: Tensor, C: Tensor, x: Tensor, weight: Tensor, pool: Tensor, slots: Tensor
) -> Tensor:
    """Gates as slices of one projection."""
    bounds = torch.arange(len(x) + 1, dtype=torch.int32)
    return lfm_prefill(B, C, x, weight, pool, bounds, slots, torch.ones(len(x)).bool(), 1)


def lfm_prefill(
    B: Tensor, C: Tensor, x: Tensor, weight: Tensor, pool: Tensor, bounds: Tensor, slots: Tensor,
    has: Tensor, longest: int,
) -> Tensor:  # fmt: skip
    """C * Conv(B * x)."""
    assert all(t.stride(0) == 3 * x.shape[1] for t in (B, C, x))
    assert bool(has.all())
    starts = torch.full_like(slots, 9)
    out, new = reference.conv_prefill(
        (B.double() * x.double()), weight, None, pool.clone(), slots, slots, starts, bounds, longest
    )
    pool.copy_(new)
    return (C.double() * out).to(x.dtype)


_SGLANG = "sglang.kernels.ops."
FUNCTIONS: dict[str, dict[str, Any]] = {
    "fla.ops.gated_delta_rule": {
        "fused_recurrent_gated_delta_rule": fla_recurrent,
        "chunk_gated_delta_rule": fla_chunk,
    },
    "fla.modules.causal_conv1d": {"causal_conv1d_update": fla_conv_update},
    "mamba_ssm.ops.triton.selective_state_update": {"selective_state_update": state_update},
    "flashinfer.gdn_decode": {"gated_delta_rule_decode_pretranspose": flashinfer_decode},
    "flashinfer.mamba.selective_state_update": {"selective_state_update": state_update},
    f"{_SGLANG}attention.fla.fused_recurrent": {
        "fused_recurrent_gated_delta_rule_packed_decode": sglang_packed
    },
    f"{_SGLANG}mamba.causal_conv1d_triton": {
        "causal_conv1d_update": sglang_conv_update,
        "causal_conv1d_fn": sglang_conv,
    },
    f"{_SGLANG}mamba.lfm_short_conv": {
        "fused_lfm_short_conv_decode": lfm_decode,
        "fused_lfm_short_conv_prefill": lfm_prefill,
    },
    f"{_SGLANG}mamba.triton_ops.mamba_ssm": {"selective_state_update": state_update},
}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the functions importable by their libraries' names."""
    import sys

    for path, functions in FUNCTIONS.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in sys.modules or end == len(parts):
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        for each, function in functions.items():
            setattr(sys.modules[path], each, function)
