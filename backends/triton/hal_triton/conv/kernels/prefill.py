"""The convolution over packed rows, one program a tile of tokens and channels."""

# ruff: noqa: ANN201
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

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


@triton.jit(do_not_specialize=["rows", "tokens", "points"])
def conv_prefill(
    x, gate, gate_out, weight, bias, state, src, dst, start_at, query_start_loc, track, out,
    rows, tokens, points, channels, x_t, gate_t, gate_out_t, w_c, w_j, s_slot, s_c, s_j, out_t,
    W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, EVEN: tl.constexpr, RING: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr, TRACK: tl.constexpr, ACTIVATE: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """Convolve one tile; the row's first tile alone reads its window and writes its end."""
    blocks = tl.cdiv(channels, BC)
    cs = (tl.program_id(0) % blocks) * BC + tl.arange(0, BC)
    channel_ok = cs >= 0 if EVEN else cs < channels
    row, begin, end, first = find_tile(
        query_start_loc, rows, tokens, tl.program_id(0) // blocks, BT
    )
    length = end - begin
    ts = first + tl.arange(0, BT)
    live = (ts < length)[:, None] & channel_ok[None, :]
    at = begin.to(tl.int64) + first
    n = tl.arange(0, BT)[:, None]
    c = cs[None, :]
    to = out + at * out_t + (n * out_t + c)
    if row == rows:
        if first < length:
            tl.store(to, tl.zeros((BT, BC), out.dtype.element_ty), mask=live)
    elif first < length:
        slot = tl.load(src + row).to(tl.int64)
        start = tl.load(start_at + row)
        token, token_gate = x + at * x_t, gate + at * gate_t
        total = tl.zeros((BT, BC), tl.float32)
        if HAS_BIAS:
            total += tl.load(bias + cs, mask=channel_ok, other=0.0).to(tl.float32)[None, :]
        if first > 0:
            for j in tl.static_range(W):
                tap = tl.load(weight + cs * w_c + j * w_j, mask=channel_ok, other=0.0)
                back = n - (W - 1 - j)
                value = read_input(
                    token, token_gate, back * x_t + c, back * gate_t + c, live, GATED
                )
                total += value * tap.to(tl.float32)[None, :]
        else:
            window = state + slot * s_slot + c * s_c
            for j in tl.static_range(W):
                tap = tl.load(weight + cs * w_c + j * w_j, mask=channel_ok, other=0.0)
                back = n - (W - 1 - j)
                own = live & (back >= 0)
                value = read_input(token, token_gate, back * x_t + c, back * gate_t + c, own, GATED)
                held = live & (back < 0) & (slot >= 0)
                value += tl.load(
                    window + held_row(start, back, W, RING) * s_j, mask=held, other=0.0
                ).to(tl.float32)
                total += value * tap.to(tl.float32)[None, :]
        if ACTIVATE:
            total = SILU(total)
        if GATED:
            after = tl.load(gate_out + at * gate_out_t + (n * gate_out_t + c), mask=live, other=0.0)
            total = total * after.to(tl.float32)
        tl.store(to, total.to(out.dtype.element_ty), mask=live)
        if first == 0:
            # every warp has to have read the window before any of them writes it
            tl.debug_barrier()
            _store_windows(
                token, token_gate, state, dst, track, row, length, start, slot, points, cs,
                channel_ok, x_t, gate_t, s_slot, s_c, s_j, W, RING, GATED, TRACK,
            )  # fmt: skip
