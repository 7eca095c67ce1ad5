"""One token of the recurrence: its step, its inputs, and what a tile of one head makes of them."""

# ruff: noqa: ANN201
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl

from hal_triton.kernels.math import softplus


@triton.jit
def step_of(raw, bias, least, most, DT: tl.constexpr):
    """d of a raw dt, in float32: bias, softplus and limit are applied here and only here."""
    d = raw + bias
    if DT == "softplus":
        d = softplus(d)
    return tl.minimum(tl.maximum(d, least), most)


@triton.jit
def read_step(
    dt, dt_bias, at, ps, p_ok, ok, least, most, P: tl.constexpr, DT: tl.constexpr,
    HAS_BIAS: tl.constexpr, CHANNEL: tl.constexpr,
):  # fmt: skip
    """d of one token of head `at`: a number, or one for each channel; `dt` points to the token."""
    if DT == "one":
        return tl.where(p_ok, 1.0, 0.0) if CHANNEL else tl.full((), 1.0, tl.float32)
    elif CHANNEL:
        raw = tl.load(dt + at * P + ps, mask=p_ok & ok, other=0.0).to(tl.float32)
        bias = tl.load(dt_bias + at * P + ps, mask=p_ok, other=0.0) if HAS_BIAS else 0.0
        return step_of(raw, bias, least, most, DT)
    else:
        raw = tl.load(dt + at, mask=ok, other=0.0).to(tl.float32)
        bias = tl.load(dt_bias + at) if HAS_BIAS else 0.0
        return step_of(raw, bias, least, most, DT)


@triton.jit
def read_rate(A, at, ps, ns, ok, P: tl.constexpr, N: tl.constexpr, CHANNEL: tl.constexpr):
    """A of head `at`: a number, or `[BP, BN]` of its channels."""
    if CHANNEL:
        return tl.load(A + (at * P + ps)[:, None] * N + ns[None, :], mask=ok, other=0.0)
    else:
        return tl.load(A + at)


@triton.jit
def read_skip(
    D, at, ps, p_ok, P: tl.constexpr, HAS_D: tl.constexpr, CHANNEL: tl.constexpr
):  # fmt: skip
    """D of head `at`: a number, or one for each channel; 0 where there is none."""
    if not HAS_D:
        return 0.0
    elif CHANNEL:
        return tl.load(D + at * P + ps, mask=p_ok, other=0.0)
    else:
        return tl.load(D + at)


@triton.jit
def advance(S, x, d, rate, b, CHANNEL: tl.constexpr):
    """S exp(d A) + (d x) b^T of a tile `[BP, BN]`."""
    if CHANNEL:
        return S * tl.exp(d[:, None] * rate) + (d * x)[:, None] * b[None, :]
    else:
        return S * tl.exp(d * rate) + (d * x)[:, None] * b[None, :]
