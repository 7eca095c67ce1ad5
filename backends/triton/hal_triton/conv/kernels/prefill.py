"""The convolution over packed rows: a program walks down a span of one row's tokens.

It carries the last W-1 inputs in registers, so that an input is read once, and takes BG tokens a
step: their loads go out together, before the stores of the step, which would hold them back.
"""

# ruff: noqa: ANN201
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"

import triton
import triton.language as tl

from hal_triton.conv.kernels.window import held_row, keep_window, read_input
from hal_triton.kernels.rows import find_tile, tracked


@triton.jit
def _store_windows(
    x, gate, state, dst, track, row, length, start, slot, points, cs, channel_ok,
    x_t, gate_t, s_slot, s_c, s_j, W: tl.constexpr, RING: tl.constexpr, GATED: tl.constexpr,
    TRACK: tl.constexpr,
):  # fmt: skip
    """Store the row's track points, then its end: in place, the end destroys what tracks read."""
    old = state + slot * s_slot
    if TRACK:
        for i in range(0, points):
            count = tl.load(track + i * 3 + 1)
            kept = tracked(track, points, row, count, i)
            if kept >= 0:
                keep_window(x, gate, old, state + kept * s_slot, start, count, cs, channel_ok,
                            slot >= 0, x_t, gate_t, s_c, s_j, W, RING, GATED)  # fmt: skip
    last = tl.load(dst + row).to(tl.int64)
    if last >= 0:
        keep_window(x, gate, old, state + last * s_slot, start, length, cs, channel_ok,
                    slot >= 0, x_t, gate_t, s_c, s_j, W, RING, GATED)  # fmt: skip


@triton.jit
def _before(
    x, gate, window, first, start, cs, ok, has_old, x_t, gate_t, s_j,
    W: tl.constexpr, RING: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The W-1 inputs before the row's token `first`, oldest first, from the row or its window."""
    held = ()
    for j in tl.static_range(W - 1):
        at = first - (W - 1) + j
        at64 = at.to(tl.int64)
        value = read_input(x, gate, at64 * x_t + cs, at64 * gate_t + cs, ok & (at >= 0), GATED)
        old = tl.load(window + held_row(start, at, W, RING) * s_j, mask=ok & (at < 0) & has_old,
                      other=0.0)  # fmt: skip
        held = held + (value + old.to(tl.float32),)  # noqa: RUF005
    return held


@triton.jit
def read_taps(
    weight, bias, cs, ok, w_c, w_j, W: tl.constexpr, BC: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """The W taps and the bias of channels `cs`, in float32."""
    taps = ()
    for j in tl.static_range(W):
        tap = tl.load(weight + cs * w_c + j * w_j, mask=ok, other=0.0)
        taps = taps + (tap.to(tl.float32),)  # noqa: RUF005
    offset = tl.zeros((BC,), tl.float32)
    if HAS_BIAS:
        offset += tl.load(bias + cs, mask=ok, other=0.0).to(tl.float32)
    return taps, offset


@triton.jit
def _step(
    x, gate, gate_out, out, held, taps, offset, left, cs, channel_ok, x_t, gate_t, gate_out_t,
    out_t, W: tl.constexpr, BG: tl.constexpr, GATED: tl.constexpr, ACTIVATE: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """Convolve the next BG tokens, of which `left` exist; gives the last W-1 inputs."""
    inputs, factors = held, ()
    for r in tl.static_range(BG):
        ok = channel_ok & (r < left)
        fresh = read_input(x, gate, r * x_t + cs, r * gate_t + cs, ok, GATED)
        inputs = inputs + (fresh,)  # noqa: RUF005
        if GATED:
            factor = tl.load(gate_out + r * gate_out_t + cs, mask=ok, other=0.0)
            factors = factors + (factor,)  # noqa: RUF005
    for r in tl.static_range(BG):
        total = offset
        for j in tl.static_range(W):
            total += inputs[r + j] * taps[j]
        if ACTIVATE:
            total = SILU(total)
        if GATED:
            total = total * factors[r].to(tl.float32)
        tl.store(out + r * out_t + cs, total.to(out.dtype.element_ty),
                 mask=channel_ok & (r < left))  # fmt: skip
    last = ()
    for j in tl.static_range(W - 1):
        last = last + (inputs[BG + j],)  # noqa: RUF005
    return last


@triton.jit(do_not_specialize=["rows", "tokens", "points"])
def conv_prefill(
    x, gate, gate_out, weight, bias, state, src, dst, start_at, query_start_loc, track, out,
    rows, tokens, points, channels, x_t, gate_t, gate_out_t, w_c, w_j, s_slot, s_c, s_j, out_t,
    W: tl.constexpr, BT: tl.constexpr, BG: tl.constexpr, BC: tl.constexpr, EVEN: tl.constexpr,
    RING: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, TRACK: tl.constexpr,
    ACTIVATE: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Convolve BT tokens of BC channels; the row's first program alone writes the row's end."""
    blocks = tl.cdiv(channels, BC)
    cs = (tl.program_id(0) % blocks) * BC + tl.arange(0, BC)
    channel_ok = cs >= 0 if EVEN else cs < channels
    row, begin, end, first = find_tile(
        query_start_loc, rows, tokens, tl.program_id(0) // blocks, BT
    )
    length = end - begin
    stop = tl.minimum(first + BT, length)
    at = begin.to(tl.int64)
    if row == rows:
        for n in range(first, stop):
            tl.store(out + (at + n) * out_t + cs, tl.zeros((BC,), out.dtype.element_ty),
                     mask=channel_ok)  # fmt: skip
    elif first < length:
        slot = tl.load(src + row).to(tl.int64)
        start = tl.load(start_at + row)
        held = _before(x + at * x_t, gate + at * gate_t, state + slot * s_slot + cs * s_c, first,
                       start, cs, channel_ok, slot >= 0, x_t, gate_t, s_j, W, RING,
                       GATED)  # fmt: skip
        taps, offset = read_taps(weight, bias, cs, channel_ok, w_c, w_j, W, BC, HAS_BIAS)
        for n in range(first, stop, BG):
            token = at + n
            held = _step(
                x + token * x_t, gate + token * gate_t, gate_out + token * gate_out_t,
                out + token * out_t, held, taps, offset, stop - n, cs, channel_ok, x_t, gate_t,
                gate_out_t, out_t, W, BG, GATED, ACTIVATE, SILU,
            )  # fmt: skip
        if first == 0:
            # every warp has to have read the window before any of them writes it
            tl.debug_barrier()
            _store_windows(
                x + at * x_t, gate + at * gate_t, state, dst, track, row, length, start, slot,
                points, cs, channel_ok, x_t, gate_t, s_slot, s_c, s_j, W, RING, GATED, TRACK,
            )  # fmt: skip
