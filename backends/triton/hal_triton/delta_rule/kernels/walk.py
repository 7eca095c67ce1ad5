"""The walk over a row's chunks: a program carries BV value rows of one head's state on chip.

The state is kept as `[BV, BK]`, so that products with it chain in registers and q, k and the
prepared matrices go from memory to the matrix units as they are. Registers are what is short: so
queries are read after the solve, and factors where they are used.

Where keys resemble each other, updates alternate in sign and outputs are small sums of large terms:
the solve, the updates and the scores need more bits than bfloat16 has. They are float16, which
their bounds allow once every value row is scaled to its largest entry, or float32 in three products
of bfloat16 where float16's own digits are to be kept.
"""

# ruff: noqa: ANN201
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl

from hal_triton.kernels.rows import tracked


@triton.jit
def _solve(wanted, narrow, solve, score, queries, by_query, EXACT: tl.constexpr):
    """Updates and outputs of a chunk, `[BV, BT]`, from what its values want of the state."""
    if EXACT:
        u = tl.dot(wanted, tl.trans(solve), input_precision="bf16x3")
        o = tl.dot(narrow, tl.trans(queries), input_precision="ieee")
        o *= tl.load(by_query)[None, :]
        return u, tl.dot(u, tl.trans(score), o, input_precision="bf16x3")
    else:
        size = tl.max(tl.abs(wanted), 1)
        size = tl.where(size > 0.0, size, 1.0)
        shrink = 1.0 / size
        scaled = (wanted * shrink[:, None]).to(tl.float16)
        u = tl.dot(scaled, tl.trans(solve), input_precision="ieee")
        o = tl.dot(narrow, tl.trans(queries), input_precision="ieee")
        o *= tl.load(by_query)[None, :] * shrink[:, None]
        o = tl.dot(u.to(tl.float16), tl.trans(score), o, input_precision="ieee")
        return u * size[:, None], o * size[:, None]


@triton.jit(do_not_specialize=["points"])
def delta_walk(
    q, k, v, inverse, scores, factors, state, src, dst, query_start_loc, track, out,
    points, q_h, k_h, v_h, out_h, s_slot, s_h,
    q_t: tl.constexpr, k_t: tl.constexpr, v_t: tl.constexpr, out_t: tl.constexpr,
    s_v: tl.constexpr, s_k: tl.constexpr, HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, TRACK: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Run one row of one head over one tile of values.

    Strides of tokens are constants, so that addresses are one register and immediate offsets.
    """
    tiles: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    head, row = (pid // tiles) % HV, pid // (tiles * HV)
    begin, end = tl.load(query_start_loc + row), tl.load(query_start_loc + row + 1)
    if begin < end:
        t, ks, vs = tl.arange(0, BT), tl.arange(0, BK), (pid % tiles) * BV + tl.arange(0, BV)
        k_ok = ks >= 0 if BK == K else ks < K
        v_ok = vs >= 0 if V % BV == 0 else vs < V
        s_ok = v_ok[:, None] & k_ok[None, :]
        slot, last = tl.load(src + row).to(tl.int64), tl.load(dst + row).to(tl.int64)
        at = state + head.to(tl.int64) * s_h + (vs[:, None] * s_v + ks[None, :] * s_k)
        S = tl.load(at + slot * s_slot, mask=s_ok & (slot >= 0), other=0.0).to(tl.float32)
        token, k_head = begin.to(tl.int64), head // R
        q_row, k_row = q + token * q_t + k_head * q_h, k + token * k_t + k_head * k_h
        v_row, o_row = v + token * v_t + head * v_h, out + token * out_t + head * out_h
        q_at, k_at = t[:, None] * q_t + ks[None, :], t[:, None] * k_t + ks[None, :]
        v_at, o_at = t[None, :] * v_t + vs[:, None], t[None, :] * out_t + vs[:, None]
        square = t[:, None] * BT + t[None, :]
        place = ((begin // BT + row) * HV + head).to(tl.int64)
        act = k.dtype.element_ty
        for first in range(0, end - begin, BT):
            live = first + t < end - begin
            ok, o_ok = live[:, None] & k_ok[None, :], v_ok[:, None] & live[None, :]
            keys = tl.load(k_row + k_at, mask=ok, other=0.0)
            queries = tl.load(q_row + q_at, mask=ok, other=0.0)
            solve = tl.load(inverse + place * (BT * BT) + square)
            score = tl.load(scores + place * (BT * BT) + square)
            factor = factors + place * (4 * BT) + t
            by_key = tl.load(factor)
            total = tl.load(factors + place * (4 * BT) + 3 * BT)
            narrow = S.to(act)
            known = tl.dot(narrow, tl.trans(keys), input_precision="ieee")
            wanted = tl.load(v_row + v_at, mask=o_ok, other=0.0).to(tl.float32)
            wanted -= known * by_key[None, :]
            u, o = _solve(wanted, narrow, solve, score, queries, factor + BT, EXACT)
            u *= tl.load(factor + 2 * BT)[None, :]
            S = tl.dot(u.to(act), keys, S * total, input_precision="ieee")
            tl.store(o_row + o_at, o.to(out.dtype.element_ty), mask=o_ok)
            if TRACK:
                count = tl.minimum(first + BT, end - begin)
                for i in range(0, points):
                    kept = tracked(track, points, row, count, i)
                    tl.store(at + kept * s_slot, S.to(state.dtype.element_ty),
                             mask=s_ok & (kept >= 0))  # fmt: skip
            q_row += BT * q_t
            k_row += BT * k_t
            v_row += BT * v_t
            o_row += BT * out_t
            place += HV
        tl.store(at + last * s_slot, S.to(state.dtype.element_ty), mask=s_ok & (last >= 0))
