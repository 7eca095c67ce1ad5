"""What a chunk of BT tokens needs before its start state is known, where every channel decays.

Within a chunk the decay from token j to token i is a product of each channel's own factors, so it
cannot be taken out of `k'_i.k'_j` as a number. Nor can it be split at one fixed token: one of the
two factors then grows past any float. So pairs are taken by level. At level W the tokens are blocks
of 2W, and a pair of it has i in the upper and j in the lower half of one block: the decay is "since
the middle" of i times "until the middle" of j, both at most 1. Every pair below the diagonal
belongs to one level, and both factors of a level come from those of the level before by a product
with what a half block decays altogether: no logarithms, no sums that cancel, one exp an element.

The same levels invert `I + L`: with the inverse D of the diagonal blocks of W tokens, that of
blocks of 2W is `D - D (L at level W) D`, which is stable for any L.

The two halves of a chunk are prepared one after the other, since registers and instructions are
what is short, and the last level joins the second to the first. A half is a tile `[M, RUN, BK]`
with token `m * RUN + r` at `[m, r]`: where a thread holds whole runs of tokens, levels below RUN
need no exchange between threads.
"""

# ruff: noqa: ANN201
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl

from hal_triton.kernels.math import learning_rate, log_decay
from hal_triton.kernels.rows import find_tile


@triton.jit
def _apart(N: tl.constexpr):
    """i xor j: in `[W, 2W)` for a pair of level W, whichever of the two comes first."""
    return tl.arange(0, N)[:, None] ^ tl.arange(0, N)[None, :]


@triton.jit
def _pick(x, there, axis: tl.constexpr):
    """The one entry along an axis where `there` holds; integers, whose sum with zeros is free."""
    bits = tl.where(there, x.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, axis).to(tl.float32, bitcast=True)


