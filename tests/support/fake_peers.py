"""Stand-ins for the functions of other libraries, over `hal`'s oracle in float64.

Each takes the arguments that its library documents and does what it documents with them.
"""

from itertools import pairwise
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
    scale: float, starts: Tensor, bounds: Tensor, kind: GateKind = GateKind.SCALAR,
    bound: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs and last states of rows that start from `starts` `[B, HV, V, K]`."""
    rows = range(1, len(starts) + 1)
    pool = torch.cat((torch.zeros_like(starts[:1]), starts))
    out, new = reference.delta_rule_prefill(
        q, k, v, a, b, Gate(kind, A_log, dt_bias, bound), pool, i32(*rows), i32(*rows), bounds,
        int(bounds.diff().max()),
    )  # fmt: skip
    return out * scale * q.shape[-1] ** 0.5, new[1:]


def _kda(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
    scale: float, starts: Tensor, bounds: Tensor, lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same with a gate a channel, whose bias comes flat; with a bound it is a safe one."""
    law = A_log.flatten(), dt_bias.view(q.shape[1], -1)
    kind = GateKind.CHANNEL if lower_bound is None else GateKind.SAFE
    return _rule(q, k, v, a, b, *law, scale, starts, bounds, kind, lower_bound)


def _ready(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, scale: float, pool: Tensor,
    slots: Tensor, bounds: Tensor,
) -> Tensor:  # fmt: skip
    """The rule on a log decay and a beta that are made, in place by slot."""
    out, new = reference.delta_rule_prefill(
        q, k, v, decay, beta, None, pool.clone(), slots, slots, bounds, int(bounds.diff().max())
    )
    pool.copy_(new)
    return out * scale * q.shape[-1] ** 0.5


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


def flash_kda(
    *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, out: Tensor,
    A_log: Tensor, dt_bias: Tensor, lower_bound: float, initial_state: Tensor,
    final_state: Tensor, cu_seqlens: Tensor,
) -> None:  # fmt: skip
    """Packed `[1, T, ...]`, dt_bias `[H, K]`, int64 bounds; fills `out` and the last states."""
    assert cu_seqlens.dtype == torch.int64
    assert dt_bias.ndim == 2
    assert all(t.is_contiguous() for t in (q, k, v, g, beta, out, initial_state, final_state))
    flat = [t.squeeze(0) for t in (q, k, v, g, beta)]
    made, states = _kda(*flat, A_log, dt_bias, scale, initial_state, cu_seqlens, lower_bound)
    out.copy_(made.unsqueeze(0))
    final_state.copy_(states)


def _flags(named: dict[str, Any], *names: str) -> None:
    for name in names:
        assert named.pop(name) is True, name


_IN_KERNEL = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel",
              "output_final_state", "state_v_first")  # fmt: skip


