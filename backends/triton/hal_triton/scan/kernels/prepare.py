"""What a chunk of BT tokens needs before its start state is known, for all chunks at once.

Within a chunk G_i is the sum of d A up to token i. The products of B and C belong to a group, so
that they are made once for all its heads.
"""

# ruff: noqa: ANN201
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl

from hal_triton.kernels.rows import find_tile
from hal_triton.scan.kernels.step import step_of


@triton.jit
def _clear(out, at, live, out_t, out_h, first, R: tl.constexpr, P: tl.constexpr, BT: tl.constexpr,
           BP: tl.constexpr):  # fmt: skip
    """Zeros for the live tokens of a tile of pads, R heads from `first` on."""
    t, ps = tl.arange(0, BT), tl.arange(0, BP)
    to = out + at * out_t + (t[:, None] * out_t + ps[None, :])
    for head in range(first, first + R):
        tl.store(to + head * out_h, tl.zeros((BT, BP), out.dtype.element_ty),
                 mask=live[:, None] & (ps < P)[None, :])  # fmt: skip


@triton.jit
def _factors(
    dt, A, dt_bias, factors, at, live, place, first, dt_t, least, most,
    H: tl.constexpr, R: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, DT: tl.constexpr,
    HAS_BIAS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """G in powers of two and d of every token, BR heads at a time.

    A strong decay leaves G large and differences of G few digits: EXACT sums in float64 and keeps
    what float32 loses beside it.
    """
    t, r = tl.arange(0, BT), tl.arange(0, BR)
    for block in range(0, R, BR):
        head, ok = first + block + r, block + r < R
        both = live[:, None] & ok[None, :]
        rate = tl.load(A + head, mask=ok, other=0.0) * 1.4426950408889634
        if DT == "one":
            d = tl.where(both, 1.0, 0.0)
        else:
            raw = tl.load(dt + at * dt_t + (t[:, None] * dt_t + head[None, :]), mask=both,
                          other=0.0).to(tl.float32)  # fmt: skip
            bias = tl.load(dt_bias + head, mask=ok, other=0.0)[None, :] if HAS_BIAS else 0.0
            d = tl.where(both, step_of(raw, bias, least, most, DT), 0.0)
        to = factors + (place * H + head)[None, :].to(tl.int64) * (3 * BT) + t[:, None]
        if EXACT:
            whole = tl.cumsum(d.to(tl.float64) * rate[None, :].to(tl.float64), 0)
            G = whole.to(tl.float32)
            tl.store(to + 2 * BT, (whole - G.to(tl.float64)).to(tl.float32), mask=ok[None, :])
        else:
            G = tl.cumsum(d * rate[None, :], 0)
        tl.store(to, G, mask=ok[None, :])
        tl.store(to + BT, d, mask=ok[None, :])


@triton.jit(do_not_specialize=["rows", "tokens"])
def scan_prepare(
    dt, A, B, C, dt_bias, query_start_loc, scores, factors, out,
    rows, tokens, dt_t, b_g, c_g, out_t, out_h, least, most,
    b_t: tl.constexpr, c_t: tl.constexpr, H: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    N: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr,
    DT: tl.constexpr, HAS_BIAS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Prepare one chunk of one group; the chunks of the pads clear their output.

    scores `[tiles, G, BT, BT]`: B_j.C_i, j first, zero where j > i. factors `[tiles, H, 3, BT]`:
    G, d, and the rest of G where EXACT.
    """
    groups: tl.constexpr = H // R
    group, tile = tl.program_id(0) % groups, tl.program_id(0) // groups
    row, begin, end, first = find_tile(query_start_loc, rows, tokens, tile, BT)
    t = tl.arange(0, BT)
    live = first + t < end - begin
    at = begin.to(tl.int64) + first
    if first < end - begin:
        if row == rows:
            _clear(out, at, live, out_t, out_h, group * R, R, P, BT, BP)
        else:
            ns = tl.arange(0, BN)
            ok = live[:, None] & (ns < N)[None, :]
            keys = tl.load(B + at * b_t + group * b_g + (t[:, None] * b_t + ns[None, :]), mask=ok,
                           other=0.0)  # fmt: skip
            queries = tl.load(C + at * c_t + group * c_g + (t[:, None] * c_t + ns[None, :]),
                              mask=ok, other=0.0)  # fmt: skip
            score = tl.dot(keys, tl.trans(queries), input_precision="ieee")
            score = tl.where(t[:, None] <= t[None, :], score, 0.0)
            place = (tile * groups + group).to(tl.int64)
            to = scores + place * (BT * BT) + (t[:, None] * BT + t[None, :])
            tl.store(to, score.to(scores.dtype.element_ty))
            _factors(dt, A, dt_bias, factors, at, live, tile, group * R, dt_t, least, most, H, R,
                     BT, BR, DT, HAS_BIAS, EXACT)  # fmt: skip
