"""Small kernels that show whether the interpreter computes rightly and its guard sees faults."""

# ruff: noqa: ANN201
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def elementwise(x, y, i, o, b, N: tl.constexpr):
    n = tl.arange(0, N)
    a = tl.load(x + n)
    c = tl.load(y + n)
    tl.store(o + n, a + c)
    tl.store(o + N + n, a * c)
    tl.store(o + 2 * N + n, -a)
    tl.store(o + 3 * N + n, tl.abs(a))
    tl.store(o + 4 * N + n, tl.where(a > c, a, c))
    tl.store(o + 5 * N + n, tl.maximum(a, c))
    tl.store(o + 6 * N + n, tl.load(i + n).to(tl.bfloat16))
    tl.store(o + 7 * N + n, tl.full((N,), 1.7, tl.bfloat16))
    tl.store(o + 8 * N + n, tl.load(x + n, mask=n < 3, other=0.3))
    tl.store(o + 9 * N + n, tl.cumsum(a, 0))
    tl.store(o + 10 * N + n, a.to(tl.float16).to(tl.bfloat16))
    tl.store(o + 11 * N + n, (a * 8).to(tl.int32).to(tl.float32).to(tl.bfloat16))
    tl.store(
        o + 12 * N + n, (tl.zeros((N,), tl.float32) + tl.sum(a.to(tl.float32))).to(tl.bfloat16)
    )
    tl.store(o + 13 * N + n, tl.zeros((N,), tl.bfloat16) + tl.sum(a, 0))
    tl.store(o + 14 * N + n, tl.zeros((N,), tl.bfloat16) + tl.max(a, 0))
    tl.store(b + n, (a < c).to(tl.int32))


@triton.jit
def scalar_mask(s, o, B: tl.constexpr):
    n = tl.arange(0, B)
    positive = tl.load(s) > 0
    tl.store(o + n, tl.full((B,), 1, tl.int32), mask=(n < 4) & positive)
    tl.store(o + B + n, tl.full((B,), 1, tl.int32), mask=(n < 4) & ~positive)


@triton.jit
def dot(x, y, o, N: tl.constexpr, P: tl.constexpr):
    n = tl.arange(0, N)
    at = n[:, None] * N + n[None, :]
    tl.store(
        o + at, tl.dot(tl.load(x + at), tl.load(y + at), input_precision=P).to(o.dtype.element_ty)
    )


@triton.jit
def loop(x, o, T):
    total = tl.zeros((1,), tl.float32)
    for t in range(0, T):
        total += tl.load(x + t).to(tl.float32)
    tl.store(o + tl.arange(0, 1), total)


@triton.jit
def copy(x, o, n, step, B: tl.constexpr, MASK: tl.constexpr):
    i = tl.program_id(0) * step + tl.arange(0, B)
    tl.store(o + i, tl.load(x + i, mask=(i < n) if MASK else None), mask=i < n)


@triton.jit
def rows(x, o, stride, N: tl.constexpr):
    row = tl.program_id(0)
    n = tl.arange(0, N)
    tl.store(o + row * N + n, tl.load(x + row * stride + n))


@triton.jit
def decay(state, src, dst, N: tl.constexpr):
    row = tl.program_id(0)
    n = tl.arange(0, N)
    old, new = tl.load(src + row), tl.load(dst + row)
    value = tl.load(state + old * N + n, mask=(old >= 0) & (n >= 0), other=0.0)
    tl.store(state + new * N + n, value * 0.5, mask=(new >= 0) & (n >= 0))


@triton.jit
def far(state, slot, stride, WIDE: tl.constexpr):
    row = tl.load(slot).to(tl.int64) if WIDE else tl.load(slot)
    tl.store(state + row * stride + tl.arange(0, 16), tl.zeros((16,), tl.float32))


@triton.jit
def count(o, B: tl.constexpr):
    tl.atomic_add(o + tl.arange(0, B), 1)
