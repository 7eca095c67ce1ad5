"""One token a row: every program owns BV value rows of one head's state."""

# ruff: noqa: ANN201
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl

from hal_triton.delta_rule.kernels.step import advance, read_gates, unit
from hal_triton.kernels.chain import chain


@triton.jit
def delta_decode(
    q, k, v, a, b, A_log, dt_bias, state, src, dst, out,
    q_t, q_h, k_t, k_h, v_t, v_h, a_t, a_h, b_t, out_t, out_h, s_slot, s_h,
    scale, beta_scale, lower_bound,
    s_v: tl.constexpr, s_k: tl.constexpr, HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GATE: tl.constexpr,
    CHANNEL: tl.constexpr, L2: tl.constexpr, EVICT: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """Advance one tile in place or from `src` to `dst`; a row with neither slot gives zeros.

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
    to = out + row * out_t + head * out_h + vs
    if (slot >= 0) | (last >= 0):
        at = head.to(tl.int64) * s_h + (vs[:, None] * s_v + ks[None, :] * s_k)
        ok = v_ok[:, None] & k_ok[None, :]
        S = tl.load(state + slot * s_slot + at, mask=ok & (slot >= 0), other=0.0,
                    eviction_policy=EVICT).to(tl.float32)  # fmt: skip
        k_head = head // R
        q_in = tl.load(q + row * q_t + k_head * q_h + ks, mask=k_ok, other=0.0).to(tl.float32)
        k_in = tl.load(k + row * k_t + k_head * k_h + ks, mask=k_ok, other=0.0).to(tl.float32)
        v_in = tl.load(v + row * v_t + head * v_h + vs, mask=v_ok, other=0.0).to(tl.float32)
        decay, beta = read_gates(
            a + row * a_t + head * a_h, b + row * b_t + head, A_log, dt_bias, head, ks, k_ok,
            lower_bound, beta_scale, GATE, CHANNEL, K,
        )  # fmt: skip
        S, o = advance(S, unit(q_in, scale, L2), unit(k_in, 1.0, L2), v_in, decay, beta, CHANNEL)
        tl.store(to, o.to(out.dtype.element_ty), mask=v_ok)
        tl.store(state + last * s_slot + at, S.to(state.dtype.element_ty), mask=ok & (last >= 0),
                 eviction_policy=EVICT)  # fmt: skip
    else:
        tl.store(to, tl.zeros((BV,), out.dtype.element_ty), mask=v_ok)
