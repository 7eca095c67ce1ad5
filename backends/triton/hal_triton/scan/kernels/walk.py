"""The walk over a row's chunks: a program carries BP channels of one head's state on chip.

The state is kept as `[BP, BN]`, so that products with it chain in registers and B, C and x go from
memory to the matrix units as they are. With G the decays of a chunk and S the state before it,

    y_i = exp(G_i) S C_i + sum_j<=i exp(G_i - G_j) d_j (B_j.C_i) x_j + D x_i
    S   = exp(G_end) S + sum_j exp(G_end - G_j) d_j x_j B_j^T

where no exponent is above zero. A long row may be cut into segments of SEG tokens that run side by
side: `scan_sums` finds what each segment adds to the state, and the walk over a segment begins by
adding up those before it.
"""

# ruff: noqa: ANN201
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl

from hal_triton.kernels.rows import find_tile, tracked


@triton.jit
def _own_tile(query_start_loc, rows, tokens, tile, SEG: tl.constexpr):
    """Row, its bounds and the first token of this program's part of it; row `rows` is the pads."""
    if SEG > 0:
        return find_tile(query_start_loc, rows, tokens, tile, SEG)
    else:
        begin, end = tl.load(query_start_loc + tile), tl.load(query_start_loc + tile + 1)
        return tile, begin, end, 0


@triton.jit
def _since(part, BT: tl.constexpr, EXACT: tl.constexpr):
    """exp(G_i), what is left at each token of the state before the chunk."""
    t = tl.arange(0, BT)
    G = tl.load(part + t)
    if EXACT:
        G += tl.load(part + 2 * BT + t)
    return tl.exp2(G)


@triton.jit
def _end(part, BT: tl.constexpr, EXACT: tl.constexpr):
    """exp(G_end), what is left behind a chunk of the state before it."""
    G = tl.load(part + BT - 1)
    if EXACT:
        G += tl.load(part + 3 * BT - 1)
    return tl.exp2(G)


