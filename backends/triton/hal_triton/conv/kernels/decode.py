"""The convolution of one token a row."""

# ruff: noqa: ANN201, RUF005
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"

import triton
import triton.language as tl

from hal_triton.conv.kernels.window import held_row, read_input
from hal_triton.kernels.chain import chain


@triton.jit
def conv_decode(
    x, gate, gate_out, weight, bias, state, src, dst, start_at, out,
    channels, x_t, gate_t, gate_out_t, w_c, w_j, s_slot, s_c, s_j, out_t,
    W: tl.constexpr, BC: tl.constexpr, EVEN: tl.constexpr, RING: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr, ACTIVATE: tl.constexpr, SILU: tl.constexpr,
    CHAIN: tl.constexpr,
):  # fmt: skip
    """Convolve BC channels of one row and move its window on.

    A window moves by shifting W-1 rows; a ring takes one new row, and the others only where the
    row goes to another slot. Nothing is stored before everything is loaded, and a pad's inputs
    are read like any others: only the window waits for the slot.
    """
    chain(CHAIN)
    blocks = tl.cdiv(channels, BC)
    cs = (tl.program_id(0) % blocks) * BC + tl.arange(0, BC)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    ok = cs >= 0 if EVEN else cs < channels
    slot, last = tl.load(src + row).to(tl.int64), tl.load(dst + row).to(tl.int64)
    start = tl.load(start_at + row)
    newest = read_input(x, gate, row * x_t + cs, row * gate_t + cs, ok, GATED)
    if GATED:
        after = tl.load(gate_out + row * gate_out_t + cs, mask=ok, other=0.0).to(tl.float32)
    old, new = state + slot * s_slot + cs * s_c, state + last * s_slot + cs * s_c
    window, taps = (), ()
    for j in tl.static_range(W - 1):
        at = old + held_row(start, j - (W - 1), W, RING) * s_j
        window = window + (tl.load(at, mask=ok & (slot >= 0), other=0.0),)
        taps = taps + (tl.load(weight + cs * w_c + j * w_j, mask=ok, other=0.0),)
    tap = tl.load(weight + cs * w_c + (W - 1) * w_j, mask=ok, other=0.0)
    total = newest * tap.to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + cs, mask=ok, other=0.0).to(tl.float32)
    for j in tl.static_range(W - 1):
        total += window[j].to(tl.float32) * taps[j].to(tl.float32)
    if ACTIVATE:
        total = SILU(total)
    if GATED:
        total = total * after
    total = tl.where((slot >= 0) | (last >= 0), total, 0.0)
    tl.store(out + row * out_t + cs, total.to(out.dtype.element_ty), mask=ok)
    moves = (last >= 0) & (slot != last) if RING else last >= 0
    for j in tl.static_range(1, W - 1):
        to = held_row(start, j - (W - 1), W, True) if RING else j - 1
        tl.store(new + to * s_j, window[j], mask=ok & moves)
    to = start % W if RING else W - 2
    tl.store(new + to * s_j, newest.to(state.dtype.element_ty), mask=ok & (last >= 0))
