"""Token after token over packed rows: the form for any gate and for float32's digits."""

# ruff: noqa: ANN201
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl

from hal_triton.delta_rule.kernels.step import advance, read_gates, unit
from hal_triton.kernels.rows import tracked


@triton.jit(do_not_specialize=["rows", "tokens", "points"])
def delta_recurrent(
    q, k, v, a, b, A_log, dt_bias, state, src, dst, query_start_loc, track, out,
    rows, tokens, points, q_t, q_h, k_t, k_h, v_t, v_h, a_t, a_h, b_t, out_t, out_h,
    s_slot, s_h, s_v, s_k, scale, beta_scale, lower_bound,
    HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, GATE: tl.constexpr, CHANNEL: tl.constexpr, L2: tl.constexpr,
    TRACK: tl.constexpr,
):  # fmt: skip
    """Run one row over BV value rows of one head; row `rows` clears the outputs of the pads."""
    tiles: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    head, row = (pid // tiles) % HV, pid // (tiles * HV)
    ks, vs = tl.arange(0, BK), (pid % tiles) * BV + tl.arange(0, BV)
    k_ok, v_ok = ks < K, vs < V
    begin, end = tl.load(query_start_loc + row), tokens
    to = out + head * out_h + vs
    if row == rows:
        for t in range(begin, end):
            n = tl.zeros((), tl.int64) + t
            tl.store(to + n * out_t, tl.zeros((BV,), out.dtype.element_ty), mask=v_ok)
    else:
        end = tl.load(query_start_loc + row + 1)
        if begin < end:
            slot, last = tl.load(src + row).to(tl.int64), tl.load(dst + row).to(tl.int64)
            at = state + head.to(tl.int64) * s_h + (vs[:, None] * s_v + ks[None, :] * s_k)
            ok = v_ok[:, None] & k_ok[None, :]
            S = tl.load(at + slot * s_slot, mask=ok & (slot >= 0), other=0.0).to(tl.float32)
            k_head = head // R
            for t in range(begin, end):
                n = tl.zeros((), tl.int64) + t
                q_in = tl.load(q + n * q_t + k_head * q_h + ks, mask=k_ok, other=0.0)
                k_in = tl.load(k + n * k_t + k_head * k_h + ks, mask=k_ok, other=0.0)
                v_in = tl.load(v + n * v_t + head * v_h + vs, mask=v_ok, other=0.0)
                decay, beta = read_gates(
                    a + n * a_t + head * a_h, b + n * b_t + head, A_log, dt_bias, head, ks, k_ok,
                    lower_bound, beta_scale, GATE, CHANNEL, K,
                )  # fmt: skip
                S, o = advance(
                    S, unit(q_in.to(tl.float32), scale, L2), unit(k_in.to(tl.float32), 1.0, L2),
                    v_in.to(tl.float32), decay, beta, CHANNEL,
                )  # fmt: skip
                tl.store(to + n * out_t, o.to(out.dtype.element_ty), mask=v_ok)
                if TRACK:
                    for i in range(0, points):
                        kept = tracked(track, points, row, t + 1 - begin, i)
                        tl.store(at + kept * s_slot, S.to(state.dtype.element_ty),
                                 mask=ok & (kept >= 0))  # fmt: skip
            tl.store(at + last * s_slot, S.to(state.dtype.element_ty), mask=ok & (last >= 0))
