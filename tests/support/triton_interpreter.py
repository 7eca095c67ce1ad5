"""Make Triton's interpreter honest about bfloat16 and TF32 (Triton 3.6 to 3.9).

The stock interpreter keeps a bf16 value as its uint16 bits, and most operations then work on the
bits: ``a + b`` adds integers, ``tl.dot`` multiplies them, ``tl.sum`` adds them, and an fp32 to bf16
store truncates where a GPU rounds to nearest even. Nothing raises. :func:`apply` routes all of that
through float32 and back, rounding to nearest even.

Importing this module sets ``TRITON_INTERPRET`` and patches private names of the interpreter, so
`tests/interpreted/test_interpreter.py` compares every patched operation with torch: a new Triton
fails loudly there.
Still outside its reach: races, barriers, layouts, shared-memory limits, fp8, and the order in which
a GPU sums (a bf16 reduction is done in float32 here and rounded once).
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, Literal

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter as interp

Fp32Dot = Literal["forbid", "tf32", "exact"]

_mode: dict[str, Fp32Dot] = {}


def to_bf16_bits(x: Any) -> np.ndarray:
    """Round float32 to bf16, to nearest even; the result is the uint16 bits. NaN stays NaN."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, 0x7FC0, rounded).astype(np.uint16).reshape(np.shape(x))


def from_bf16_bits(bits: Any) -> np.ndarray:
    """Widen uint16 bf16 bits to float32, exactly."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_tf32(x: np.ndarray) -> np.ndarray:
    """Round float32 to the 10 mantissa bits that a TF32 tensor core reads."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32).reshape(x.shape)


def apply(*, fp32_dot: Fp32Dot = "forbid") -> None:
    """Patch the interpreter of this process; calling it again only changes ``fp32_dot``.

    ``forbid`` raises on an fp32 ``tl.dot`` in TF32, which is what a GPU does when nothing is said
    and what AMD compilers refuse or truncate. ``tf32`` rounds the operands instead; ``exact`` is
    the stock behaviour. ``"bf16x3"`` and ``"bf16x6"``, which the stock interpreter refuses, are
    emulated in every mode.
    """
    if not interp.interpreter_builder or not triton.knobs.runtime.interpret:
        raise RuntimeError("set TRITON_INTERPRET=1 before triton is imported")
    first = not _mode
    _mode["fp32_dot"] = fp32_dot
    if first:
        _patch_casts()
        _patch_arithmetic()
        _patch_reductions()
        if _version() < (3, 7):
            _patch_scalar_index()


def _version() -> tuple[int, int]:
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def _is_bf16(x: Any) -> bool:
    return isinstance(x, interp.TensorHandle) and x.dtype.scalar == tl.bfloat16


def _up(x: Any) -> Any:
    return interp.TensorHandle(from_bf16_bits(x.data), tl.float32) if _is_bf16(x) else x


def _down(x: Any) -> Any:
    """Arithmetic on bf16 gives bf16; comparisons keep their bool."""
    if x.data.dtype == np.float32:
        return interp.TensorHandle(to_bf16_bits(x.data), tl.bfloat16)
    return x


def _split(x: Any, parts: int) -> list[Any]:
    """Write a float32 block as a sum of bf16 blocks, the largest first."""
    rest, blocks = x.data, []
    for _ in range(parts):
        block = from_bf16_bits(to_bf16_bits(rest))
        blocks.append(interp.TensorHandle(block, tl.float32))
        rest = rest - block
    return blocks


def _patch_casts() -> None:
    builder, convert = interp.InterpreterBuilder, interp._convert_float
    nearest = (None, interp._ir.ROUNDING_MODE.RTNE)

    def convert_float(data: np.ndarray, src: Any, dst: Any, mode: Any) -> np.ndarray:
        if (src, dst) == (tl.float32, tl.bfloat16) and mode in nearest:
            return to_bf16_bits(data)
        if (src, dst) == (tl.bfloat16, tl.float32):
            return from_bf16_bits(data).view(np.uint32).reshape(data.shape)
        other: np.ndarray = convert(data, src, dst, mode)
        return other

    cast = builder.cast_impl

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if source == target or tl.bfloat16 not in (source, target):
            return cast(self, src, dst_type)
        if source == tl.bfloat16:
            wide = interp.TensorHandle(from_bf16_bits(src.data), tl.float32)
            return wide if target == tl.float32 else cast(self, wide, dst_type)
        return interp.TensorHandle(to_bf16_bits(src.data.astype(np.float32)), tl.bfloat16)

    def get_bf16(self: Any, value: float) -> Any:
        return interp.TensorHandle(to_bf16_bits(np.array([value])), tl.bfloat16)

    interp._convert_float = convert_float
    builder.cast_impl = cast_impl
    builder.get_bf16 = get_bf16


