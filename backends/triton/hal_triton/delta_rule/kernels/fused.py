"""Decode with its convolution: conv, split, norms, gates, recurrence and gated norm in one launch.

Every value tile of a key head, and every value head that shares it, reads the same q and k
channels of the conv window, and programs have no barrier between them. A ring of W rows keeps that
free of races: programs read rows that nobody writes and write the row that nobody reads.
"""

# ruff: noqa: ANN201
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl

from hal_triton.delta_rule.kernels.step import advance, read_gates, unit
from hal_triton.kernels.math import sigmoid


@triton.jit
def _conv(
    x, weight, bias, old, new, start, cs, ok, slot, last, owner, w_c, w_j, s_j,
    W: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATE: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """The conv of channels `cs` of one token; the owner of these channels writes the ring."""
    newest = tl.load(x + cs, mask=ok, other=0.0)
    y = newest.to(tl.float32) * tl.load(weight + cs * w_c + (W - 1) * w_j, mask=ok, other=0.0).to(
        tl.float32
    )
    if HAS_BIAS:
        y += tl.load(bias + cs, mask=ok, other=0.0).to(tl.float32)
    keep = ok & owner & (last >= 0)
    for j in tl.static_range(W - 1):
        row = (start + 1 + j) % W
        past = tl.load(old + row * s_j + cs, mask=ok & (slot >= 0), other=0.0)
        y += past.to(tl.float32) * tl.load(weight + cs * w_c + j * w_j, mask=ok, other=0.0).to(
            tl.float32
        )
        if j > 0:
            tl.store(new + row * s_j + cs, past, mask=keep & (slot != last))
    tl.store(new + (start % W) * s_j + cs, newest.to(new.dtype.element_ty), mask=keep)
    if ACTIVATE:
        y = SILU(y)
    return y


@triton.jit
def delta_decode_fused(
    x, a, b, weight, bias, A_log, dt_bias, conv_state, state, src, dst, start_at, z, norm, out,
    x_t, a_t, a_h, b_t, w_c, w_j, c_slot, c_j, s_slot, s_h, s_v, s_k, z_t, z_h, out_t, out_h,
    scale, beta_scale, lower_bound, eps,
    HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATE: tl.constexpr,
    GATE: tl.constexpr, CHANNEL: tl.constexpr, L2: tl.constexpr, NORM: tl.constexpr,
    SILU: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Advance one tile of one row; with NORM the tile is the whole head."""
    tiles: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    head, row = (pid // tiles) % HV, (pid // (tiles * HV)).to(tl.int64)
    ks, vs = tl.arange(0, BK), (pid % tiles) * BV + tl.arange(0, BV)
    k_ok, v_ok = ks < K, vs < V
    slot, last = tl.load(src + row).to(tl.int64), tl.load(dst + row).to(tl.int64)
    start = tl.load(start_at + row)
    to = out + row * out_t + head * out_h + vs
    if (slot >= 0) | (last >= 0):
        at = head.to(tl.int64) * s_h + (vs[:, None] * s_v + ks[None, :] * s_k)
        ok = v_ok[:, None] & k_ok[None, :]
        S = tl.load(state + slot * s_slot + at, mask=ok & (slot >= 0), other=0.0,
                    eviction_policy=EVICT).to(tl.float32)  # fmt: skip
        k_head, H = head // R, HV // R
        old, new, token = conv_state + slot * c_slot, conv_state + last * c_slot, x + row * x_t
        owner = (pid % tiles == 0) & (head % R == 0)
        q = _conv(token, weight, bias, old, new, start, k_head * K + ks, k_ok, slot, last, owner,
                  w_c, w_j, c_j, W, HAS_BIAS, ACTIVATE, SILU)  # fmt: skip
        k = _conv(token, weight, bias, old, new, start, (H + k_head) * K + ks, k_ok, slot, last,
                  owner, w_c, w_j, c_j, W, HAS_BIAS, ACTIVATE, SILU)  # fmt: skip
        v = _conv(token, weight, bias, old, new, start, 2 * H * K + head * V + vs, v_ok, slot, last,
                  True, w_c, w_j, c_j, W, HAS_BIAS, ACTIVATE, SILU)  # fmt: skip
        decay, beta = read_gates(
            a + row * a_t + head * a_h, b + row * b_t + head, A_log, dt_bias, head, ks, k_ok,
            lower_bound, beta_scale, GATE, CHANNEL, K,
        )  # fmt: skip
        S, o = advance(S, unit(q, scale, L2), unit(k, 1.0, L2), v, decay, beta, CHANNEL)
        if NORM:
            o = o / tl.sqrt(tl.sum(o * o, 0) / V + eps)
            o *= tl.load(norm + vs, mask=v_ok, other=0.0).to(tl.float32)
            gate = tl.load(z + row * z_t + head * z_h + vs, mask=v_ok, other=0.0).to(tl.float32)
            o *= sigmoid(gate) if CHANNEL else gate * sigmoid(gate)
        tl.store(to, o.to(out.dtype.element_ty), mask=v_ok)
        tl.store(state + last * s_slot + at, S.to(state.dtype.element_ty), mask=ok & (last >= 0),
                 eviction_policy=EVICT)  # fmt: skip
    else:
        tl.store(to, tl.zeros((BV,), out.dtype.element_ty), mask=v_ok)
