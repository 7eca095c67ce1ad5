"""Host integers on their way to the device: a ring of buffers whose copies may still be running."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import torch

if TYPE_CHECKING:
    from array import array

    from torch import Tensor

DEPTH: Final = 4
"""Buffers of a ring: how many copies may be under way before a step waits for the oldest."""


class Fence(Protocol):
    """Where a copy that was started can be waited for."""

    def wait(self) -> None:
        """Return once the copy has read its source."""
        ...


class Transfer(Protocol):
    """How a host buffer reaches the device."""

    def start(self, source: Tensor, target: Tensor) -> Fence:
        """Start the copy of i32 `[n]`; `source` has to stay as it is until the fence is passed."""
        ...


class _Done:
    """The fence of a copy that is over."""

    def wait(self) -> None:
        """Return at once."""


_DONE: Final = _Done()


class Direct:
    """A copy within the host, over when it returns."""

    def start(self, source: Tensor, target: Tensor) -> Fence:
        """Copy."""
        target.copy_(source)
        return _DONE


@dataclass(frozen=True, slots=True)
class _Recorded:
    """The fence of a copy on a CUDA stream."""

    event: torch.cuda.Event

    def wait(self) -> None:
        """Wait for the event, which is free where it has passed."""
        self.event.synchronize()


class Asynchronous:
    """A copy from pinned memory on the current CUDA stream; the host runs on."""

    def start(self, source: Tensor, target: Tensor) -> Fence:
        """Queue the copy and an event behind it."""
        target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(target.device))
        return _Recorded(event)


def transfer_to(device: torch.device) -> Transfer:
    """The transfer that suits a device."""
    return Asynchronous() if device.type == "cuda" else Direct()


class _Buffer:
    """Host memory of `size` i32, and the fence of the copy that read it last."""

    def __init__(self, size: int, pinned: bool) -> None:
        with torch.inference_mode(False):
            self.memory = torch.empty(size, dtype=torch.int32, pin_memory=pinned)
        raw = (ctypes.c_int32 * size).from_address(self.memory.data_ptr())
        self.words = memoryview(raw).cast("B").cast("i")
        self.fence: Fence = _DONE


class Ring:
    """Sends integers to one device through buffers in turn, so that no copy is overwritten.

    A buffer is written again only when its last copy has read it; the others may still be on their
    way. Buffers are pinned where the device copies by itself, and grow where a step needs more.
    """

    def __init__(
        self, device: torch.device, size: int, depth: int = DEPTH, transfer: Transfer | None = None
    ) -> None:
        self.device = device
        self._pinned = device.type == "cuda"
        self._transfer = transfer or transfer_to(device)
        self._buffers = [_Buffer(max(1, size), self._pinned) for _ in range(depth)]
        self._turn = 0

    def send(self, values: array[int]) -> Tensor:
        """New device memory with the values, i32 `[n]`."""
        target = torch.empty(len(values), dtype=torch.int32, device=self.device)
        self.write(values, target)
        return target

    def write(self, values: array[int], target: Tensor) -> None:
        """Fill `target`, device i32 `[n]`, with as many values."""
        count = len(values)
        if not count:
            return
        buffer = self._next(count)
        buffer.words[:count] = values
        buffer.fence = self._transfer.start(buffer.memory[:count], target)

    def _next(self, count: int) -> _Buffer:
        turn = self._turn
        self._turn = (turn + 1) % len(self._buffers)
        buffer = self._buffers[turn]
        buffer.fence.wait()
        if buffer.memory.shape[0] < count:
            buffer = self._buffers[turn] = _Buffer(2 * count, self._pinned)
        return buffer
