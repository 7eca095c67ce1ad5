"""The gated RMS norm behind the recurrence."""

# ruff: noqa: ANN201
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl

from hal_triton.kernels.chain import chain
from hal_triton.kernels.math import inverse_rms, sigmoid


@triton.jit(do_not_specialize=["count", "rows"])
def gated_norm(
    o, z, weight, src, dst, out, o_t, o_h, z_t, z_h, out_t, out_h, count, rows, eps,
    HV: tl.constexpr, V: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr, SILU: tl.constexpr,
    PADS: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """rms(o) * weight, times silu(z) or sigmoid(z), for BR of `count` (token, head) pairs.

    `out` may be o. Pads give zeros whatever o and z hold: PADS "rows" means that tokens are rows
    and pads have neither slot, "tail" that `src` is query_start_loc and pads lie behind its end.
    """
    chain(CHAIN)
    i = tl.program_id(0) * BR + tl.arange(0, BR)
    vs = tl.arange(0, BV)
    ok = (i < count)[:, None] & (vs < V)[None, :]
    token, head = (i // HV).to(tl.int64)[:, None], (i % HV)[:, None]
    live = ok
    if PADS == "rows":
        row = tl.minimum(i, count - 1) // HV
        live = ok & ((tl.load(src + row) >= 0) | (tl.load(dst + row) >= 0))[:, None]
    elif PADS == "tail":
        live = ok & (token < tl.load(src + rows))
    at, gate_at = o + token * o_t + head * o_h, z + token * z_t + head * z_h
    x = tl.load(at + vs[None, :], mask=live, other=0.0).to(tl.float32)
    gate = tl.load(gate_at + vs[None, :], mask=live, other=0.0).to(tl.float32)
    x *= inverse_rms(x, V, eps, 1)[:, None]
    x *= tl.load(weight + vs, mask=vs < V, other=0.0).to(tl.float32)[None, :]
    x *= gate * sigmoid(gate) if SILU else sigmoid(gate)
    to = out + token * out_t + head * out_h + vs[None, :]
    tl.store(to, x.to(out.dtype.element_ty), mask=ok)