def fla_kda_recurrent(
    *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor,
    scale: float, initial_state: Tensor, lower_bound: float | None = None, **flags: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """g `[B, 1, H, K]`, dt_bias `[H * K]`."""
    _flags(flags, *_IN_KERNEL)
    assert not flags
    assert dt_bias.ndim == 1
    flat = [t.squeeze(1) for t in (q, k, v, g, beta)]
    out, states = _kda(*flat, A_log, dt_bias, scale, initial_state, _tokens(len(q)), lower_bound)
    return out.to(q.dtype).unsqueeze(1), states.float()


def fla_kda_chunk(
    *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor,
    scale: float, cu_seqlens: Tensor, cu_seqlens_cpu: Tensor, initial_state: Tensor,
    safe_gate: bool = False, lower_bound: float | None = None, **flags: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same packed, `[1, T, ...]`, with int64 bounds."""
    _flags(flags, *_IN_KERNEL)
    assert not flags
    assert safe_gate == (lower_bound is not None)
    assert dt_bias.ndim == 1
    assert cu_seqlens.dtype == torch.int64
    assert torch.equal(cu_seqlens.cpu(), cu_seqlens_cpu)
    flat = [t.squeeze(0) for t in (q, k, v, g, beta)]
    out, states = _kda(*flat, A_log, dt_bias, scale, initial_state, cu_seqlens, lower_bound)
    return out.to(q.dtype).unsqueeze(0), states.float()


def sglang_kda_packed(
    mixed_qkv: Tensor, *, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, scale: float,
    use_qk_l2norm_in_kernel: bool, initial_state: Tensor, ssm_state_indices: Tensor, out: Tensor,
    lower_bound: float | None = None,
) -> Tensor:  # fmt: skip
    """a `[B, H * K]`, b `[B, H]`; heads are read off the states."""
    assert use_qk_l2norm_in_kernel
    heads = initial_state.shape[1]
    q, k, v = (t.unflatten(1, (heads, -1)) for t in mixed_qkv.chunk(3, 1))
    slots = ssm_state_indices.long()
    made, states = _kda(q, k, v, a.view(q.shape), b, A_log, dt_bias, scale, initial_state[slots],
                        _tokens(len(a)), lower_bound)  # fmt: skip
    initial_state[slots] = states.float()
    return out.copy_(made.unsqueeze(1))


def sglang_kda_chunk(
    *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor,
    scale: float, initial_state: Tensor, initial_state_indices: Tensor, cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool, beta_is_raw: bool, lower_bound: float | None = None,
) -> Tensor:  # fmt: skip
    """A_log `[1, 1, H, 1]`; the pool moves on in place, and the result lies over v."""
    assert use_qk_l2norm_in_kernel
    assert beta_is_raw
    assert A_log.shape == (1, 1, q.shape[2], 1)
    slots = initial_state_indices.long()
    flat = [t.squeeze(0) for t in (q, k, v, g, beta)]
    out, states = _kda(*flat, A_log, dt_bias, scale, initial_state[slots], cu_seqlens, lower_bound)
    initial_state[slots] = states.float()
    return v.copy_(out.unsqueeze(0))


def sglang_chunk(
    *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float,
    initial_state: Tensor, initial_state_indices: Tensor, cu_seqlens: Tensor, head_first: bool,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[Tensor, None, None]:  # fmt: skip
    """g is a log decay in float32; the pool moves on in place."""
    assert use_qk_l2norm_in_kernel
    assert not head_first
    assert g.dtype == beta.dtype == torch.float32
    flat = [t.squeeze(0) for t in (q, k, v, g, beta)]
    out = _ready(*flat, scale, initial_state, initial_state_indices, cu_seqlens)
    return out.to(q.dtype).unsqueeze(0), None, None


def flashinfer_prefill(
    *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float,
    initial_state: Tensor, output_state: Tensor, state_indices: Tensor, output_final_state: bool,
    cu_seqlens: Tensor, use_qk_l2norm_in_kernel: bool, output: Tensor, max_seqlen: int,
    use_cp: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """g is the decay itself, packed tokens `[T, ...]`, states by slot."""
    assert output_final_state
    assert use_qk_l2norm_in_kernel
    assert use_cp == "auto"
    assert output_state is initial_state
    assert max_seqlen == int(cu_seqlens.diff().max())
    out = _ready(q, k, v, g.double().log(), beta, scale, initial_state, state_indices, cu_seqlens)
    return output.copy_(out), output_state


def sglang_verify(
    *, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
    softplus_beta: float, softplus_threshold: float, scale: float, use_qk_l2norm_in_kernel: bool,
    initial_state_source: Tensor, initial_state_indices: Tensor, disable_state_update: bool,
    cu_seqlens: Tensor, intermediate_states_buffer: Tensor, intermediate_state_indices: Tensor,
    cache_steps: int,
) -> Tensor:  # fmt: skip
    """The pool stays; the state after each token of row i goes to `buffer[indices[i], t]`."""
    assert use_qk_l2norm_in_kernel
    assert disable_state_update
    assert (softplus_beta, softplus_threshold) == (1.0, 20.0)
    bounds, outs = cu_seqlens.tolist(), []
    for row, (begin, end) in enumerate(pairwise(bounds)):
        state = initial_state_source[initial_state_indices[row]][None]
        for t in range(begin, end):
            one = [x[0, t : t + 1] for x in (q, k, v)] + [x[t : t + 1] for x in (a, b)]
            out, state = _rule(*one, A_log, dt_bias, scale, state, _tokens(1))
            intermediate_states_buffer[intermediate_state_indices[row], t - begin] = state[0]
            outs.append(out)
    assert cache_steps == intermediate_states_buffer.shape[1]
    return torch.cat(outs).to(v.dtype).unsqueeze(0)


def sglang_accept(pool: Tensor, kept: Tensor, slots: Tensor, last: Tensor, rows: Tensor) -> None:
    """`pool[:, slots[i]] = kept[:, rows[i], last[i]]` of every layer."""
    pool[:, slots.long()] = kept[:, rows.long(), last.long()]


def scan_rows(
    *, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor,
    chunk_size: int, initial_states: Tensor, dt_softplus: bool, return_final_states: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Equal rows `[B, T, ...]` from states `[B, H, P, N]`."""
    assert dt_softplus
    assert return_final_states
    assert chunk_size == 256
    rows, length = x.shape[:2]
    bounds = torch.arange(rows + 1, dtype=torch.int32) * length
    flat = [t.flatten(0, 1) for t in (x, dt)]
    groups = [t.flatten(0, 1) for t in (B, C)]
    out, states = _scan(*flat, A, *groups, D, dt_bias, initial_states, bounds)
    return out.to(x.dtype).unflatten(0, (rows, length)), states.float()


def scan_packed(
    *, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor,
    z: None, chunk_size: int, seq_idx: Tensor, cu_seqlens: Tensor, chunk_indices: Tensor,
    chunk_offsets: Tensor, initial_states: Tensor, dt_softplus: bool, return_final_states: bool,
    return_varlen_states: bool, out: Tensor, state_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Packed rows `[1, T, ...]`; pieces begin where a chunk or a row does."""
    assert dt_softplus
    assert return_varlen_states
    assert not return_final_states
    bounds = cu_seqlens.tolist()
    begins = (chunk_indices * chunk_size + chunk_offsets).tolist()
    assert begins == sorted({*range(0, bounds[-1], chunk_size), *bounds[:-1]})
    assert all(t.is_contiguous() for t in (chunk_indices, chunk_offsets, seq_idx, cu_seqlens))
    assert seq_idx.squeeze(0).bincount().tolist() == cu_seqlens.diff().tolist()
    flat = [t.squeeze(0) for t in (x, dt)]
    groups = [t.squeeze(0) for t in (B, C)]
    made, states = _scan(*flat, A, *groups, D, dt_bias, initial_states, cu_seqlens)
    out.copy_(made.unsqueeze(0))
    return states.to(state_dtype)


def _scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor,
    starts: Tensor, bounds: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows = i32(*range(1, len(starts) + 1))
    pool = torch.cat((torch.zeros_like(starts[:1]), starts))
    out, new = reference.scan_prefill(x, dt, A, B, C, D, dt_bias, None, pool, rows, rows, bounds,
                                      int(bounds.diff().max()))  # fmt: skip
    return out, new[1:]


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


def flashinfer_state_update(*, dt: Tensor, D: Tensor, dt_bias: Tensor, **rest: Any) -> Tensor:
    """The same, where dt, D and dt_bias share a dtype."""
    assert dt.dtype == D.dtype == dt_bias.dtype
    return state_update(dt=dt, D=D, dt_bias=dt_bias, **rest)


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
    mixed_qkv: Tensor, *, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, scale: float,
    use_qk_l2norm_in_kernel: bool, initial_state: Tensor, ssm_state_indices: Tensor, out: Tensor,
) -> Tensor:  # fmt: skip
    """mixed `[B, (2 H K + HV V)]`; heads are read off the states; beta is rounded as b is."""
    assert use_qk_l2norm_in_kernel
    HV, V, K = initial_state.shape[1:]
    keys = (mixed_qkv.shape[1] - HV * V) // 2
    q, k, v = mixed_qkv.split([keys, keys, HV * V], 1)
    parts = (q.unflatten(1, (-1, K)), k.unflatten(1, (-1, K)), v.unflatten(1, (HV, V)))
    slots = ssm_state_indices.long()
    rounded = b.double().sigmoid().to(b.dtype).double().logit()
    made, states = _rule(*parts, a, rounded, A_log, dt_bias, scale, initial_state[slots],
                         _tokens(len(a)))  # fmt: skip
    initial_state[slots] = states.float()
    return out.copy_(made.unsqueeze(1))


def sglang_conv_update(
    x: Tensor, pool: Tensor, weight: Tensor, bias: None, activation: str, *,
    conv_state_indices: Tensor,
) -> Tensor:  # fmt: skip
    """x `[B, D]`, over which the result is written, pool `[S, D, W-1]`."""
    starts = torch.full_like(conv_state_indices, 9)
    out, new = reference.conv_decode(
        x, weight, bias, pool.clone(), conv_state_indices, conv_state_indices, starts,
        activation=activation,
    )  # fmt: skip
    pool.copy_(new)
    return x.copy_(out)


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
    "fla.ops.kda": {"fused_recurrent_kda": fla_kda_recurrent, "chunk_kda": fla_kda_chunk},
    "flash_kda": {"fwd": flash_kda},
    "fla.modules.causal_conv1d": {"causal_conv1d_update": fla_conv_update},
    "mamba_ssm.ops.triton.selective_state_update": {"selective_state_update": state_update},
    "mamba_ssm.ops.triton.ssd_combined": {"mamba_chunk_scan_combined": scan_rows},
    "flashinfer.gdn_prefill": {"chunk_gated_delta_rule": flashinfer_prefill},
    "flashinfer.gdn_decode": {"gated_delta_rule_decode_pretranspose": flashinfer_decode},
    "flashinfer.mamba.selective_state_update": {"selective_state_update": flashinfer_state_update},
    f"{_SGLANG}attention.fla.fused_recurrent": {
        "fused_recurrent_gated_delta_rule_packed_decode": sglang_packed,
        "fused_recurrent_kda_packed_decode": sglang_kda_packed,
    },
    f"{_SGLANG}attention.fla.chunk": {"chunk_gated_delta_rule": sglang_chunk},
    f"{_SGLANG}attention.fla.kda": {"chunk_kda": sglang_kda_chunk},
    f"{_SGLANG}attention.linear.fused_sigmoid_gating_recurrent": {
        "fused_sigmoid_gating_delta_rule_update": sglang_verify
    },
    f"{_SGLANG}mamba.mamba_state_scatter_triton": {
        "fused_mamba_state_scatter_with_mask": sglang_accept
    },
    f"{_SGLANG}mamba.triton_ops.ssd_combined": {"mamba_chunk_scan_combined": scan_packed},
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
