"""Launches that are planned once a signature: checks, block sizes and compiled handle are kept.

A launch through Triton's own front costs more host time than a decode kernel takes on the device.
Shapes, strides, dtypes and options of a call decide everything but addresses, so a `Launch` keeps
the compiled handle beside them and hands it pointers.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, Generic, TypeVar

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

P = TypeVar("P")

ALIGNMENT: Final = 16
"""Bytes that Triton assumes of a pointer that it specialises as aligned."""

KEPT_PLANS: Final = 4096
"""Plans kept per operation; prefill makes one for every token count that it meets."""

CHAINED: Final = "CHAIN"
"""The constant of kernels that may be launched before the one ahead of them has ended."""

_CHAINING_ARCH: Final = 90
"""The first NVIDIA arch whose kernels can wait for the one ahead of them."""

_RAW_VERSIONS: Final = frozenset({(3, 6), (3, 7), (3, 8), (3, 9)})
"""Triton versions whose private `CompiledKernel.run` takes the arguments that `Launch` passes."""


def signature(*tensors: Tensor | None) -> tuple[object, ...]:
    """What decides a plan: dtype, shape and strides of every tensor."""
    return tuple([None if t is None else (t.dtype, t.shape, t.stride()) for t in tensors])


class Plans(Generic[P]):
    """Plans of one operation by signature; full, it starts afresh."""

    def __init__(self) -> None:
        self._plans: dict[object, P] = {}

    def get(self, key: object) -> P | None:
        """The plan of a signature that was met before."""
        return self._plans.get(key)

    def put(self, key: object, plan: P) -> P:
        """Keep a plan and give it back."""
        if len(self._plans) >= KEPT_PLANS:
            self._plans.clear()
        self._plans[key] = plan
        return plan


_WATCHERS: Final[list[list[Any]]] = []
"""Lists that get the compiled kernel of every launch that goes through Triton's own front."""


@contextmanager
def watching() -> Iterator[list[Any]]:
    """Collect the compiled kernels that launches inside make; an interpreter makes none.

    For tools: a launch that has a handle already is not seen, so call a fresh provider inside.
    """
    found: list[Any] = []
    _WATCHERS.append(found)
    try:
        yield found
    finally:
        _WATCHERS.remove(found)


class Launch:
    """One kernel with its grid, numbers and constants; called with the tensors of its pointers.

    The kernel takes pointers, then `numbers`, then `constants`, in the order of its declaration.
    `options` are num_warps and num_stages. An empty grid launches nothing. Where the device can, a
    kernel with `CHAIN` is launched while the one before it on the stream still runs.
    """

    __slots__ = (
        "_constants", "_device", "_grid", "_handles", "_index", "_kernel", "_numbers", "_options",
        "_stream", "_tail",
    )  # fmt: skip

    def __init__(
        self,
        kernel: Any,
        programs: int,
        numbers: tuple[float, ...],
        constants: Mapping[str, object],
        options: Mapping[str, int],
        device: torch.device,
    ) -> None:
        self._kernel, self._grid = kernel, (programs, 1, 1)
        self._numbers, self._constants, self._options = numbers, dict(constants), dict(options)
        if CHAINED in kernel.arg_names:
            chains = _chains(kernel, device)
            self._constants[CHAINED] = chains
            self._options |= {"launch_pdl": True} if chains else {}
        names = kernel.arg_names[len(kernel.arg_names) - len(self._constants) :]
        self._tail = (*numbers, *(self._constants[name] for name in names))
        self._handles: dict[object, Any] = {}
        self._device, self._index = device, _index(device)
        self._stream = _raw_stream(kernel, device)

    def __call__(self, *tensors: Tensor) -> None:
        """Launch on the current stream of the tensors' device."""
        if self._grid[0] == 0:
            return
        if self._stream is None:
            with _current(self._device):
                self._first(tensors)
            return
        pointers = [t.data_ptr() for t in tensors]
        key = _alignment(pointers)
        handle = self._handles.get(key)
        if handle is None or torch.cuda.current_device() != self._index:
            with _current(self._device):
                self._handles[key] = self._first(tensors)
            return
        handle.run(
            *self._grid, self._stream(self._index), handle.function, handle.packed_metadata,
            None, None, None, *pointers, *self._tail,
        )  # fmt: skip

    def _first(self, tensors: tuple[Tensor, ...]) -> Any:
        """Launch through Triton, which compiles what is not compiled yet."""
        options = {"enable_fp_fusion": True, **self._options}
        handle = self._kernel[self._grid](*tensors, *self._numbers, **self._constants, **options)
        for found in _WATCHERS:
            found.append(handle)
        return handle


def _alignment(pointers: list[int]) -> object:
    """True if all are aligned, which is the common case; else which of them are."""
    bits = 0
    for pointer in pointers:
        bits |= pointer
    if bits % ALIGNMENT == 0:
        return True
    return tuple([pointer % ALIGNMENT == 0 for pointer in pointers])


def _index(device: torch.device) -> int:
    """The number of a device; tensors always name theirs."""
    index: int | None = device.index
    return 0 if index is None else index


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one, which Triton compiles for and launches on."""
    return torch.cuda.device(_index(device)) if device.type == "cuda" else nullcontext()


def _chains(kernel: Any, device: torch.device) -> bool:
    """Whether a device can chain launches of a kernel; an interpreter cannot."""
    if not isinstance(kernel, JITFunction):
        return False
    with _current(device):
        target = triton.runtime.driver.active.get_current_target()
    return target.backend == "cuda" and int(target.arch) >= _CHAINING_ARCH


def _raw_stream(kernel: Any, device: torch.device) -> Callable[[int], int] | None:
    """What gives the raw stream of a device, where a compiled handle may be run directly."""
    major, minor = triton.__version__.split(".")[:2]
    known = (int(major), int(minor)) in _RAW_VERSIONS
    if device.type != "cuda" or not known or not isinstance(kernel, JITFunction):
        return None
    stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
    return stream


def rows_are_dense(*tensors: Tensor | None) -> bool:
    """Whether the last axis of every tensor is dense, as kernels take it."""
    return all(t is None or _is_dense(t) for t in tensors)


def _is_dense(tensor: Tensor) -> bool:
    """A last axis of one, or of no elements, has whatever stride torch left it with."""
    return tensor.stride(-1) == 1 or tensor.shape[-1] == 1 or tensor.numel() == 0


def dense(tensor: Tensor) -> Tensor:
    """The tensor itself where its last axis is dense, else a dense copy."""
    return tensor if _is_dense(tensor) else tensor.contiguous()


def dense_or_none(tensor: Tensor | None) -> Tensor | None:
    """`dense`, through None."""
    return None if tensor is None else dense(tensor)
