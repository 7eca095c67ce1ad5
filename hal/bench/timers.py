"""Clocks: what a call takes with cold and with warm caches, in microseconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch

from hal.bench.refusal import NotMeasured
from hal.device import Device
from hal_registry import Code, Reason

Call = Callable[[], object]

FLUSH: Final = 256 << 20
"""Bytes that are written to push everything else out of a cache, of a host or of a card."""

MOST_COPIES: Final = 256
"""Copies of a call at most."""


class Timer(Protocol):
    """Reads one time of a call; `name` says how, for the report.

    A timer may want several copies of a call, on memory of their own: `copies` says how many for
    one that touches so many bytes.
    """

    name: str

    def copies(self, touched: int, step: bool) -> int:
        """How many copies of a call to make; a step advances each row by a token or a draft."""
        ...

    def cold(self, calls: Sequence[Call]) -> float:
        """Microseconds of a call whose memory is in no cache."""
        ...

    def warm(self, calls: Sequence[Call]) -> float:
        """Microseconds of a call that has just run."""
        ...


@dataclass(slots=True)
class HostTimer:
    """The CPU's clock. With one thread of torch it is that thread's own time.

    Other work on the machine counts less so; with several threads it is the time that passes.
    """

    name: str
    clock: Callable[[], float]
    scratch: torch.Tensor = field(repr=False)

    @classmethod
    def make(cls) -> HostTimer:
        """The clock that suits the number of threads."""
        alone = torch.get_num_threads() == 1
        clock, name = (
            (time.thread_time, "thread time") if alone else (time.perf_counter, "wall time")
        )
        return cls(name, clock, torch.empty(FLUSH // 4))

    def copies(self, touched: int, step: bool) -> int:
        """One: the caches are emptied between the readings."""
        return 1

    def cold(self, calls: Sequence[Call]) -> float:
        """Behind a write of more than the caches hold."""
        self.scratch.fill_(0.0)
        return self._read(calls[0])

    def warm(self, calls: Sequence[Call]) -> float:
        """Behind a call that is not counted."""
        calls[0]()
        return self._read(calls[0])

    def _read(self, call: Call) -> float:
        begin = self.clock()
        call()
        return 1e6 * (self.clock() - begin)


class CardTimer:
    """Device time of a card that torch calls "cuda", by events.

    Steps are read from replayed graphs: cold ones over copies that overflow the L2 cache together,
    warm ones over one copy. Prompts are called eagerly, cold ones behind a flushed L2.
    """

    name = "device time: graphs for steps, events for prompts"

    def copies(self, touched: int, step: bool) -> int:
        """As many as overflow the L2 cache; prompts flush it instead."""
        return max(2, min(MOST_COPIES, FLUSH // max(1, touched))) if step else 1

    def cold(self, calls: Sequence[Call]) -> float:
        """A replayed graph over all copies, or an eager call behind a flushed L2."""
        from hal.bench import card_timing

        if len(calls) > 1:
            return card_timing.graph_us(calls)
        return card_timing.eager_us(calls[0])

    def warm(self, calls: Sequence[Call]) -> float:
        """A replayed graph over one copy, or eager calls one behind the other."""
        from hal.bench import card_timing

        if len(calls) > 1:
            return card_timing.graph_us(calls[:1])
        return card_timing.queued_us(calls[0])


def current(device: Device) -> AbstractContextManager[object]:
    """Make the card that is asked for the current one, as graphs and events need it."""
    if device.type == "cpu" or device.index is None:
        return nullcontext()
    return torch.cuda.device(torch.device(device.torch_name))


def timer_of(device: Device) -> Timer:
    """The timer of a device type, or a refusal."""
    if device.type == "cpu":
        return HostTimer.make()
    if device.type in ("cuda", "rocm"):
        return CardTimer()
    reason = Reason(
        Code.MODE_UNSUPPORTED,
        f"timing on {device.type}",
        needed="a timer that knows when the device is done",
        offered="cpu, cuda, rocm",
        fix="use --device cpu, cuda or rocm",
    )
    raise NotMeasured(f"nothing can be timed on {device}", [reason])
