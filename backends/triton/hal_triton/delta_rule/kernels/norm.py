"""The gated RMS norm behind the recurrence, in place."""

# ruff: noqa: ANN201
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl

from hal_triton.kernels.math import sigmoid


@triton.jit(do_not_specialize=["count"])
def gated_norm(
    o, z, weight, src, dst, o_t, o_h, z_t, z_h, count, eps,
    HV: tl.constexpr, V: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr, SILU: tl.constexpr,
    PADS: tl.constexpr,
):  # fmt: skip
    """rms(o) * weight, times silu(z) or sigmoid(z), for BR of `count` (token, head) pairs.

    With PADS the tokens are rows, and those with neither slot stay zero whatever z holds.
    """
    i = tl.program_id(0) * BR + tl.arange(0, BR)
    vs = tl.arange(0, BV)
    ok = (i < count)[:, None] & (vs < V)[None, :]
    token, head = (i // HV).to(tl.int64)[:, None], (i % HV)[:, None]
    if PADS:
        row = tl.minimum(i, count - 1) // HV
        live = (tl.load(src + row) >= 0) | (tl.load(dst + row) >= 0)
        ok = ok & live[:, None]
    at = o + token * o_t + head * o_h + vs[None, :]
    x = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    gate = tl.load(z + token * z_t + head * z_h + vs[None, :], mask=ok, other=0.0).to(tl.float32)
    x *= 1.0 / tl.sqrt(tl.sum(x * x, 1) / V + eps)[:, None]
    x *= tl.load(weight + vs, mask=vs < V, other=0.0).to(tl.float32)[None, :]
    x *= gate * sigmoid(gate) if SILU else sigmoid(gate)
    tl.store(at, x.to(o.dtype.element_ty), mask=ok)
