"""Token after token over packed rows: the form for Mamba-1, whose decay differs along N."""

# ruff: noqa: ANN201
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl

from hal_triton.kernels.rows import tracked
from hal_triton.scan.kernels.step import advance, read_rate, read_skip, read_step


@triton.jit
def _inputs(
    x, dt, B, C, z, dt_bias, n, ok, head, group, ps, p_ok, ns, n_ok, least, most,
    x_t, x_h, dt_t, b_t, b_g, c_t, c_g, z_t, z_h,
    P: tl.constexpr, DT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_Z: tl.constexpr,
    CHANNEL: tl.constexpr,
):  # fmt: skip
    """What one tile needs of token `n`: x, d, B, C and z; zeros where not `ok`."""
    value = tl.load(x + n * x_t + head * x_h + ps, mask=p_ok & ok, other=0.0).to(tl.float32)
    key = tl.load(B + n * b_t + group * b_g + ns, mask=n_ok & ok, other=0.0).to(tl.float32)
    query = tl.load(C + n * c_t + group * c_g + ns, mask=n_ok & ok, other=0.0).to(tl.float32)
    d = read_step(dt + n * dt_t, dt_bias, head, ps, p_ok, ok, least, most, P, DT, HAS_BIAS, CHANNEL)
    gate = value
    if HAS_Z:
        gate = tl.load(z + n * z_t + head * z_h + ps, mask=p_ok & ok, other=0.0).to(tl.float32)
    return value, d, key, query, gate


@triton.jit(do_not_specialize=["rows", "tokens", "points"])
def scan_recurrent(
    x, dt, A, B, C, D, dt_bias, z, state, src, dst, query_start_loc, track, out,
    rows, tokens, points, x_t, x_h, dt_t, b_t, b_g, c_t, c_g, z_t, z_h, out_t, out_h,
    s_slot, s_h, s_p, s_n, least, most,
    H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BP: tl.constexpr,
    BN: tl.constexpr, TRACK: tl.constexpr, DT: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, CHANNEL: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Run one row over BP channels of one head; row `rows` clears the outputs of the pads.

    A token's inputs are loaded while the one before it is computed.
    """
    tiles: tl.constexpr = (P + BP - 1) // BP
    pid = tl.program_id(0)
    head, row = (pid // tiles) % H, pid // (tiles * H)
    ns, ps = tl.arange(0, BN), (pid % tiles) * BP + tl.arange(0, BP)
    n_ok, p_ok = ns < N, ps < P
    begin, end = tl.load(query_start_loc + row), tokens
    to = out + head * out_h + ps
    if row == rows:
        for t in range(begin, end):
            n = tl.zeros((), tl.int64) + t
            tl.store(to + n * out_t, tl.zeros((BP,), out.dtype.element_ty), mask=p_ok)
    else:
        end = tl.load(query_start_loc + row + 1)
        if begin < end:
            slot, last = tl.load(src + row).to(tl.int64), tl.load(dst + row).to(tl.int64)
            at = state + head.to(tl.int64) * s_h + (ps[:, None] * s_p + ns[None, :] * s_n)
            ok = p_ok[:, None] & n_ok[None, :]
            S = tl.load(at + slot * s_slot, mask=ok & (slot >= 0), other=0.0).to(tl.float32)
            group = head // R
            rate = read_rate(A, head, ps, ns, ok, P, N, CHANNEL)
            skip = read_skip(D, head, ps, p_ok, P, HAS_D, CHANNEL)
            n = tl.zeros((), tl.int64) + begin
            value, d, key, query, gate = _inputs(
                x, dt, B, C, z, dt_bias, n, n >= 0, head, group, ps, p_ok, ns, n_ok, least, most,
                x_t, x_h, dt_t, b_t, b_g, c_t, c_g, z_t, z_h, P, DT, HAS_BIAS, HAS_Z, CHANNEL,
            )  # fmt: skip
            for t in range(begin, end):
                n = tl.zeros((), tl.int64) + t
                coming = _inputs(
                    x, dt, B, C, z, dt_bias, n + 1, t + 1 < end, head, group, ps, p_ok, ns, n_ok,
                    least, most, x_t, x_h, dt_t, b_t, b_g, c_t, c_g, z_t, z_h, P, DT, HAS_BIAS,
                    HAS_Z, CHANNEL,
                )  # fmt: skip
                S = advance(S, value, d, rate, key, CHANNEL)
                y = tl.sum(S * query[None, :], 1) + skip * value
                if HAS_Z:
                    y *= SILU(gate)
                tl.store(to + n * out_t, y.to(out.dtype.element_ty), mask=p_ok)
                if TRACK:
                    for i in range(0, points):
                        kept = tracked(track, points, row, t + 1 - begin, i)
                        tl.store(at + kept * s_slot, S.to(state.dtype.element_ty),
                                 mask=ok & (kept >= 0))  # fmt: skip
                value, d, key, query, gate = coming
            tl.store(at + last * s_slot, S.to(state.dtype.element_ty), mask=ok & (last >= 0))
