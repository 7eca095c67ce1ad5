"""A small CPU backend whose pool is poisoned, and what a bound layer is to a test."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

import hal
from hal.runtime.backend import Backend


@dataclass(frozen=True)
class Bound:
    """A layer, random inputs for it, how to call it on them, and what a run alone gives."""

    backend: Backend
    inputs: Callable[[int], list[Tensor]]
    call: Callable[[list[Tensor]], Tensor]
    alone: Callable[[list[Tensor]], Tensor]


_OPTIONS: dict[str, object] = {}


@contextmanager
def selected_with(**options: object) -> Iterator[None]:
    """Build the backends of this block with more options of `hal.select`."""
    _OPTIONS.update(options)
    try:
        yield
    finally:
        _OPTIONS.clear()


def backend_for(config: dict[str, object], slots: int = 6, **options: object) -> Backend:
    """A CPU backend whose pool is full of NaN, so that a stale read shows."""
    selection = hal.select("cpu", config, **_OPTIONS, **options)
    backend = selection.backend(slots=slots, max_batch=8, max_tokens=256)
    poison(backend)
    return backend


def poison(backend: Backend) -> None:
    """Fill every slot of every state with NaN."""
    for spec in backend.pool.states:
        backend.pool.tensors(spec.layer)[spec.name].fill_(float("nan"))