def _patch_arithmetic() -> None:
    builder = interp.InterpreterBuilder

    def through_float32(name: str) -> None:
        original = getattr(builder, name)

        def patched(self: Any, *args: Any) -> Any:
            if not any(map(_is_bf16, args)):
                return original(self, *args)
            return _down(original(self, *map(_up, args)))

        setattr(builder, name, patched)

    for name in ("binary_op", "unary_op", "ternary_op", "create_fma", "create_fabs"):
        through_float32(name)

    # A comparison keeps its operands' dtype label, so a scalar one spread over a block becomes
    # integers, which 3.9 refuses as a mask.
    binary = builder.binary_op

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        result = binary(self, lhs, rhs, op)
        is_bool = result.data.dtype == np.bool_
        return interp.TensorHandle(result.data, tl.int1) if is_bool else result

    builder.binary_op = binary_op

    dot, precisions = builder.create_dot, interp._ir.INPUT_PRECISION
    parts = {precisions.BF16x3: 2, precisions.BF16x6: 3}

    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, *rest: Any) -> Any:
        if a.dtype.scalar == tl.float32 and b.dtype.scalar == tl.float32:
            if precision in parts:  # a sum of bf16 products, the small ones first
                split = [_split(x, parts[precision]) for x in (a, b)]
                orders = range(parts[precision] - 1, -1, -1)
                for i, j in ((i, order - i) for order in orders for i in range(order + 1)):
                    d = dot(self, split[0][i], split[1][j], d, precisions.IEEE, *rest)
                return d
            if precision != precisions.IEEE and _mode["fp32_dot"] == "forbid":
                raise ValueError('fp32 tl.dot without input_precision="ieee" (the default is TF32)')
            if precision != precisions.IEEE and _mode["fp32_dot"] == "tf32":
                a, b = (interp.TensorHandle(to_tf32(x.data), tl.float32) for x in (a, b))
        return dot(self, _up(a), _up(b), d, precision, *rest)

    options = interp.interpreter_builder.options
    allowed = (*options.allowed_dot_input_precisions, "bf16x3", "bf16x6")
    interp.interpreter_builder.options = replace(options, allowed_dot_input_precisions=allowed)
    builder.create_dot = create_dot


def _patch_reductions() -> None:
    """Reductions and scans have fast paths that hand the raw bits to numpy."""

    def through_float32(cls: Any, name: str) -> None:
        original = getattr(cls, name)

        def narrow(self: Any, x: Any) -> Any:
            if isinstance(x, (tuple, list)):
                return type(x)(narrow(self, item) for item in x)
            if x.handle.dtype.scalar != tl.float32:  # an index
                return x
            return self.to_tensor(to_bf16_bits(x.handle.data), tl.bfloat16)

        def patched(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            value = x[0] if isinstance(x, tuple) else x
            if value.handle.dtype.scalar != tl.bfloat16:
                return original(self, x, *args, **kwargs)
            wide = self.to_tensor(from_bf16_bits(value.handle.data), tl.float32)
            return narrow(self, original(self, wide, *args, **kwargs))

        setattr(cls, name, patched)

    through_float32(interp.ReduceOps, "sum")
    through_float32(interp.ReduceOps, "min_max")
    through_float32(interp.ScanOps, "cumsum")
    through_float32(interp.ScanOps, "cumprod")


def _patch_scalar_index() -> None:
    """Triton 3.6 keeps scalars as one-element arrays, which numpy 2.4 refuses as loop bounds."""
    original = interp._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    interp._patch_lang_tensor = patched
