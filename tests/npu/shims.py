"""The vendor's own Triton and torch kernels on a CPU: what their environment has to look like.

Nothing of the kernels is changed. `install` prepares this process for good, so it belongs to a
process of its own: it needs `TRITON_INTERPRET=1`, Triton 3.7 or 3.8, numpy and einops. Two shims
make results less than bit-faithful: shapes that are no power of two, and products of bfloat16 that
are summed in float32.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

CORES = (24, 48)
"""AI cores and vector cores of the device that kernels are told about."""


def install(checkout: Path) -> None:
    """Make `sgl_kernel_npu` importable from a checkout, and its kernels run on CPU tensors."""
    from support import triton_interpreter

    triton_interpreter.apply(fp32_dot="exact")
    _count_without_looking()
    _stub_devices()
    _stub_cann()
    _relax_shapes()
    _take_int32_indices()
    _shell(package_of(checkout))


def _count_without_looking() -> None:
    """Leave out the overflow checks of integers, which cost as much as the kernels."""
    from triton.runtime.interpreter import interpreter_builder

    options: Any = interpreter_builder.options
    interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def package_of(checkout: Path) -> Path:
    """The folder of the package in a checkout, however deep the given path is."""
    inside = Path("python", "sgl_kernel_npu", "sgl_kernel_npu")
    for place in (checkout, checkout / inside.name, checkout / inside):
        if (place / "fla" / "chunk.py").is_file():
            return place
    raise FileNotFoundError(f"{checkout} holds no package sgl_kernel_npu")


def _module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    for member, value in members.items():
        setattr(module, member, value)
    sys.modules[name] = module
    return module


def _stub_devices() -> None:
    """torch_npu, and torch.npu with the few functions that kernels' wrappers call."""
    _module("torch_npu")

    @contextlib.contextmanager
    def device(index: int | None) -> Iterator[None]:
        yield

    members = {"current_device": lambda: 0, "device": device, "is_available": lambda: True}
    torch.npu = _module("torch.npu", **members)  # type: ignore[attr-defined]


def _number(value: Any) -> int:
    """A slice's bound, which may be a constexpr or a block of one element."""
    value = getattr(value, "value", value)
    handle = getattr(value, "handle", None)
    return int(value if handle is None else handle.data.reshape(-1)[0])


def _region(offsets: Any, sizes: Any, strides: Any) -> tuple[slice, ...]:
    triples = zip(*(_sequence(each) for each in (offsets, sizes, strides)), strict=True)
    return tuple(slice(o, o + n * s, s) for o, n, s in triples)


def _sequence(values: Any) -> list[int]:
    values = values if isinstance(values, Sequence) or hasattr(values, "__iter__") else (values,)
    return [_number(value) for value in values]


def _block(data: Any, like: Any) -> Any:
    """A block of the interpreter with other elements of the same dtype."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    scalar = like.handle.dtype.scalar
    return tl.core.tensor(TensorHandle(data, scalar), tl.block_type(scalar, list(data.shape)))


def extract_slice(ful: Any, offsets: Any, sizes: Any, strides: Any) -> Any:
    """The part of a block that stands at offsets, with sizes and strides."""
    return _block(ful.handle.data[_region(offsets, sizes, strides)].copy(), ful)


def insert_slice(ful: Any, sub: Any, offsets: Any, sizes: Any, strides: Any) -> Any:
    """The block with `sub` in that part."""
    data = ful.handle.data.copy()
    data[_region(offsets, sizes, strides)] = sub.handle.data
    return _block(data, ful)


def get_element(src: Any, indice: Any) -> Any:
    """One element of a block, as a block of one."""
    index = tuple(slice(i, i + 1) for i in _sequence(indice))
    return _block(src.handle.data[index].reshape(1).copy(), src)


def _stub_cann() -> None:
    """The extension that kernels import, and the maths library beside it."""
    import triton.language as tl

    functions = {f.__name__: f for f in (extract_slice, insert_slice, get_element)}
    extension = _module("triton.language.extra.cann.extension", **functions)
    libdevice = _module("triton.language.extra.cann.libdevice")
    _module("triton.language.extra.cann", extension=extension, libdevice=libdevice)
    tl.device_print = lambda *args, **kwargs: None


def _relax_shapes() -> None:
    """Take block shapes that are no power of two, as the vendor's compiler does."""
    import triton.language as tl
    from triton import _utils
    from triton.language.semantic import TritonSemantic
    from triton.runtime.interpreter import interpreter_builder

    def arange(self: Any, start: Any, end: Any, *, ret_ty: Any = None) -> Any:
        kind = ret_ty or tl.block_type(tl.int32, [end - start])
        made = interpreter_builder.create_make_range(kind, start, end)
        return self.tensor(made, kind)

    _utils.is_power_of_two = lambda x: True
    TritonSemantic.arange = arange


def _take_int32_indices() -> None:
    """torch on a CPU wants int64 where the vendor's device takes int32."""
    copy: Callable[..., Tensor] = Tensor.index_copy_

    def index_copy_(self: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
        return copy(self, dim, index.long(), source)

    Tensor.index_copy_ = index_copy_  # type: ignore[assignment]


def _shell(package: Path) -> None:
    """The package without its `__init__`, which would load the operator library."""
    shell = _module("sgl_kernel_npu")
    shell.__path__ = [str(package)]
    properties: Any = importlib.import_module("sgl_kernel_npu.utils.triton_utils")
    properties.get_device_properties = lambda: CORES
    utils: Any = importlib.import_module("sgl_kernel_npu.fla.utils")
    for name in ("exp", "exp2", "log", "log2"):
        setattr(utils, name, _late(name))


def _late(name: str) -> Callable[..., Any]:
    """The interpreter replaces functions while a kernel runs; an alias of before is the old one."""
    import triton.language as tl

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(tl, name)(*args, **kwargs)

    return call
