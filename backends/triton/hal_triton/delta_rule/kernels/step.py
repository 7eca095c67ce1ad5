"""One token of the recurrence: advance a tile of one head's state and read it."""

# ruff: noqa: ANN201
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl

from hal_triton.kernels.math import inverse_norm, learning_rate, log_decay


@triton.jit
def unit(x, factor, L2: tl.constexpr):
    """x times `factor`, normed before where L2 is set."""
    if L2:
        factor = factor * inverse_norm(x, 0)
    return x * factor


@triton.jit
def read_gates(
    a, b, A_log, dt_bias, head, ks, k_ok, lower_bound, beta_scale, GATE: tl.constexpr,
    CHANNEL: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """exp of the log decay, one number or one a key channel, and beta; a, b point at the head."""
    beta = learning_rate(tl.load(b).to(tl.float32), beta_scale, GATE)
    rate = tl.load(A_log + head) if GATE != "ready" else 0.0
    if CHANNEL:
        raw = tl.load(a + ks, mask=k_ok, other=0.0).to(tl.float32)
        bias = 0.0
        if GATE != "ready":
            bias = tl.load(dt_bias + head * K + ks, mask=k_ok, other=0.0)
        g = log_decay(raw, rate, bias, lower_bound, GATE)
    else:
        bias = tl.load(dt_bias + head) if GATE != "ready" else 0.0
        g = log_decay(tl.load(a).to(tl.float32), rate, bias, lower_bound, GATE)
    return tl.exp(g), beta


@triton.jit
def advance(S, q, k, v, decay, beta, CHANNEL: tl.constexpr):
    """S `[BV, BK]` after the token, and its output `[BV]`.

    The output is read off the old state, as (S + u k') q = S q + u (k' q): both products with S go
    out together, and where k' and q are nearly orthogonal, the rounding of S does not show.
    """
    S = S * (decay[None, :] if CHANNEL else decay)
    known, o = tl.sum(S * k[None, :], 1), tl.sum(S * q[None, :], 1)
    u = (v - known) * beta
    return S + u[:, None] * k[None, :], o + u * tl.sum(k * q, 0)
