"""The walk over a row's chunks where every channel decays: BV value rows of one head on chip.

All that a step multiplies was prepared in float16, so the state is shrunk for it row by row, by
the largest entry that the row meets in the step: what a step then adds up is bounded, whatever the
size of the values. Keys that are not normed come apart from their lengths, and what they want is
shrunk anew. The state itself stays in float32.
"""

# ruff: noqa: ANN201
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl

from hal_triton.kernels.rows import tracked


@triton.jit
def _read(S, values, keys, queries, lengths, BT: tl.constexpr, L2: tl.constexpr):
    """What the values want of the state and what the queries read of it, `[BV, BT]`.

    Both in units of each row's size, which is given beside them, `[BV]`.
    """
    held = tl.max(tl.abs(S), 1)
    if L2:
        held = tl.maximum(held, tl.max(tl.abs(values), 1))
    held = tl.where(held > 0.0, held, 1.0)
    shrink = (1.0 / held)[:, None]
    small = (S * shrink).to(tl.float16)
    known = tl.dot(small, tl.trans(keys), input_precision="ieee")
    o = tl.dot(small, tl.trans(queries), input_precision="ieee")
    if L2:
        return values * shrink - known, o, held
    else:
        length = tl.load(lengths + tl.arange(0, BT))[None, :]
        wanted = (values - known * length * held[:, None]) * length
        size = tl.max(tl.abs(wanted), 1)
        size = tl.where(size > 0.0, size, 1.0)
        return wanted * (1.0 / size)[:, None], o * (held / size)[:, None], size


@triton.jit(do_not_specialize=["points"])
def channel_walk(
    v, inverse, scores, panels, factors, state, src, dst, query_start_loc, track, out,
    points, v_h, out_h, s_slot, s_h, scale,
    v_t: tl.constexpr, out_t: tl.constexpr, s_v: tl.constexpr, s_k: tl.constexpr,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BT: tl.constexpr, L2: tl.constexpr, TRACK: tl.constexpr,
):  # fmt: skip
    """Run one row of one head over one tile of values."""
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
        token = begin.to(tl.int64)
        v_row, o_row = v + token * v_t + head * v_h, out + token * out_t + head * out_h
        v_at, o_at = t[None, :] * v_t + vs[:, None], t[None, :] * out_t + vs[:, None]
        square, panel = t[:, None] * BT + t[None, :], t[:, None] * BK + ks[None, :]
        place = ((begin // BT + row) * HV + head).to(tl.int64)
        for first in range(0, end - begin, BT):
            o_ok = v_ok[:, None] & (first + t < end - begin)[None, :]
            before = panels + place * (3 * BT * BK) + panel
            keys = tl.load(before)
            queries = tl.load(before + BT * BK)
            after = tl.load(before + 2 * BT * BK)
            solve = tl.load(inverse + place * (BT * BT) + square)
            score = tl.load(scores + place * (BT * BT) + square)
            factor = factors + place * (BK + 2 * BT)
            total = tl.load(factor + ks)
            values = tl.load(v_row + v_at, mask=o_ok, other=0.0).to(tl.float32)
            wanted, o, size = _read(S, values, keys, queries, factor + BK, BT, L2)
            u = tl.dot(wanted.to(tl.float16), tl.trans(solve), input_precision="ieee")
            u = u.to(tl.float16)
            o = tl.dot(u, tl.trans(score), o, input_precision="ieee") * size[:, None]
            o *= scale if L2 else tl.load(factor + BK + BT + t)[None, :]
            S = S * total[None, :] + tl.dot(u, after, input_precision="ieee") * size[:, None]
            tl.store(o_row + o_at, o.to(out.dtype.element_ty), mask=o_ok)
            if TRACK:
                count = tl.minimum(first + BT, end - begin)
                for i in range(0, points):
                    kept = tracked(track, points, row, count, i)
                    tl.store(at + kept * s_slot, S.to(state.dtype.element_ty),
                             mask=s_ok & (kept >= 0))  # fmt: skip
            v_row += BT * v_t
            o_row += BT * out_t
            place += HV
        tl.store(at + last * s_slot, S.to(state.dtype.element_ty), mask=s_ok & (last >= 0))
