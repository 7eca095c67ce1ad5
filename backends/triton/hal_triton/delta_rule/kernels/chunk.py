"""What a chunk of BT tokens needs before its start state is known, for all chunks at once.

Within a chunk G_i is the sum of log decays up to token i. The updates solve
`(I + L) u = beta * (v - exp(G) * (k' S))` with `L_ij = beta_i * k'_i.k'_j * exp(G_i - G_j)` below
the diagonal. This kernel stores `(I + L)^-1 * beta`, the decayed and scaled products of queries and
keys, and per token the factors that carry norms and decays, so that the walk over chunks reads raw
q and k.
"""

# ruff: noqa: ANN201
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl

from hal_triton.kernels.math import inverse_norm, learning_rate, log_decay
from hal_triton.kernels.rows import find_tile


@triton.jit
def _invert(L, BT: tl.constexpr, PRECISION: tl.constexpr):
    """(I + L)^-1 of a strictly lower L `[BT, BT]`.

    Blocks of 16 on the diagonal by substitution, which is stable for any L; then, with D their
    inverse and N = D (L without them), the series I - N + N^2 - N^3, exact for four blocks.
    """
    NB: tl.constexpr = BT // 16
    i, r, n = tl.arange(0, BT), tl.arange(0, 16), tl.arange(0, NB)
    inside = (i[:, None] // 16) == (i[None, :] // 16)
    same = (n[:, None] == n[None, :])[:, None, :, None]
    D = -tl.sum(tl.reshape(tl.where(inside, L, 0.0), (NB, 16, NB, 16)), 2)
    for step in range(1, 16):
        here = (r == step)[None, :, None]
        line = tl.sum(tl.where(here, D, 0.0), 1)
        line += tl.sum(line[:, :, None] * D, 1)
        D = tl.where(here, line[:, None, :], D)
    D += (r[:, None] == r[None, :]).to(tl.float32)[None, :, :]
    wide = tl.reshape(tl.where(same, D[:, :, None, :], 0.0), (BT, BT))
    N = tl.dot(wide, tl.where(inside, 0.0, L), input_precision=PRECISION)
    N2 = tl.dot(N, N, input_precision=PRECISION)
    series = (i[:, None] == i[None, :]).to(tl.float32) - N + N2
    series -= tl.dot(N2, N, input_precision=PRECISION)
    return tl.dot(series, wide, input_precision=PRECISION)


@triton.jit(do_not_specialize=["rows", "tokens"])
def delta_chunks(
    q, k, a, b, A_log, dt_bias, query_start_loc, inverse, scores, factors, out,
    rows, tokens, q_h, k_h, a_t, b_t, out_h, scale, beta_scale, lower_bound,
    q_t: tl.constexpr, k_t: tl.constexpr, out_t: tl.constexpr, HV: tl.constexpr, R: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    GATE: tl.constexpr, L2: tl.constexpr, SOLVE: tl.constexpr,
):  # fmt: skip
    """Prepare one chunk of one value head; the chunks of the pads clear their output.

    factors `[tiles, HV, 4, BT]`: exp(G) / |k|, exp(G) * scale / |q|, exp(G_end - G) / |k|, and
    exp(G_end) throughout.
    """
    head, tile = tl.program_id(0) % HV, tl.program_id(0) // HV
    row, begin, end, first = find_tile(query_start_loc, rows, tokens, tile, BT)
    t = tl.arange(0, BT)
    live = first + t < end - begin
    at = begin.to(tl.int64) + first
    if row == rows:
        if first < end - begin:
            vs = tl.arange(0, BV)
            tl.store(out + at * out_t + head * out_h + (t[:, None] * out_t + vs[None, :]),
                     tl.zeros((BT, BV), out.dtype.element_ty),
                     mask=live[:, None] & (vs < V)[None, :])  # fmt: skip
    elif first < end - begin:
        ks, k_head = tl.arange(0, BK), head // R
        k_ok = ks >= 0 if BK == K else ks < K
        ok = live[:, None] & k_ok[None, :]
        keys = tl.load(k + at * k_t + k_head * k_h + (t[:, None] * k_t + ks[None, :]), mask=ok,
                       other=0.0)  # fmt: skip
        queries = tl.load(q + at * q_t + k_head * q_h + (t[:, None] * q_t + ks[None, :]), mask=ok,
                          other=0.0)  # fmt: skip
        k_unit, q_unit = tl.full((BT,), 1.0, tl.float32), tl.full((BT,), 1.0, tl.float32)
        if L2:
            k_unit = inverse_norm(keys.to(tl.float32), 1)
            q_unit = inverse_norm(queries.to(tl.float32), 1)
        q_unit *= scale
        raw = tl.load(a + at * a_t + t * a_t + head, mask=live, other=0.0).to(tl.float32)
        rate = tl.load(A_log + head) if GATE != "ready" else 0.0
        bias = tl.load(dt_bias + head) if GATE != "ready" else 0.0
        g = tl.where(live, log_decay(raw, rate, bias, lower_bound, GATE), 0.0)
        raw = tl.load(b + at * b_t + t * b_t + head, mask=live, other=0.0).to(tl.float32)
        beta = learning_rate(raw, beta_scale, GATE)
        G, total = tl.cumsum(g, 0), tl.sum(g, 0)
        below = t[:, None] >= t[None, :]
        fall = tl.where(below, G[:, None] - G[None, :], 0.0)
        decay = tl.where(below, tl.exp(fall), 0.0)
        decay *= k_unit[None, :]
        keys_t = tl.trans(keys)
        score = tl.dot(queries, keys_t, input_precision="ieee") * decay * q_unit[:, None]
        L = tl.dot(keys, keys_t, input_precision="ieee") * decay * (beta * k_unit)[:, None]
        L = tl.where(t[:, None] > t[None, :], L, 0.0)
        solved = _invert(L, BT, SOLVE) * beta[None, :]
        place = (tile * HV + head).to(tl.int64)
        square = place * (BT * BT) + (t[:, None] * BT + t[None, :])
        tl.store(inverse + square, solved.to(inverse.dtype.element_ty))
        tl.store(scores + square, score.to(scores.dtype.element_ty))
        to = factors + place * (4 * BT) + t
        since, until = tl.exp(G), tl.exp(total - G)
        tl.store(to, since * k_unit)
        tl.store(to + BT, since * q_unit)
        tl.store(to + 2 * BT, until * k_unit)
        tl.store(to + 3 * BT, tl.zeros((BT,), tl.float32) + tl.exp(total))
