"""One token a row: every program owns BP channels of one head's state."""

# ruff: noqa: ANN201
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl

from hal_triton.kernels.chain import chain
from hal_triton.scan.kernels.step import advance, read_rate, read_skip, read_step


@triton.jit
def scan_decode(
    x, dt, A, B, C, D, dt_bias, z, state, src, dst, out,
    x_t, x_h, dt_t, b_t, b_g, c_t, c_g, z_t, z_h, out_t, out_h, s_slot, s_h, least, most,
    s_p: tl.constexpr, s_n: tl.constexpr, H: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    N: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, DT: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr, CHANNEL: tl.constexpr,
    SILU: tl.constexpr, EVICT: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """Advance one tile in place or from `src` to `dst`; a row with neither slot gives zeros.

    Strides within a head's state are constants, so that its addresses are one register. Nothing is
    stored before everything is loaded.
    """
    chain(CHAIN)
    tiles: tl.constexpr = (P + BP - 1) // BP
    pid = tl.program_id(0)
    head, row = (pid // tiles) % H, (pid // (tiles * H)).to(tl.int64)
    ns, ps = tl.arange(0, BN), (pid % tiles) * BP + tl.arange(0, BP)
    n_ok = ns >= 0 if BN == N else ns < N
    p_ok = ps >= 0 if P % BP == 0 else ps < P
    slot, last = tl.load(src + row).to(tl.int64), tl.load(dst + row).to(tl.int64)
    to = out + row * out_t + head * out_h + ps
    if (slot >= 0) | (last >= 0):
        at = head.to(tl.int64) * s_h + (ps[:, None] * s_p + ns[None, :] * s_n)
        ok = p_ok[:, None] & n_ok[None, :]
        S = tl.load(state + slot * s_slot + at, mask=ok & (slot >= 0), other=0.0,
                    eviction_policy=EVICT).to(tl.float32)  # fmt: skip
        group = head // R
        value = tl.load(x + row * x_t + head * x_h + ps, mask=p_ok, other=0.0).to(tl.float32)
        key = tl.load(B + row * b_t + group * b_g + ns, mask=n_ok, other=0.0).to(tl.float32)
        query = tl.load(C + row * c_t + group * c_g + ns, mask=n_ok, other=0.0).to(tl.float32)
        d = read_step(dt + row * dt_t, dt_bias, head, ps, p_ok, row >= 0, least, most, P, DT,
                      HAS_BIAS, CHANNEL)  # fmt: skip
        rate = read_rate(A, head, ps, ns, ok, P, N, CHANNEL)
        skip = read_skip(D, head, ps, p_ok, P, HAS_D, CHANNEL)
        if HAS_Z:
            gate = tl.load(z + row * z_t + head * z_h + ps, mask=p_ok, other=0.0).to(tl.float32)
        S = advance(S, value, d, rate, key, CHANNEL)
        y = tl.sum(S * query[None, :], 1) + skip * value
        if HAS_Z:
            y *= SILU(gate)
        tl.store(to, y.to(out.dtype.element_ty), mask=p_ok)
        tl.store(state + last * s_slot + at, S.to(state.dtype.element_ty), mask=ok & (last >= 0),
                 eviction_policy=EVICT)  # fmt: skip
    else:
        tl.store(to, tl.zeros((BP,), out.dtype.element_ty), mask=p_ok)
