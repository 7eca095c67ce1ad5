"""The kernel's arguments as its source lays them out, kept for every signature."""

import ctypes
import struct
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from hal_cuda.hopper.driver import View

CHUNK: Final = 64
"""Tokens of a chunk, the rows of every tile."""

HALF: Final = 64
"""Dims of half a head, as many as a swizzled row of 128 bytes holds."""

ALIGNMENT: Final = 16
"""Bytes to which bulk copies and wide stores need addresses and strides aligned."""

RECORD: Final = 17920
CHANNEL_RECORD: Final = 66048
"""Bytes kept of a prepared chunk and value head, by whether its decay is one number or K."""

SQUARE: Final = 128 * 128
"""Elements of a head's state."""

_MAP: Final = 128
_MAP_ALIGNMENT: Final = 64
POINTERS: Final = (
    "a", "b", "A_log", "dt_bias", "query_start_loc", "src", "dst", "track", "state", "out",
    "records", "sums",
)  # fmt: skip
"""Tensors whose addresses the kernel is given as they are, in the order of the source."""

_PACK: Final = struct.Struct(f"={len(POINTERS)}Q").pack_into


class Arguments(ctypes.Structure):
    """`Args` of chunk.cuh, which asserts the size: three tensor maps and what follows."""

    _fields_ = (
        ("q", ctypes.c_char * _MAP),
        ("k", ctypes.c_char * _MAP),
        ("v", ctypes.c_char * _MAP),
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_longlong) for name in ("out_t", "out_h", "s_slot", "s_h")),
        *((name, ctypes.c_int) for name in ("a_t", "b_t", "rows", "tokens", "HV", "R", "points")),
        *((name, ctypes.c_int) for name in ("parts", "waves", "phase", "a_h")),
        *((name, ctypes.c_float) for name in ("scale", "beta_scale", "lower_bound")),
        ("tail", ctypes.c_char * 8),
    )


@dataclass(frozen=True, slots=True)
class Block:
    """Arguments at an address that tensor maps may have, and the address of that address."""

    arguments: Arguments
    address: int
    given: ctypes.Array[ctypes.c_void_p]
    storage: ctypes.Array[ctypes.c_char]

    @classmethod
    def empty(cls) -> "Block":
        """Arguments of zeros."""
        storage = ctypes.create_string_buffer(ctypes.sizeof(Arguments) + _MAP_ALIGNMENT)
        address = -(-ctypes.addressof(storage) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
        given = (ctypes.c_void_p * 1)(address)
        return cls(Arguments.from_address(address), address, given, storage)

    def number(self, **values: float) -> None:
        """Put numbers in by name."""
        for name, value in values.items():
            setattr(self.arguments, name, value)

    def point(self, *addresses: int) -> None:
        """Put all addresses in, in the order of `POINTERS`."""
        _PACK(self.storage, self.address - ctypes.addressof(self.storage) + 3 * _MAP, *addresses)

    def maps(self) -> tuple[int, int, int]:
        """The addresses of the three tensor maps."""
        return self.address, self.address + _MAP, self.address + 2 * _MAP

    def launchable(self) -> int:
        """What a launch is given."""
        return ctypes.addressof(self.given)


def view_of(x: Tensor, halves: int) -> View:
    """Of x `[T, H, 128]`: dims of a half, tokens, halves, heads; a copy moves a chunk of `halves`.

    The strides of an axis of one mean nothing, so that they are replaced by a dense one's. The
    address is rounded down to what a map may have; every launch moves the map to its own.
    """
    tokens, heads, dims = x.shape
    size = x.element_size()
    token = x.stride(0) * size if tokens > 1 else heads * dims * size
    head = x.stride(1) * size if heads > 1 else dims * size
    sizes = (HALF, tokens, dims // HALF, heads)
    base = x.data_ptr() // ALIGNMENT * ALIGNMENT
    return View(base, sizes, (token, HALF * size, head), (HALF, CHUNK, halves, 1))


def strides_fit(x: Tensor) -> bool:
    """Whether bulk copies and wide stores can follow the strides of x `[T, H, 128]`.

    Those of longer axes have to pass over what lies between in whole 16 bytes; an expanded axis has
    none that would.
    """
    steps = [x.stride(axis) * x.element_size() for axis in (0, 1) if x.shape[axis] > 1]
    return x.stride(2) == 1 and all(step > 0 and step % ALIGNMENT == 0 for step in steps)
