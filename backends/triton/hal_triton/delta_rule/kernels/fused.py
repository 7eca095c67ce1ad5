"""Decode with its convolution: conv, split, norms, gates, recurrence and gated norm in one launch.

Every value tile of a key head, and every value head that shares it, reads the same q and k
channels of the conv window, and programs have no barrier between them. A ring of W rows keeps that
free of races: programs read rows that nobody writes and write the row that nobody reads.

Nothing is stored before everything is loaded: a store that waits for its value holds back every
load behind it, so that one memory latency would become one for each row of the ring. For the same
reason the convs' loads all come before the first of their products. A tile's offsets are 32 bits
behind one base, which leaves registers for more programs on a multiprocessor.
"""

# ruff: noqa: ANN201, RUF005
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"

import triton
import triton.language as tl

from hal_triton.delta_rule.kernels.step import advance, read_gates, unit
from hal_triton.kernels.chain import chain
from hal_triton.kernels.math import inverse_rms, sigmoid


@triton.jit
def _inputs(
    x, weight, ring, start, cs, ok, has_old, w_c, w_j, s_j, W: tl.constexpr,
):  # fmt: skip
    """A token's inputs of channels `cs`, and pairs of an input and its tap, the newest first."""
    newest = tl.load(x + cs, mask=ok, other=0.0)
    pairs = (newest, tl.load(weight + cs * w_c + (W - 1) * w_j, mask=ok, other=0.0))
    for j in tl.static_range(W - 1):
        past = tl.load(ring + ((start + 1 + j) % W) * s_j + cs, mask=ok & has_old, other=0.0)
        pairs = pairs + (past, tl.load(weight + cs * w_c + j * w_j, mask=ok, other=0.0))
    return newest, pairs


@triton.jit
def _conv(
    pairs, bias, cs, ok, W: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATE: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """The sum of the inputs times their taps, in float32."""
    y = pairs[0].to(tl.float32) * pairs[1].to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias + cs, mask=ok, other=0.0).to(tl.float32)
    for j in tl.static_range(1, W):
        y += pairs[2 * j].to(tl.float32) * pairs[2 * j + 1].to(tl.float32)
    if ACTIVATE:
        y = SILU(y)
    return y


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
        tile = head.to(tl.int64) * s_h + (pid % tiles) * BV * s_v
        at = tl.arange(0, BV)[:, None] * s_v + ks[None, :] * s_k
        ok, has_old = v_ok[:, None] & k_ok[None, :], slot >= 0
        S = tl.load(state + (slot * s_slot + tile) + at, mask=ok & has_old, other=0.0,
                    eviction_policy=EVICT).to(tl.float32)  # fmt: skip
        k_head, H = head // R, HV // R
        q_at, k_at, v_at = k_head * K + ks, (H + k_head) * K + ks, 2 * H * K + head * V + vs
        old, new, token = conv_state + slot * c_slot, conv_state + last * c_slot, x + row * x_t
        q_in, qs = _inputs(token, weight, old, start, q_at, k_ok, has_old, w_c, w_j, c_j, W)
        k_in, kps = _inputs(token, weight, old, start, k_at, k_ok, has_old, w_c, w_j, c_j, W)
        v_in, vps = _inputs(token, weight, old, start, v_at, v_ok, has_old, w_c, w_j, c_j, W)
        decay, beta = read_gates(
            a + row * a_t + head * a_h, b + row * b_t + head, A_log, dt_bias, head, ks, k_ok,
            lower_bound, beta_scale, GATE, CHANNEL, K,
        )  # fmt: skip
        q = _conv(qs, bias, q_at, k_ok, W, HAS_BIAS, ACTIVATE, SILU)
        k = _conv(kps, bias, k_at, k_ok, W, HAS_BIAS, ACTIVATE, SILU)
        v = _conv(vps, bias, v_at, v_ok, W, HAS_BIAS, ACTIVATE, SILU)
        S, o = advance(S, unit(q, scale, L2), unit(k, 1.0, L2), v, decay, beta, CHANNEL)
        if NORM:
            o *= inverse_rms(o, V, eps, 0)
            o *= tl.load(norm + vs, mask=v_ok, other=0.0).to(tl.float32)
            gate = tl.load(z + row * z_t + head * z_h + vs, mask=v_ok, other=0.0).to(tl.float32)
            o *= sigmoid(gate) if CHANNEL else gate * sigmoid(gate)
        tl.store(to, o.to(out.dtype.element_ty), mask=v_ok)
        if last >= 0:
            tl.store(state + (last * s_slot + tile) + at, S.to(state.dtype.element_ty), mask=ok,
                     eviction_policy=EVICT)  # fmt: skip
            moves = slot != last
            _keep(v_in, old, new, start, v_at, v_ok, has_old, moves, c_j, W)
            if (pid % tiles == 0) & (head % R == 0):
                _keep(q_in, old, new, start, q_at, k_ok, has_old, moves, c_j, W)
                _keep(k_in, old, new, start, k_at, k_ok, has_old, moves, c_j, W)
    else:
        tl.store(to, tl.zeros((BV,), out.dtype.element_ty), mask=v_ok)