@triton.jit
def _grow(S, values, keys, part, first: tl.constexpr, BJ: tl.constexpr, BT: tl.constexpr,
          PRECISION: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """The decayed state with BJ tokens from `first` on: values `[BP, BJ]` and keys `[BJ, BN]`."""
    j = first + tl.arange(0, BJ)
    until = tl.load(part + BT - 1) - tl.load(part + j)
    if EXACT:
        until += tl.load(part + 3 * BT - 1) - tl.load(part + 2 * BT + j)
    update = values.to(tl.float32) * (tl.exp2(until) * tl.load(part + BT + j))[None, :]
    return tl.dot(update.to(keys.dtype), keys, S, input_precision=PRECISION)


@triton.jit
def _weights(score, part, skip, first: tl.constexpr, BJ: tl.constexpr, BT: tl.constexpr,
             EXACT: tl.constexpr):  # fmt: skip
    """What token j adds to the output of token i, `[BJ, BT]`; D x is on the diagonal."""
    j, i = first + tl.arange(0, BJ)[:, None], tl.arange(0, BT)[None, :]
    fall = tl.load(part + i) - tl.load(part + j)
    if EXACT:
        fall += tl.load(part + 2 * BT + i) - tl.load(part + 2 * BT + j)
    weight = score.to(tl.float32) * tl.exp2(tl.minimum(fall, 0.0)) * tl.load(part + BT + j)
    return weight + tl.where(i == j, skip, 0.0)


@triton.jit(do_not_specialize=["rows", "tokens"])
def scan_sums(
    x, B, factors, state, src, query_start_loc, sums, falls, rows, tokens, x_h, b_g, s_slot, s_h,
    x_t: tl.constexpr, b_t: tl.constexpr, s_p: tl.constexpr, s_n: tl.constexpr, H: tl.constexpr,
    R: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
    BT: tl.constexpr, SEG: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """What one segment adds to the state of the next one of its row.

    sums `[segments, H, P, N]` and falls, by which the state before has decayed in powers of two.
    A row's first segment gets the state of `src`, which the walk may overwrite as it runs.
    """
    tiles: tl.constexpr = (P + BP - 1) // BP
    pid = tl.program_id(0)
    head, tile = (pid // tiles) % H, pid // (tiles * H)
    row, begin, end, first = find_tile(query_start_loc, rows, tokens, tile, SEG)
    t, ns, ps = tl.arange(0, BT), tl.arange(0, BN), (pid % tiles) * BP + tl.arange(0, BP)
    n_ok = ns >= 0 if BN == N else ns < N
    p_ok = ps >= 0 if P % BP == 0 else ps < P
    s_ok = p_ok[:, None] & n_ok[None, :]
    place = (tile * H + head).to(tl.int64)
    to = sums + place * (P * N) + (ps[:, None] * N + ns[None, :])
    if (row < rows) & (first == 0) & (begin < end):
        slot = tl.load(src + row).to(tl.int64)
        at = state + head.to(tl.int64) * s_h + (ps[:, None] * s_p + ns[None, :] * s_n)
        S = tl.load(at + slot * s_slot, mask=s_ok & (slot >= 0), other=0.0).to(tl.float32)
        tl.store(to, S, mask=s_ok)
        tl.store(falls + place, 0.0, mask=pid % tiles == 0)
    if (row < rows) & (first + SEG < end - begin):
        token = begin.to(tl.int64) + first
        x_row, b_row = x + token * x_t + head * x_h, B + token * b_t + (head // R) * b_g
        x_at, b_at = t[:, None] * x_t + ps[None, :], t[:, None] * b_t + ns[None, :]
        part = factors + ((begin // BT + row + first // BT) * H + head).to(tl.int64) * (3 * BT)
        S, fallen = tl.zeros((BP, BN), tl.float32), tl.full((), 0.0, tl.float32)
        for _ in range(0, SEG, BT):
            values = tl.trans(tl.load(x_row + x_at, mask=(t >= 0)[:, None] & p_ok[None, :],
                                      other=0.0))  # fmt: skip
            keys = tl.load(b_row + b_at, mask=(t >= 0)[:, None] & n_ok[None, :], other=0.0)
            if WIDE:
                values, keys = values.to(tl.float32), keys.to(tl.float32)
            S *= _end(part, BT, EXACT)
            S = _grow(S, values, keys, part, 0, BT, BT, PRECISION, EXACT)
            fallen += tl.load(part + BT - 1)
            x_row += BT * x_t
            b_row += BT * b_t
            part += H * 3 * BT
        tl.store(to + H * P * N, S, mask=s_ok)
        tl.store(falls + place + H, fallen, mask=pid % tiles == 0)


@triton.jit
def _started(sums, falls, first, tile, ok, H: tl.constexpr, SIZE: tl.constexpr, BP: tl.constexpr,
             BN: tl.constexpr):  # fmt: skip
    """The state that segment `tile` starts from: what was added by those from `first` on."""
    S = tl.zeros((BP, BN), tl.float32)
    for i in range(first, tile + 1):
        place = tl.zeros((), tl.int64) + i * H
        S = S * tl.exp2(tl.load(falls + place)) + tl.load(sums + place * SIZE, mask=ok, other=0.0)
    return S


@triton.jit
def _chunk(
    S, x, B, C, part, scores, skip, left, ps, p_ok, ns, n_ok,
    x_t: tl.constexpr, b_t: tl.constexpr, c_t: tl.constexpr, BT: tl.constexpr, BJ: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Outputs `[BP, BT]` of a chunk, of which `left` tokens are there, and the state after it.

    Tokens are added BJ at a time: that is what registers have room for.
    """
    t, j = tl.arange(0, BT), tl.arange(0, BJ)
    queries = tl.load(C + (t[:, None] * c_t + ns[None, :]),
                      mask=(t < left)[:, None] & n_ok[None, :], other=0.0)  # fmt: skip
    if WIDE:
        queries = queries.to(tl.float32)
    y = tl.dot(S.to(queries.dtype), tl.trans(queries), input_precision=PRECISION)
    y *= _since(part, BT, EXACT)[None, :]
    S *= _end(part, BT, EXACT)
    for n in tl.static_range(BT // BJ):
        ok = (n * BJ + j < left)[:, None]
        score = tl.load(scores + n * (BJ * BT) + (j[:, None] * BT + t[None, :]))
        weight = _weights(score, part, skip, n * BJ, BJ, BT, EXACT).to(queries.dtype)
        values = tl.load(x + n * BJ * x_t + (j[:, None] * x_t + ps[None, :]),
                         mask=ok & p_ok[None, :], other=0.0)  # fmt: skip
        keys = tl.load(B + n * BJ * b_t + (j[:, None] * b_t + ns[None, :]),
                       mask=ok & n_ok[None, :], other=0.0)  # fmt: skip
        values = tl.trans(values)
        if WIDE:
            values, keys = values.to(tl.float32), keys.to(tl.float32)
        y = tl.dot(values, weight, y, input_precision=PRECISION)
        S = _grow(S, values, keys, part, n * BJ, BJ, BT, PRECISION, EXACT)
    return y, S


@triton.jit(do_not_specialize=["rows", "tokens", "points"])
def scan_walk(
    x, B, C, D, z, scores, factors, sums, falls, state, src, dst, query_start_loc, track, out,
    rows, tokens, points, x_h, b_g, c_g, z_t, z_h, out_h, s_slot, s_h,
    x_t: tl.constexpr, b_t: tl.constexpr, c_t: tl.constexpr, out_t: tl.constexpr,
    s_p: tl.constexpr, s_n: tl.constexpr, H: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    N: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, BJ: tl.constexpr,
    SEG: tl.constexpr, TRACK: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr,
    SILU: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Run one row, or one segment of it, of one head over one tile of channels.

    Strides of tokens are constants, so that addresses are one register and immediate offsets.
    """
    tiles: tl.constexpr = (P + BP - 1) // BP
    pid = tl.program_id(0)
    head, tile = (pid // tiles) % H, pid // (tiles * H)
    row, begin, end, first = _own_tile(query_start_loc, rows, tokens, tile, SEG)
    if (row < rows) & (first < end - begin):
        t, ns, ps = tl.arange(0, BT), tl.arange(0, BN), (pid % tiles) * BP + tl.arange(0, BP)
        n_ok = ns >= 0 if BN == N else ns < N
        p_ok = ps >= 0 if P % BP == 0 else ps < P
        s_ok = p_ok[:, None] & n_ok[None, :]
        slot, last = tl.load(src + row).to(tl.int64), tl.load(dst + row).to(tl.int64)
        at = state + head.to(tl.int64) * s_h + (ps[:, None] * s_p + ns[None, :] * s_n)
        stop = end - begin
        if SEG > 0:
            stop = tl.minimum(stop, first + SEG)
            own = sums + head.to(tl.int64) * (P * N) + (ps[:, None] * N + ns[None, :])
            S = _started(own, falls + head, tile - first // SEG, tile, s_ok, H, P * N, BP, BN)
        else:
            S = tl.load(at + slot * s_slot, mask=s_ok & (slot >= 0), other=0.0).to(tl.float32)
        token, group = begin.to(tl.int64) + first, head // R
        x_row, o_row = x + token * x_t + head * x_h, out + token * out_t + head * out_h
        b_row, c_row = B + token * b_t + group * b_g, C + token * c_t + group * c_g
        z_row, z_at = z + token * z_t + head * z_h, t[None, :] * z_t + ps[:, None]
        o_at = t[None, :] * out_t + ps[:, None]
        chunk = begin // BT + row + first // BT
        part = factors + (chunk * H + head).to(tl.int64) * (3 * BT)
        matrix = scores + (chunk * (H // R) + group).to(tl.int64) * (BT * BT)
        skip = tl.load(D + head) if HAS_D else 0.0
        for done in range(first, stop, BT):
            live = done + t < stop
            o_ok = p_ok[:, None] & live[None, :]
            y, S = _chunk(
                S, x_row, b_row, c_row, part, matrix, skip, stop - done, ps, p_ok, ns, n_ok,
                x_t, b_t, c_t, BT, BJ, PRECISION, WIDE, EXACT,
            )  # fmt: skip
            if HAS_Z:
                y *= SILU(tl.load(z_row + z_at, mask=o_ok, other=0.0).to(tl.float32))
                z_row += BT * z_t
            tl.store(o_row + o_at, y.to(out.dtype.element_ty), mask=o_ok)
            if TRACK:
                count = tl.minimum(done + BT, end - begin)
                for i in range(0, points):
                    kept = tracked(track, points, row, count, i)
                    tl.store(at + kept * s_slot, S.to(state.dtype.element_ty),
                             mask=s_ok & (kept >= 0))  # fmt: skip
            x_row += BT * x_t
            b_row += BT * b_t
            c_row += BT * c_t
            o_row += BT * out_t
            part += H * 3 * BT
            matrix += (H // R) * BT * BT
        tl.store(at + last * s_slot, S.to(state.dtype.element_ty),
                 mask=s_ok & (last >= 0) & (stop == end - begin))  # fmt: skip
