"""Draft tokens of the convolution, and the window after the path that is accepted.

A token's window follows its parents up to a root and then the committed window. What precedes the
row is named by negative numbers: -1 is the newest committed input.
"""

# ruff: noqa: ANN201
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"

import triton
import triton.language as tl

from hal_triton.conv.kernels.prefill import read_taps
from hal_triton.conv.kernels.window import held_row
from hal_triton.kernels.chain import chain
from hal_triton.kernels.rows import find_tile


@triton.jit
def _before(parents, at, TREE: tl.constexpr):
    """The input before `at` on its path; parents point at the row's first token."""
    if TREE:
        parent = tl.load(parents + at, mask=at >= 0, other=0)
        return tl.where(at >= 0, parent, at - 1)
    else:
        return at - 1


@triton.jit
def _input(x, window, at, start, cs, ok, x_t, s_j, W: tl.constexpr, RING: tl.constexpr):
    """The input at `at`, of the row or of its committed window, in float32."""
    value = tl.load(x + at.to(tl.int64) * x_t + cs, mask=ok & (at >= 0), other=0.0)
    row = held_row(start, tl.minimum(at, -1), W, RING)
    held = tl.load(window + row * s_j, mask=ok & (at < 0), other=0.0)
    return tl.where(at >= 0, value.to(tl.float32), held.to(tl.float32))


@triton.jit
def _convolve(
    x, window, taps, total, parents, token, length, start, cs, ok, has_old, x_t, s_j,
    W: tl.constexpr, RING: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """`total` plus the sum over the window of one token, and its own input.

    A token behind the row's end has no parent: the memory there may hold anything.
    """
    ok &= token < length
    newest = tl.load(x + token.to(tl.int64) * x_t + cs, mask=ok, other=0.0).to(tl.float32)
    total += newest * taps[W - 1]
    at = tl.where(token < length, token, -1)
    for back in tl.static_range(1, W):
        at = _before(parents, at, TREE)
        there = ok & ((at >= 0) | has_old)
        value = _input(x, window, at, start, cs, there, x_t, s_j, W, RING)
        total += value * taps[W - 1 - back]
    return total, newest


@triton.jit(do_not_specialize=["rows", "tokens"])
def conv_verify(
    x, weight, bias, state, src, start_at, query_start_loc, parents, kept, links, out,
    rows, tokens, channels, x_t, w_c, w_j, s_slot, s_c, s_j, out_t,
    W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, EVEN: tl.constexpr, RING: tl.constexpr,
    HAS_BIAS: tl.constexpr, TREE: tl.constexpr, ACTIVATE: tl.constexpr, SILU: tl.constexpr,
    CHAIN: tl.constexpr,
):  # fmt: skip
    """Convolve BT tokens of BC channels; keep their inputs and parents for commit.

    Inputs are kept in the state's dtype, which holds them exactly, one dense row a token.
    """
    chain(CHAIN)
    blocks = tl.cdiv(channels, BC)
    block = tl.program_id(0) % blocks
    cs = block * BC + tl.arange(0, BC)
    ok = cs >= 0 if EVEN else cs < channels
    row, begin, end, first = find_tile(
        query_start_loc, rows, tokens, tl.program_id(0) // blocks, BT
    )
    length, place = end - begin, begin.to(tl.int64)
    if row == rows:
        for token in range(first, tl.minimum(first + BT, length)):
            tl.store(out + (place + token) * out_t + cs, tl.zeros((BC,), out.dtype.element_ty),
                     mask=ok)  # fmt: skip
    elif first < length:
        slot = tl.load(src + row).to(tl.int64)
        start = tl.load(start_at + row)
        held = kept.to(tl.pointer_type(state.dtype.element_ty), bitcast=True)
        taps, offset = read_taps(weight, bias, cs, ok, w_c, w_j, W, BC, HAS_BIAS)
        for r in tl.static_range(BT):
            token = first + r
            n, live = place + token, ok & (token < length)
            total, newest = _convolve(
                x + place * x_t, state + slot * s_slot + cs * s_c, taps, offset, parents + place,
                token, length, start, cs, ok, slot >= 0, x_t, s_j, W, RING, TREE,
            )  # fmt: skip
            if ACTIVATE:
                total = SILU(total)
            tl.store(out + n * out_t + cs, total.to(out.dtype.element_ty), mask=live)
            tl.store(held + n * channels + cs, newest.to(state.dtype.element_ty), mask=live)
            if block == 0:
                at = tl.where(token < length, token, -1)
                tl.store(links + n, _before(parents + place, at, TREE), mask=token < length)


@triton.jit
def conv_commit(
    kept, links, state, src, dst, start_at, query_start_loc, last_at,
    channels, s_slot, s_c, s_j,
    W: tl.constexpr, BC: tl.constexpr, EVEN: tl.constexpr, RING: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """Leave in `dst` of one row the window of BC channels after the path to its last token."""
    chain(CHAIN)
    blocks = tl.cdiv(channels, BC)
    cs = (tl.program_id(0) % blocks) * BC + tl.arange(0, BC)
    ok = cs >= 0 if EVEN else cs < channels
    row = tl.program_id(0) // blocks
    begin, end = tl.load(query_start_loc + row), tl.load(query_start_loc + row + 1)
    last, tip = tl.load(dst + row).to(tl.int64), tl.load(last_at + row)
    if (begin < end) & (last >= 0) & (tip >= 0):
        slot = tl.load(src + row).to(tl.int64)
        start, place = tl.load(start_at + row), begin.to(tl.int64)
        held = kept.to(tl.pointer_type(state.dtype.element_ty), bitcast=True) + place * channels
        old, new = state + slot * s_slot + cs * s_c, state + last * s_slot + cs * s_c
        at, window = tip, ()
        for _ in tl.static_range(W - 1):
            there = ok & ((at >= 0) | (slot >= 0))
            value = _input(held, old, at, start, cs, there, channels, s_j, W, RING)
            window = window + (value,)  # noqa: RUF005
            at = _before(links + place, at, True)
        position = start
        if RING:
            at = tip
            for _ in range(0, tip + 1):
                position += (at >= 0).to(tl.int32)
                at = _before(links + place, at, True)
        # every warp has to have read the window before any of them writes it
        tl.debug_barrier()
        for back in tl.static_range(W - 1):
            to = held_row(position, -1 - back, W, RING)
            tl.store(new + to * s_j, window[back].to(state.dtype.element_ty), mask=ok)
