"""Decode with its convolution: conv, split, norms, gates, recurrence and gated norm in one launch.

Every value tile of a key head, and every value head that shares it, reads the same q and k
channels of the conv window, and programs have no barrier between them. A ring of W rows keeps that
free of races: programs read rows that nobody writes and write the row that nobody reads.

Nothing is stored before everything is loaded: a store that waits for its value holds back every
load behind it, so that one memory latency would become one for each row of the ring.
"""

# ruff: noqa: ANN201
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl

from hal_triton.delta_rule.kernels.step import advance, read_gates, unit
from hal_triton.kernels.chain import chain
from hal_triton.kernels.math import inverse_rms, sigmoid


@triton.jit
def _conv(
    x, weight, bias, ring, start, cs, ok, has_old, w_c, w_j, s_j,
    W: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATE: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """The conv of channels `cs` of one token, and the token's own inputs; loads alone."""
    newest = tl.load(x + cs, mask=ok, other=0.0)
    tap = tl.load(weight + cs * w_c + (W - 1) * w_j, mask=ok, other=0.0)
    y = newest.to(tl.float32) * tap.to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias + cs, mask=ok, other=0.0).to(tl.float32)
    for j in tl.static_range(W - 1):
        past = tl.load(ring + ((start + 1 + j) % W) * s_j + cs, mask=ok & has_old, other=0.0)
        tap = tl.load(weight + cs * w_c + j * w_j, mask=ok, other=0.0)
        y += past.to(tl.float32) * tap.to(tl.float32)
    if ACTIVATE:
        y = SILU(y)
    return y, newest


@triton.jit
def _keep(newest, old, new, start, cs, ok, has_old, moves, s_j, W: tl.constexpr):
    """Store the token's inputs in the free row; a row that `moves` takes its window along."""
    tl.store(new + (start % W) * s_j + cs, newest.to(new.dtype.element_ty), mask=ok)
    if moves:
        for j in tl.static_range(1, W - 1):
            at = ((start + 1 + j) % W) * s_j + cs
            past = tl.load(old + at, mask=ok & has_old, other=0.0)
            tl.store(new + at, past, mask=ok)


@triton.jit
def delta_decode_fused(
    x, a, b, weight, bias, A_log, dt_bias, conv_state, state, src, dst, start_at, z, norm, out,
    x_t, a_t, a_h, b_t, w_c, w_j, c_slot, c_j, s_slot, s_h, z_t, z_h, out_t, out_h,
    scale, beta_scale, lower_bound, eps,
    s_v: tl.constexpr, s_k: tl.constexpr, HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, W: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATE: tl.constexpr, GATE: tl.constexpr, CHANNEL: tl.constexpr, L2: tl.constexpr,
    NORM: tl.constexpr, SILU: tl.constexpr, EVICT: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """Advance one tile of one row; with NORM the tile is the whole head.

    Strides within a head's state are constants, so that its addresses are one register.
    """
    chain(CHAIN)
    tiles: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    head, row = (pid // tiles) % HV, (pid // (tiles * HV)).to(tl.int64)
    ks, vs = tl.arange(0, BK), (pid % tiles) * BV + tl.arange(0, BV)
    k_ok = ks >= 0 if BK == K else ks < K
    v_ok = vs >= 0 if V % BV == 0 else vs < V
    slot, last = tl.load(src + row).to(tl.int64), tl.load(dst + row).to(tl.int64)
    start = tl.load(start_at + row)
    to = out + row * out_t + head * out_h + vs
    if (slot >= 0) | (last >= 0):
        at = head.to(tl.int64) * s_h + (vs[:, None] * s_v + ks[None, :] * s_k)
        ok = v_ok[:, None] & k_ok[None, :]
        S = tl.load(state + slot * s_slot + at, mask=ok & (slot >= 0), other=0.0,
                    eviction_policy=EVICT).to(tl.float32)  # fmt: skip
        k_head, H = head // R, HV // R
        q_at, k_at, v_at = k_head * K + ks, (H + k_head) * K + ks, 2 * H * K + head * V + vs
        old, new, token = conv_state + slot * c_slot, conv_state + last * c_slot, x + row * x_t
        q, q_in = _conv(token, weight, bias, old, start, q_at, k_ok, slot >= 0, w_c, w_j, c_j, W,
                        HAS_BIAS, ACTIVATE, SILU)  # fmt: skip
        k, k_in = _conv(token, weight, bias, old, start, k_at, k_ok, slot >= 0, w_c, w_j, c_j, W,
                        HAS_BIAS, ACTIVATE, SILU)  # fmt: skip
        v, v_in = _conv(token, weight, bias, old, start, v_at, v_ok, slot >= 0, w_c, w_j, c_j, W,
                        HAS_BIAS, ACTIVATE, SILU)  # fmt: skip
        decay, beta = read_gates(
            a + row * a_t + head * a_h, b + row * b_t + head, A_log, dt_bias, head, ks, k_ok,
            lower_bound, beta_scale, GATE, CHANNEL, K,
        )  # fmt: skip
        S, o = advance(S, unit(q, scale, L2), unit(k, 1.0, L2), v, decay, beta, CHANNEL)
        if NORM:
            o *= inverse_rms(o, V, eps, 0)
            o *= tl.load(norm + vs, mask=v_ok, other=0.0).to(tl.float32)
            gate = tl.load(z + row * z_t + head * z_h + vs, mask=v_ok, other=0.0).to(tl.float32)
            o *= sigmoid(gate) if CHANNEL else gate * sigmoid(gate)
        tl.store(to, o.to(out.dtype.element_ty), mask=v_ok)
        if last >= 0:
            tl.store(state + last * s_slot + at, S.to(state.dtype.element_ty), mask=ok,
                     eviction_policy=EVICT)  # fmt: skip
            moves = slot != last
            _keep(v_in, old, new, start, v_at, v_ok, slot >= 0, moves, c_j, W)
            if (pid % tiles == 0) & (head % R == 0):
                _keep(q_in, old, new, start, q_at, k_ok, slot >= 0, moves, c_j, W)
                _keep(k_in, old, new, start, k_at, k_ok, slot >= 0, moves, c_j, W)
    else:
        tl.store(to, tl.zeros((BV,), out.dtype.element_ty), mask=v_ok)
