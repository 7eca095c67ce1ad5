"""Device and host times: cold graph replay for steps, flushed eager calls for prefill."""

from __future__ import annotations

import math
import timeit
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

Call = Callable[[], object]


def graph_us(calls: Sequence[Call], *, replays: int = 7, at_least: int = 24) -> float:
    """Microseconds a call: the median over replays of a graph that holds every call once or more.

    Calls take disjoint slots that together exceed the L2 cache, so each reads its state cold.
    """
    held = list(calls) * math.ceil(at_least / len(calls))
    for call in held[:3]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in held:
            call()
    return median(_replay_us(graph) / len(held) for _ in range(replays + 2))


def _events() -> tuple[Any, Any]:
    """Two marks in the device's own queue."""
    event: Any = torch.cuda.Event
    return event(enable_timing=True), event(enable_timing=True)


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = _events()
    torch.cuda.synchronize()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def eager_us(call: Call, rep: int = 60) -> float:
    """Microseconds of an eager call behind a flushed L2, median; needs Triton."""
    import triton.testing

    return float(triton.testing.do_bench(call, warmup=10, rep=rep, return_mode="median")) * 1e3


def queued_us(call: Call, number: int = 10) -> float:
    """Microseconds of an eager call among others of itself, with nothing between them."""
    start, end = _events()
    call()
    torch.cuda.synchronize()
    start.record()
    for _ in range(number):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / number


def host_us(call: Call, number: int = 500) -> float:
    """Host microseconds to issue a call: the least of five averages without a sync between."""
    return min(timeit.repeat(call, torch.cuda.synchronize, number=number, repeat=5)) / number * 1e6


def kernels_us(call: Call, iterations: int = 4) -> dict[str, float]:
    """Device microseconds of each kernel of a call, largest first."""
    torch.cuda.synchronize()
    with torch.profiler.profile() as profile:
        for _ in range(iterations):
            call()
        torch.cuda.synchronize()
    events = [e for e in profile.key_averages() if e.device_type.name == "CUDA"]
    times = {e.key: e.self_device_time_total / iterations for e in events}
    return dict(sorted(times.items(), key=lambda item: -item[1]))
