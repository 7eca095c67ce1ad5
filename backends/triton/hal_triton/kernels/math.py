"""Activations, norms and gates in float32."""

# ruff: noqa: ANN201
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)); a strongly negative x gives 0 through an infinite exp, not NaN."""
    return 1.0 / (1.0 + tl.exp(tl.minimum(-x, 88.0)))


@triton.jit
def silu(x):
    """x * sigmoid(x), exactly; a provider may pass a faster form in its place."""
    return x * sigmoid(x)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), x itself above 20.

    Where exp(x) is small its series replaces the sum, which would lose every digit to the 1; above
    that, what the sum rounds away is added back.
    """
    e = tl.exp(tl.minimum(x, 20.0))
    small = e * (1.0 - e * (0.5 - e * (1.0 / 3.0)))
    u = 1.0 + e
    large = tl.log(u) + (e - (u - 1.0)) / u
    return tl.where(x > 20.0, x, tl.where(e < 0.01, small, large))


@triton.jit
def inverse_norm(x, axis: tl.constexpr):
    """1 / sqrt(sum(x * x) + 1e-6)."""
    return 1.0 / tl.sqrt(tl.sum(x * x, axis) + 1e-6)


@triton.jit
def inverse_rms(x, count, eps, axis: tl.constexpr):
    """1 / sqrt(mean(x * x) + eps) of `count` elements."""
    return 1.0 / tl.sqrt(tl.sum(x * x, axis) / count + eps)


@triton.jit
def log_decay(a, A_log, dt_bias, lower_bound, GATE: tl.constexpr):
    """The log decay of a raw a by kind of gate; "ready" gives a back."""
    if GATE == "ready":
        return a
    elif GATE == "safe":
        return lower_bound * sigmoid(tl.exp(A_log) * (a + dt_bias))
    else:
        return -tl.exp(A_log) * softplus(a + dt_bias)


@triton.jit
def learning_rate(b, beta_scale, GATE: tl.constexpr):
    """Beta of a raw b; "ready" gives b back."""
    if GATE == "ready":
        return b
    else:
        return beta_scale * sigmoid(b)
