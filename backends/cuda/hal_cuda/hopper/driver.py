"""The few functions of libcuda that a kernel in CUDA C++ needs: modules, tensor maps, launches."""

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch

_SIGNATURES: Final = {
    "cuDeviceGet": "pi",
    "cuDeviceGetAttribute": "pii",
    "cuDevicePrimaryCtxRetain": "pi",
    "cuCtxSetCurrent": "p",
    "cuModuleLoadData": "pp",
    "cuModuleGetFunction": "ppp",
    "cuModuleGetGlobal_v2": "pppp",
    "cuMemcpyDtoH_v2": "ppz",
    "cuFuncSetAttribute": "pii",
    "cuFuncGetAttribute": "pip",
    "cuTensorMapEncodeTiled": "piIpppppiiii",
    "cuTensorMapReplaceAddress": "pp",
    "cuLaunchKernel": "pIIIIIIIppp",
    "cuLaunchKernelEx": "pppp",
    "cuGetErrorString": "ip",
}  # fmt: skip
"""Arguments by function: p pointer, i int, I unsigned, z size."""

_TYPES: Final = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int,
    "I": ctypes.c_uint,
    "z": ctypes.c_size_t,
}
_THREADS: Final = 0
_DYNAMIC_SHARED: Final = 8
_MULTIPROCESSORS: Final = 16
_BFLOAT16: Final = 9
_SWIZZLE_128: Final = 3
_PROMOTE_128: Final = 2
_INVALID_CONTEXT: Final = 201
_OVERLAPPED: Final = 6


class DriverError(RuntimeError):
    """A function of libcuda failed; the text names it and what the driver says."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A function on one device, with the threads of a block and the shared memory it takes."""

    function: int
    threads: int
    shared: int


@dataclass(frozen=True, slots=True)
class View:
    """What a tensor map shows: sizes and the box of one copy, innermost first, in elements.

    `strides` are in bytes, of all axes but the innermost, which is dense.
    """

    pointer: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


_SIZES: Final = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")


class _Attribute(ctypes.Structure):
    """A launch attribute: here, that a kernel's blocks may come before the last kernel's end."""

    _fields_ = (("id", ctypes.c_int), ("value", ctypes.c_int * 17))


class _Config(ctypes.Structure):
    """What cuLaunchKernelEx is told of a launch."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in _SIZES),
        *(("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint)),
    )


_CHAINED: Final = _Attribute(_OVERLAPPED, (ctypes.c_int * 17)(0, 1))
"""The id is padded to 8 bytes, so that the flag is the second int behind it."""


class Driver:
    """libcuda with checked results."""

    def __init__(self, library: Any) -> None:
        self._library = library
        for name, letters in _SIGNATURES.items():
            getattr(library, name).argtypes = [_TYPES[letter] for letter in letters]
        self._launch = library.cuLaunchKernel
        self._move = library.cuTensorMapReplaceAddress

    def load(self, cubin: bytes, name: str, shared: str, index: int) -> Kernel:
        """A kernel of a cubin on a device; `shared` names the int that says how much it takes.

        Synchronises, so never under capture.
        """
        with torch.cuda.device(index):
            self._enter(index)
            module = self._new("cuModuleLoadData", cubin)
            function = self._new("cuModuleGetFunction", module, name.encode())
            size = self._global(module, shared)
            self._call("cuFuncSetAttribute", function, _DYNAMIC_SHARED, size)
            threads = ctypes.c_int()
            self._call("cuFuncGetAttribute", ctypes.byref(threads), _THREADS, function)
        return Kernel(function, threads.value, size)

    def processors(self, index: int) -> int:
        """The multiprocessors of a device."""
        device, count = ctypes.c_int(), ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), index)
        self._call("cuDeviceGetAttribute", ctypes.byref(count), _MULTIPROCESSORS, device)
        return count.value

    def map(self, at: int, view: View) -> None:
        """Write a tensor map of bfloat16 with swizzled rows of 128 bytes to address `at`."""
        rank = len(view.sizes)
        self._call(
            "cuTensorMapEncodeTiled", at, _BFLOAT16, rank, view.pointer,
            (ctypes.c_uint64 * rank)(*view.sizes), (ctypes.c_uint64 * (rank - 1))(*view.strides),
            (ctypes.c_uint32 * rank)(*view.box), (ctypes.c_uint32 * rank)(*[1] * rank),
            0, _SWIZZLE_128, _PROMOTE_128, 0,
        )  # fmt: skip

    def move(self, at: int, pointer: int) -> None:
        """Point the tensor map at address `at` to another tensor of the same shape and strides."""
        if code := self._move(at, pointer):
            raise self._error("cuTensorMapReplaceAddress", code)

    def launch(
        self, kernel: Kernel, programs: int, arguments: int, index: int, stream: int
    ) -> None:
        """Launch on a stream of the device; `arguments` is the address of their addresses."""
        given = (
            kernel.function, programs, 1, 1, kernel.threads, 1, 1, kernel.shared, stream,
            arguments, None,
        )  # fmt: skip
        code = self._launch(*given)
        if code == _INVALID_CONTEXT:  # a thread that has not used the device before
            self._enter(index)
            code = self._launch(*given)
        if code:
            raise self._error("cuLaunchKernel", code)

    def chain(self, kernel: Kernel, programs: int, arguments: int, stream: int) -> None:
        """Launch behind the stream's last launch, with blocks that start where its leave room.

        The kernel waits for that one's end itself, before it reads or writes anything.
        """
        config = _Config(
            programs, 1, 1, kernel.threads, 1, 1, kernel.shared, stream,
            ctypes.addressof(_CHAINED), 1,
        )  # fmt: skip
        self._call("cuLaunchKernelEx", ctypes.addressof(config), kernel.function, arguments, None)

    def _enter(self, index: int) -> None:
        """Make the context that torch uses on a device the thread's own."""
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), index)
        self._call("cuCtxSetCurrent", self._new("cuDevicePrimaryCtxRetain", device))

    def _global(self, module: int, name: str) -> int:
        """The value of an int of a module."""
        pointer, size, value = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_int()
        self._call(
            "cuModuleGetGlobal_v2", ctypes.byref(pointer), ctypes.byref(size), module,
            name.encode(),
        )  # fmt: skip
        self._call("cuMemcpyDtoH_v2", ctypes.byref(value), pointer, ctypes.sizeof(value))
        return value.value

    def _new(self, name: str, *given: Any) -> int:
        """The handle that a function makes."""
        handle = ctypes.c_void_p()
        self._call(name, ctypes.byref(handle), *given)
        return handle.value or 0

    def _call(self, name: str, *given: Any) -> None:
        if code := getattr(self._library, name)(*given):
            raise self._error(name, code)

    def _error(self, name: str, code: int) -> DriverError:
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(code, ctypes.byref(text))
        return DriverError(f"cuda.hopper: {name}: {code}: {(text.value or b'unknown').decode()}")


@cache
def driver() -> Driver:
    """The driver of this machine."""
    return Driver(ctypes.CDLL("libcuda.so.1"))
