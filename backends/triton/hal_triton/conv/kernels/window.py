"""Where a window keeps its inputs, and how a row's newest ones are stored."""

# ruff: noqa: ANN201, RUF005
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"

import triton
import triton.language as tl


@triton.jit
def held_row(start, at, W: tl.constexpr, RING: tl.constexpr):
    """The window row of the input `at` tokens after `start`, where at is in -(W-1) .. -1.

    A ring keeps the input of position p in row p modulo W.
    """
    if RING:
        return (start + at + W) % W
    else:
        return at + (W - 1)


@triton.jit
def read_input(x, gate, at, gate_at, mask, GATED: tl.constexpr):
    """The conv's input in float32; a gated one is the product, rounded as the state keeps it."""
    value = tl.load(x + at, mask=mask, other=0.0)
    if GATED:
        other = tl.load(gate + gate_at, mask=mask, other=0.0)
        value = (value.to(tl.float32) * other.to(tl.float32)).to(x.dtype.element_ty)
    return value.to(tl.float32)


@triton.jit
def keep_window(
    x, gate, old, new, start, count, cs, channel_ok, has_old, x_t, gate_t, s_c, s_j,
    W: tl.constexpr, RING: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Store the last W-1 of (old window ++ the row's first `count` inputs) at `new`.

    x and gate point at the row's first token. Everything is loaded before anything is stored: old
    and new may be one window, and a store that waits for its value holds back the loads behind it.
    """
    values = ()
    for j in tl.static_range(W - 1):
        at = count - (W - 1) + j
        fresh = channel_ok & (at >= 0)
        at64 = at.to(tl.int64)
        value = read_input(x, gate, at64 * x_t + cs, at64 * gate_t + cs, fresh, GATED)
        held = channel_ok & (at < 0) & has_old
        value += tl.load(
            old + held_row(start, at, W, RING) * s_j + cs * s_c, mask=held, other=0.0
        ).to(tl.float32)
        values = values + (value,)
    for j in tl.static_range(W - 1):
        row = (start + count - (W - 1) + j + W) % W if RING else j
        value = values[j].to(new.dtype.element_ty)
        tl.store(new + row * s_j + cs * s_c, value, mask=channel_ok)
