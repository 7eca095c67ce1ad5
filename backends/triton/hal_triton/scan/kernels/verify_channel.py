"""Draft tokens of Mamba-1 and the commit of one of them.

A channel's decay differs along N, so that an update is no smaller than a state: verify keeps the
state after every token, and commit copies one.
"""

# ruff: noqa: ANN201
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl

from hal_triton.kernels.chain import chain
from hal_triton.scan.kernels.step import advance, read_rate, read_skip, read_step
from hal_triton.scan.kernels.verify import clear_pads


@triton.jit(do_not_specialize=["rows", "tokens"])
def channel_verify(
    x, dt, A, B, C, D, dt_bias, z, state, src, query_start_loc, parents, states, kept_parents, out,
    rows, tokens, x_t, x_h, dt_t, b_t, b_g, c_t, c_g, z_t, z_h, out_t, out_h,
    s_slot, s_h, s_p, s_n, least, most,
    H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BP: tl.constexpr,
    BN: tl.constexpr, TREE: tl.constexpr, DT: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, CHANNEL: tl.constexpr, SILU: tl.constexpr,
    CHAIN: tl.constexpr,
):  # fmt: skip
    """Run one row over BP channels of one group; row `rows` clears the outputs of the pads.

    states `[T, I, N]`. A program reads back only what it has written itself, behind a barrier.
    """
    chain(CHAIN)
    tiles: tl.constexpr = (P + BP - 1) // BP
    pid = tl.program_id(0)
    head, row = (pid // tiles) % H, pid // (tiles * H)
    ns, ps = tl.arange(0, BN), (pid % tiles) * BP + tl.arange(0, BP)
    n_ok, p_ok = ns < N, ps < P
    begin, end = tl.load(query_start_loc + row), tokens
    if row == rows:
        clear_pads(out + head * out_h, begin, end, out_t, ps, p_ok, BP)
    else:
        end = tl.load(query_start_loc + row + 1)
        slot = tl.load(src + row).to(tl.int64)
        at = state + head.to(tl.int64) * s_h + (ps[:, None] * s_p + ns[None, :] * s_n)
        ok = p_ok[:, None] & n_ok[None, :]
        S = tl.load(at + slot * s_slot, mask=ok & (slot >= 0) & (begin < end), other=0.0)
        S = S.to(tl.float32)
        rate = read_rate(A, head, ps, ns, ok, P, N, True)
        skip = read_skip(D, head, ps, p_ok, P, HAS_D, True)
        keep = states + (head * P + ps)[:, None] * N + ns[None, :]
        for t in range(begin, end):
            n = tl.zeros((), tl.int64) + t
            value = tl.load(x + n * x_t + head * x_h + ps, mask=p_ok, other=0.0).to(tl.float32)
            key = tl.load(B + n * b_t + head * b_g + ns, mask=n_ok, other=0.0).to(tl.float32)
            query = tl.load(C + n * c_t + head * c_g + ns, mask=n_ok, other=0.0).to(tl.float32)
            d = read_step(dt + n * dt_t, dt_bias, head, ps, p_ok, n >= 0, least, most, P, DT,
                          HAS_BIAS, True)  # fmt: skip
            parent = t - begin - 1
            if TREE:
                parent = tl.load(parents + t)
                m = tl.zeros((), tl.int64) + begin + tl.maximum(parent, 0)
                held = tl.load(keep + m * (H * P * N), mask=ok & (parent >= 0), other=0.0)
                after = advance(tl.where(parent >= 0, held, S), value, d, rate, key, True)
            else:
                S = advance(S, value, d, rate, key, True)
                after = S
            y = tl.sum(after * query[None, :], 1) + skip * value
            if HAS_Z:
                gate = tl.load(z + n * z_t + head * z_h + ps, mask=p_ok, other=0.0)
                y *= SILU(gate.to(tl.float32))
            tl.store(out + n * out_t + head * out_h + ps, y.to(out.dtype.element_ty), mask=p_ok)
            tl.store(keep + n * (H * P * N), after, mask=ok)
            tl.store(kept_parents + n, parent, mask=pid % (tiles * H) == 0)
            if TREE:
                tl.debug_barrier()


@triton.jit
def channel_commit(
    state, states, dst, query_start_loc, last, s_slot, s_h, s_p, s_n,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
    CHAIN: tl.constexpr,
):  # fmt: skip
    """Copy one tile of the state after token `last` of a row to `dst`."""
    chain(CHAIN)
    tiles: tl.constexpr = (P + BP - 1) // BP
    pid = tl.program_id(0)
    head, row = (pid // tiles) % H, pid // (tiles * H)
    begin, end = tl.load(query_start_loc + row), tl.load(query_start_loc + row + 1)
    to, token = tl.load(dst + row).to(tl.int64), tl.load(last + row)
    if (begin < end) & (to >= 0) & (token >= 0):
        ns, ps = tl.arange(0, BN), (pid % tiles) * BP + tl.arange(0, BP)
        ok = (ps < P)[:, None] & (ns < N)[None, :]
        n = tl.zeros((), tl.int64) + begin + token
        kept = tl.load(states + n * (H * P * N) + (head * P + ps)[:, None] * N + ns[None, :],
                       mask=ok, other=0.0)  # fmt: skip
        at = state + head.to(tl.int64) * s_h + (ps[:, None] * s_p + ns[None, :] * s_n)
        tl.store(at + to * s_slot, kept.to(state.dtype.element_ty), mask=ok)