@triton.jit
def _double(since, until, last, W: tl.constexpr, X: tl.constexpr, N: tl.constexpr,
            C: tl.constexpr):  # fmt: skip
    """Factors over blocks of W along axis 1 of `[X, N, C]`, for blocks of 2W.

    `last` decays over an entry's own tokens, 1 where `since` counts them already.
    """
    at = tl.arange(0, 2 * W)[None, None, :, None]
    whole = tl.reshape(since * last, (X, N // (2 * W), 2 * W, C))
    lower, upper = _pick(whole, at == W - 1, 2), _pick(whole, at == 2 * W - 1, 2)
    since = tl.reshape(since, (X, N // (2 * W), 2 * W, C))
    until = tl.reshape(until, (X, N // (2 * W), 2 * W, C))
    since *= tl.where(at >= W, lower[:, :, None, :], 1.0)
    until *= tl.where(at < W, upper[:, :, None, :], 1.0)
    return tl.reshape(since, (X, N, C)), tl.reshape(until, (X, N, C))


@triton.jit
def _log_decay(a, A_log, dt_bias, lower_bound, GATE: tl.constexpr):
    """`log_decay`, with a softplus by polynomial: within 2e-7, at half the instructions."""
    if GATE == "channel":
        x = a + dt_bias
        e = tl.exp(-tl.abs(x))
        p = 0.04349389981 - 0.00837115254944 * e
        p = -0.1068500286375 + p * e
        p = 0.17687476700423 + p * e
        p = -0.24474774178479 + p * e
        p = 0.33271928383391 + p * e
        p = -0.4999717452300 + p * e
        p = 0.9999997807585 + p * e
        return -tl.exp(A_log) * (tl.maximum(x, 0.0) + p * e)
    else:
        return log_decay(a, A_log, dt_bias, lower_bound, GATE)


@triton.jit
def _stacked(x, BS: tl.constexpr, BK: tl.constexpr):
    """A tile of pairs `[M, RUN, BK, 2]` as rows `[2 BS, BK]`, the left of every pair first."""
    return tl.reshape(tl.permute(x, (3, 0, 1, 2)), (2 * BS, BK))


@triton.jit
def _halves(x):
    """The two squares of `[2, BS, BS]`."""
    first = (tl.arange(0, 2) == 0)[:, None, None]
    return _pick(x, first, 0), _pick(x, first == 0, 0)


@triton.jit
def _product(x, y, SOLVE: tl.constexpr):
    """x y in float16, or in float32 with the given input precision."""
    if SOLVE == "float16":
        return tl.dot(x.to(tl.float16), y.to(tl.float16), input_precision="ieee")
    else:
        return tl.dot(x, y, input_precision=SOLVE)


@triton.jit
def _invert(L, BS: tl.constexpr, LEVELS: tl.constexpr, SOLVE: tl.constexpr):
    """(I + L)^-1 of an L `[BS, BS]` that is zero but below the diagonal."""
    apart = _apart(BS)
    D = tl.where(apart == 0, 1.0, tl.where(apart == 1, -L, 0.0))
    for level in tl.static_range(1, LEVELS):
        part = tl.where((apart >> level) == 1, L, 0.0)
        D -= _product(_product(D, part, SOLVE), D, SOLVE)
    return D


@triton.jit
def _normed(x, live, least):
    """The tile at length 1 in float32, and the lengths `[M, RUN]`."""
    x = x.to(tl.float32)
    size = tl.sqrt(tl.sum(x * x, 2) + least)
    return x * (1.0 / size)[:, :, None], size


@triton.jit
def _half(
    q, k, a, A_log, dt_bias, left, head, lower_bound, q_t, k_t, a_t,
    K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, RUN: tl.constexpr, SHORT: tl.constexpr,
    LEVELS: tl.constexpr, GATE: tl.constexpr, least,
):  # fmt: skip
    """Half a chunk by itself, `left` of its tokens live.

    Gives k'.k' below and q'.k' on and below the diagonal, decayed, both `[BS, BS]`; keys and
    queries since the start, `[M, RUN, BK, 2]`; keys until the end, `[M, RUN, BK]`; the decay of the
    half, `[BK]`; and the lengths of keys and queries, `[M, RUN]`.
    """
    M: tl.constexpr = BS // RUN
    r, m, ks, t = tl.arange(0, RUN), tl.arange(0, M), tl.arange(0, BK), tl.arange(0, BS)
    n = m[:, None] * RUN + r[None, :]
    ok = (n < left)[:, :, None] & (ks < K)[None, None, :]
    keys = tl.load(k + (n * k_t)[:, :, None] + ks[None, None, :], mask=ok, other=0.0)
    queries = tl.load(q + (n * q_t)[:, :, None] + ks[None, None, :], mask=ok, other=0.0)
    raw = tl.load(a + (n * a_t)[:, :, None] + ks[None, None, :], mask=ok, other=0.0)
    rate, bias = 0.0, 0.0
    if GATE != "ready":
        rate = tl.load(A_log + head)
        bias = tl.load(dt_bias + head * K + ks, mask=ks < K, other=0.0)[None, None, :]
    g = _log_decay(raw.to(tl.float32), rate, bias, lower_bound, GATE)
    since, until = tl.exp(tl.where(ok, g, 0.0)), tl.full((M, RUN, BK), 1.0, tl.float32)
    keys, k_size = _normed(keys, n < left, least)
    queries, q_size = _normed(queries, n < left, least)
    same = tl.reshape(tl.sum(keys * queries, 2), (BS,))
    keys, queries = keys.to(tl.float16), queries.to(tl.float16)
    both = tl.join(keys, queries)
    apart, products = _apart(BS)[None, :, :], tl.zeros((2, BS, BS), tl.float32)
    fore, hind = tl.full((1, M, BK), 1.0, tl.float32), tl.full((1, M, BK), 1.0, tl.float32)
    run = fore
    for level in tl.static_range(LEVELS):
        if level == SHORT:
            run = _pick(since, (r == RUN - 1)[None, :, None], 1)[None, :, :]
        decay = tl.where(((n >> level) % 2 == 1)[:, :, None], since, until)
        if level > SHORT:
            upper = ((m >> (level - SHORT)) % 2 == 1)[None, :, None]
            decay *= tl.reshape(tl.where(upper, fore, hind), (M, 1, BK))
        decay = decay.to(tl.float16)
        near = _stacked(both * decay[:, :, :, None], BS, BK)
        turned = tl.trans(tl.reshape(keys * decay, (BS, BK)))
        product = tl.reshape(tl.dot(near, turned, input_precision="ieee"), (2, BS, BS))
        products = tl.where((apart >> level) == 1, product, products)
        if level < SHORT:
            since, until = _double(since, until, 1.0, 1 << level, M, RUN, BK)
        else:
            fore, hind = _double(fore, hind, run, 1 << (level - SHORT), 1, M, BK)
    since *= tl.reshape(fore, (M, 1, BK))
    until *= tl.reshape(hind, (M, 1, BK))
    total = _pick(_pick(since, (r == RUN - 1)[None, :, None], 1), (m == M - 1)[:, None], 0)
    L, score = _halves(tl.where((t[:, None] > t[None, :])[None, :, :], products, 0.0))
    score += tl.where(t[:, None] == t[None, :], same[:, None], 0.0)
    both *= since.to(tl.float16)[:, :, :, None]
    return L, score, both, keys * until.to(tl.float16), total, k_size, q_size


@triton.jit
def _rates(b, left, beta_scale, k_size, b_t, BS: tl.constexpr, GATE: tl.constexpr,
           L2: tl.constexpr):  # fmt: skip
    """Beta of a half's tokens, `[BS]`, and what it is for keys at length 1."""
    t = tl.arange(0, BS)
    raw = tl.load(b + t * b_t, mask=t < left, other=0.0).to(tl.float32)
    beta = learning_rate(raw, beta_scale, GATE)
    if L2:
        return beta, beta
    else:
        k_size = tl.reshape(k_size, (BS,))
        return beta, beta * k_size * k_size


@triton.jit
def _clear(out, left, out_t, V: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr):
    """Zeros for a chunk of the pads."""
    t, vs = tl.arange(0, BT), tl.arange(0, BV)
    tl.store(out + (t[:, None] * out_t + vs[None, :]), tl.zeros((BT, BV), out.dtype.element_ty),
             mask=(t < left)[:, None] & (vs < V)[None, :])  # fmt: skip


@triton.jit
def _put(to, x, BS: tl.constexpr):
    """Store a quarter of a square `[2 BS, 2 BS]`."""
    t = tl.arange(0, BS)
    tl.store(to + (t[:, None] * (2 * BS) + t[None, :]), x.to(to.dtype.element_ty))


@triton.jit(do_not_specialize=["rows", "tokens"])
def channel_chunks(
    q, k, a, b, A_log, dt_bias, query_start_loc, inverse, scores, panels, factors, out,
    rows, tokens, q_h, k_h, a_h, b_t, out_h, scale, beta_scale, lower_bound,
    q_t: tl.constexpr, k_t: tl.constexpr, a_t: tl.constexpr, out_t: tl.constexpr,
    HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, BS: tl.constexpr, RUN: tl.constexpr, SHORT: tl.constexpr,
    LEVELS: tl.constexpr, GATE: tl.constexpr, L2: tl.constexpr, SOLVE: tl.constexpr,
):  # fmt: skip
    """Prepare one chunk of one value head; the chunks of the pads clear their output.

    A chunk has BT = 2 BS tokens; BS is 2^LEVELS and RUN 2^SHORT. Keys and queries are always taken
    at length 1, so that float16 holds them. panels `[tiles, HV, 3, BT, BK]`: keys and queries
    decayed since the chunk's start, keys until its end. factors `[tiles, HV, BK + 2 * BT]`: what
    each channel decays over the chunk; without L2 also |k| and scale * |q|.
    """
    head, tile = tl.program_id(0) % HV, tl.program_id(0) // HV
    BT: tl.constexpr = 2 * BS
    row, begin, end, first = find_tile(query_start_loc, rows, tokens, tile, BT)
    at = begin.to(tl.int64) + first
    left = end - begin - first
    if row == rows:
        if left > 0:
            _clear(out + at * out_t + head * out_h, left, out_t, V, BV, BT)
    elif left > 0:
        M: tl.constexpr = BS // RUN
        place, k_head = (tile * HV + head).to(tl.int64), head // R
        q, k = q + at * q_t + k_head * q_h, k + at * k_t + k_head * k_h
        a, b = a + at * a_t + head * a_h, b + at * b_t + head
        least = 1e-6 if L2 else 1e-30
        ks = tl.arange(0, BK)
        n = tl.arange(0, M)[:, None] * RUN + tl.arange(0, RUN)[None, :]
        to = panels + place * (3 * BT * BK) + (n * BK)[:, :, None] + ks[None, None, :]
        factor = factors + place * (BK + 2 * BT)
        sizes = factor + BK
        solve_to, score_to = inverse + place * (BT * BT), scores + place * (BT * BT)
        earlier = tl.zeros((M, RUN, BK), tl.float16)
        fall, D_0 = tl.full((BK,), 1.0, tl.float32), tl.zeros((BS, BS), tl.float32)
        beta_0 = tl.zeros((BS,), tl.float32)
        for half in range(2):
            L, score, both, after, total, k_size, q_size = _half(
                q, k, a, A_log, dt_bias, left, head, lower_bound, q_t, k_t, a_t, K, BK, BS, RUN,
                SHORT, LEVELS, GATE, least,
            )  # fmt: skip
            beta, weight = _rates(b, left, beta_scale, k_size, b_t, BS, GATE, L2)
            D = _invert(L * weight[:, None], BS, LEVELS, SOLVE)
            turned = tl.trans(tl.reshape(earlier, (BS, BK)))
            cross = tl.dot(_stacked(both, BS, BK), turned, input_precision="ieee")
            L, cross = _halves(tl.reshape(cross, (2, BS, BS)))
            across = _product(_product(D, L * weight[:, None], SOLVE), D_0, SOLVE)
            own, other = half * BS, (1 - half) * BS
            _put(solve_to + own, D * beta[None, :], BS)
            _put(solve_to + other, -across * beta_0[None, :], BS)
            _put(score_to + own, score, BS)
            _put(score_to + other, cross, BS)
            keys, queries = tl.split(both * fall.to(tl.float16)[None, None, :, None])
            tl.store(to, keys)
            tl.store(to + BT * BK, queries)
            if half == 1:
                tl.store(to + (2 * BT - BS) * BK, earlier * total.to(tl.float16)[None, None, :])
            if not L2:
                tl.store(sizes + n, k_size)
                tl.store(sizes + BT + n, q_size * scale)
            earlier, fall, D_0, beta_0 = after, fall * total, D, beta
            q, k, a, b = q + BS * q_t, k + BS * k_t, a + BS * a_t, b + BS * b_t
            left, to, sizes = left - BS, to + BS * BK, sizes + BS
            solve_to, score_to = solve_to + BS * BT, score_to + BS * BT
        tl.store(to + (2 * BT - BS) * BK, earlier)
        tl.store(factor + ks, fall)
