"""Run Triton kernels in the interpreter and catch what a GPU would let pass.

Inside `watch` every launch raises `MemoryFault` on

- an active lane that reads or writes outside every tensor argument (holes of a strided view count
  as outside, so a kernel that ignores a stride is caught);
- one address written by two programs, or twice by one store (two rows that share a state slot);
- one address written by one program and read by another in the same launch (a fork chain);
- 32-bit integer arithmetic that overflows (`slot * stride` passes 2**31 at slot 4096 of a
  32-head, 128 x 128 state, and the wrapped address may well lie inside the pool).

Bounds are checked against the union of the arguments, so allocate them with `guarded`, which leaves
a gap of NaN around each tensor: a stray access then hits a gap, not a neighbour. Not seen:
barriers, layouts, and anything inside one program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from triton.runtime import interpreter as interp

GAP = 4096  # bytes on each side of a guarded tensor


class MemoryFault(RuntimeError):
    """An access that a correct kernel does not make."""


def guarded(tensor: torch.Tensor, gap: int = GAP) -> torch.Tensor:
    """Copy of `tensor`, same shape and strides, with `gap` bytes of poison on each side.

    Holes between the rows of a strided view are poisoned too.
    """
    size = tensor.element_size()
    pad, extent = gap // size, _extent(tensor)
    store = torch.full((extent + 2 * pad,), _poison(tensor.dtype), dtype=tensor.dtype)
    view = store.as_strided(tensor.shape, tensor.stride(), pad)
    view.copy_(tensor)
    return view


@contextmanager
def watch() -> Iterator[list[str]]:
    """Watch every launch inside; gives the kernels' names as they are launched."""
    _install()
    names: list[str] = []
    run = interp.GridExecutor.__call__

    def watched(self: Any, *args: Any, **kwargs: Any) -> None:
        names.append(self.fn.__name__)
        _watched(run, self, args, kwargs)

    interp.GridExecutor.__call__ = watched
    try:
        yield names
    finally:
        interp.GridExecutor.__call__ = run


def _watched(run: Any, executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """One launch under watch, with the interpreter's own overflow checks on."""
    seen = _Watch([_Region.of(t) for t in _tensors((*args, *kwargs.values()))])
    _Watch.active = seen
    options = interp.interpreter_builder.options
    interp.interpreter_builder.options = replace(options, debug=True)
    try:
        run(executor, *args, **kwargs)
        seen.races()
    except interp.InterpreterError as error:  # what a kernel raises arrives wrapped
        if "overflow detected" in str(error):
            raise MemoryFault(str(error)) from error
        raise seen.fault or error from error
    finally:
        _Watch.active = None
        interp.interpreter_builder.options = options


@dataclass
class _Region:
    low: int
    high: int
    exact: np.ndarray | None  # element addresses, when the tensor has holes

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Region:
        low, size = tensor.data_ptr(), tensor.element_size()
        extent = _extent(tensor)
        exact = None if extent == tensor.numel() else np.unique(_addresses(tensor))
        return cls(low, low + extent * size, exact)

    def contains(self, address: np.ndarray, size: int) -> np.ndarray:
        inside = (address >= self.low) & (address + np.uint64(size) <= self.high)
        return inside if self.exact is None else inside & np.isin(address, self.exact)


@dataclass
class _Watch:
    active: ClassVar[_Watch | None] = None
    regions: list[_Region]
    fault: MemoryFault | None = None
    log: dict[str, list[tuple[int, np.ndarray]]] = field(
        default_factory=lambda: {"load": [], "store": [], "atomic": []}
    )

    def access(self, kind: str, pointers: Any, mask: np.ndarray) -> None:
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        data, active = np.broadcast_arrays(pointers.data, mask.astype(bool))
        address = np.asarray(data[active], dtype=np.uint64).reshape(-1)
        inside = np.zeros(address.shape, bool)
        for region in self.regions:
            inside |= region.contains(address, size)
        grid = interp.interpreter_builder
        if not inside.all():
            self._raise(
                f"{kind} outside every tensor argument: {(~inside).sum()} of "
                f"{address.size} lanes, program {grid.grid_idx}"
            )
        unique = np.unique(address)
        if kind == "store" and unique.size != address.size:
            self._raise(f"one store writes an address twice, program {grid.grid_idx}")
        x, y, z = grid.grid_idx
        self.log[kind].append(((z * grid.grid_dim[1] + y) * grid.grid_dim[0] + x, unique))

    def races(self) -> None:
        stores, writers = self._pairs("store")
        address, first = np.unique(stores, return_index=True)
        if address.size != stores.size:
            self._raise(f"{stores.size - address.size} addresses are written by two programs")
        loads, readers = self._pairs("load")
        at = np.minimum(np.searchsorted(address, loads), max(address.size - 1, 0))
        if address.size and loads.size:
            shared = (address[at] == loads) & (writers[first][at] != readers)
            if shared.any():
                self._raise(
                    f"{shared.sum()} addresses are written by one program and read by another"
                )

    def _pairs(self, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """Distinct (address, program) pairs of one kind of access."""
        parts = self.log[kind]
        if not parts:
            return np.empty(0, np.uint64), np.empty(0, np.uint64)
        programs = [np.full(a.size, p, np.uint64) for p, a in parts]
        pairs = np.stack([np.concatenate([a for _, a in parts]), np.concatenate(programs)])
        address, program = np.unique(pairs, axis=1)
        return address, program

    def _raise(self, message: str) -> None:
        self.fault = MemoryFault(message)
        raise self.fault


@cache
def _install() -> None:
    builder = interp.InterpreterBuilder

    def watch(name: str, kind: str, mask_at: int) -> None:
        original = getattr(builder, name)

        def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _Watch.active is not None:
                _Watch.active.access(kind, args[0 if kind != "atomic" else 1], args[mask_at].data)
            return original(self, *args, **kwargs)

        setattr(builder, name, patched)

    watch("create_masked_load", "load", 1)
    watch("create_masked_store", "store", 2)
    watch("create_atomic_rmw", "atomic", 3)


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)
        elif isinstance(getattr(value, "base", None), torch.Tensor):  # a host tensor descriptor
            yield value.base


def _extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last one, holes included."""
    if not tensor.numel():
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _addresses(tensor: torch.Tensor) -> np.ndarray:
    offset = np.zeros((1,) * tensor.dim(), np.int64)
    for axis, (n, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        shape = [1] * tensor.dim()
        shape[axis] = n
        offset = offset + (np.arange(n) * stride).reshape(shape)
    return (
        np.uint64(tensor.data_ptr()) + (offset * tensor.element_size()).astype(np.uint64)
    ).reshape(-1)


def _poison(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max
