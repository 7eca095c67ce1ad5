"""Draft tokens of heads that decay as a whole, and the commit of an accepted path.

The state is read once and never written. A token of a tree reads the committed state through its
own C and adds what its path has added since: every ancestor's update, met by B.C and decayed by
the tokens behind it. Commit replays a path from its tip to its root in the same way.
"""

# ruff: noqa: ANN201
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl

from hal_triton.kernels.chain import chain
from hal_triton.scan.kernels.step import advance, read_skip, read_step


@triton.jit
def clear_pads(out, begin, end, out_t, ps, p_ok, BP: tl.constexpr):
    """Zeros for the tokens from `begin` to `end`."""
    for t in range(begin, end):
        n = tl.zeros((), tl.int64) + t
        tl.store(out + n * out_t + ps, tl.zeros((BP,), out.dtype.element_ty), mask=p_ok)


@triton.jit(do_not_specialize=["rows", "tokens"])
def scan_verify(
    x, dt, A, B, C, D, dt_bias, z, state, src, query_start_loc, parents,
    keys, updates, decays, kept_parents, out,
    rows, tokens, x_t, x_h, dt_t, b_t, b_g, c_t, c_g, z_t, z_h, out_t, out_h,
    s_slot, s_h, s_p, s_n, least, most,
    H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BP: tl.constexpr,
    BN: tl.constexpr, TREE: tl.constexpr, DT: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, CHANNEL: tl.constexpr, SILU: tl.constexpr,
    CHAIN: tl.constexpr,
):  # fmt: skip
    """Run one row over BP channels of one head; row `rows` clears the outputs of the pads.

    keys `[T, H, N]`, updates `[T, H, P]` and decays `[T, H]` are what commit replays.
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
        slot, group = tl.load(src + row).to(tl.int64), head // R
        at = state + head.to(tl.int64) * s_h + (ps[:, None] * s_p + ns[None, :] * s_n)
        ok = p_ok[:, None] & n_ok[None, :] & (slot >= 0) & (begin < end)
        S = tl.load(at + slot * s_slot, mask=ok, other=0.0).to(tl.float32)
        rate, skip = tl.load(A + head), read_skip(D, head, ps, p_ok, P, HAS_D, False)
        for t in range(begin, end):
            n = tl.zeros((), tl.int64) + t
            value = tl.load(x + n * x_t + head * x_h + ps, mask=p_ok, other=0.0).to(tl.float32)
            key = tl.load(B + n * b_t + group * b_g + ns, mask=n_ok, other=0.0).to(tl.float32)
            query = tl.load(C + n * c_t + group * c_g + ns, mask=n_ok, other=0.0).to(tl.float32)
            d = read_step(dt + n * dt_t, dt_bias, head, ps, p_ok, n >= 0, least, most, P, DT,
                          HAS_BIAS, False)  # fmt: skip
            parent = t - begin - 1
            if TREE:
                parent = tl.load(parents + t)
                y, left = tl.zeros((BP,), tl.float32), tl.full((), 1.0, tl.float32)
                above = t - begin
                while above >= 0:
                    m = tl.zeros((), tl.int64) + begin + above
                    old = tl.load(x + m * x_t + head * x_h + ps, mask=p_ok, other=0.0)
                    old_key = tl.load(B + m * b_t + group * b_g + ns, mask=n_ok, other=0.0)
                    old_d = read_step(dt + m * dt_t, dt_bias, head, ps, p_ok, m >= 0, least, most,
                                      P, DT, HAS_BIAS, False)  # fmt: skip
                    met = tl.sum(old_key.to(tl.float32) * query, 0)
                    y += left * met * (old_d * old.to(tl.float32))
                    left *= tl.exp(old_d * rate)
                    above = tl.load(parents + begin + above)
                y += left * tl.sum(S * query[None, :], 1)
            else:
                S = advance(S, value, d, rate, key, False)
                y = tl.sum(S * query[None, :], 1)
            y += skip * value
            if HAS_Z:
                gate = tl.load(z + n * z_t + head * z_h + ps, mask=p_ok, other=0.0)
                y *= SILU(gate.to(tl.float32))
            tl.store(out + n * out_t + head * out_h + ps, y.to(out.dtype.element_ty), mask=p_ok)
            tl.store(updates + (n * H + head) * P + ps, d * value, mask=p_ok)
            if pid % tiles == 0:
                tl.store(keys + (n * H + head) * N + ns, key, mask=n_ok)
                tl.store(decays + n * H + head, tl.exp(d * rate))
                tl.store(kept_parents + n, parent, mask=head == 0)


@triton.jit
def scan_commit(
    state, keys, updates, decays, parents, src, dst, query_start_loc, last,
    s_slot, s_h, s_p, s_n,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
    CHAIN: tl.constexpr,
):  # fmt: skip
    """Add the updates of the path to `last` to one tile of `src` and write `dst`."""
    chain(CHAIN)
    tiles: tl.constexpr = (P + BP - 1) // BP
    pid = tl.program_id(0)
    head, row = (pid // tiles) % H, pid // (tiles * H)
    begin, end = tl.load(query_start_loc + row), tl.load(query_start_loc + row + 1)
    slot, to = tl.load(src + row).to(tl.int64), tl.load(dst + row).to(tl.int64)
    above = tl.load(last + row)
    if (begin < end) & (to >= 0) & (above >= 0):
        ns, ps = tl.arange(0, BN), (pid % tiles) * BP + tl.arange(0, BP)
        n_ok, p_ok = ns < N, ps < P
        at = state + head.to(tl.int64) * s_h + (ps[:, None] * s_p + ns[None, :] * s_n)
        ok = p_ok[:, None] & n_ok[None, :]
        S = tl.load(at + slot * s_slot, mask=ok & (slot >= 0), other=0.0).to(tl.float32)
        added, left = tl.zeros((BP, BN), tl.float32), tl.full((), 1.0, tl.float32)
        while above >= 0:
            n = (tl.zeros((), tl.int64) + begin + above) * H + head
            update = tl.load(updates + n * P + ps, mask=p_ok, other=0.0)
            key = tl.load(keys + n * N + ns, mask=n_ok, other=0.0)
            added += (left * update)[:, None] * key[None, :]
            left *= tl.load(decays + n)
            above = tl.load(parents + begin + above)
        tl.store(at + to * s_slot, (S * left + added).to(state.dtype.element_ty), mask=ok)
