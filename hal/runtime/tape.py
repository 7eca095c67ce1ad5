"""A record of calls for devices without graphs: replayed on the tensor objects of the recording.

It keeps to what a graph does. Python ran once and does not run again; every result is written to
the tensor that it was recorded in; and a value read back while recording is an error.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hal.errors import StepOrderError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_FROZEN: Final = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
"""Operations whose result Python would have to look at."""

_READS: Final = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__})
"""Calls that read memory of the host without any operation of torch."""

Given = ParamSpec("Given")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """A call with the tensors of the recording, and those that its new results are copied to."""

    call: Callable[[], object]
    results: tuple[tuple[int, Tensor], ...]

    def run(self) -> None:
        fresh = _tensors(self.call())
        for place, kept in self.results:
            kept.copy_(fresh[place])


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records torch's operations in a `with` block, and providers' calls as whole ones."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._entries: list[_Entry] = []
        self._inside = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation of the block and keep it."""
        named = kwargs or {}
        if self._inside:
            return func(*args, **named)
        if not _FROZEN.isdisjoint(func.tags) and not _by_places(func, args):
            raise StepOrderError(f"capture: {func} reads a tensor's value, which a graph cannot")
        with self:  # inference mode hands composed operations over whole, as views they may not be
            result = func.decompose(*args, **named)
        if result is not NotImplemented:
            return result
        result = func(*args, **named)
        self._keep(func, partial(func, *args, **named), result)
        return result

    @contextmanager
    def recording(self) -> Iterator[Tape]:
        """The block that is recorded, with reads refused that no operation shows."""
        with _Unread(self), self:
            yield self

    def opaque(self, call: Callable[Given, Result]) -> Callable[Given, Result]:
        """A provider's call as one entry: it may read its tensors, and does in each replay."""

        def recorded(*args: Given.args, **kwargs: Given.kwargs) -> Result:
            self._inside = True
            try:
                result = call(*args, **kwargs)
            finally:
                self._inside = False
            kept = tuple(enumerate(_tensors(result)))
            self._entries.append(_Entry(partial(call, *args, **kwargs), kept))
            return result

        return recorded

    @property
    def inside(self) -> bool:
        """Whether a provider's call runs now."""
        return self._inside

    def replay(self) -> None:
        """Run every call again, in order."""
        with torch.inference_mode():
            for entry in self._entries:
                entry.run()

    def _keep(self, func: Any, call: Callable[[], object], result: object) -> None:
        """A view needs no second run, and what is written in place needs no copy."""
        aliases = [returned.alias_info for returned in func._schema.returns]
        if not aliases or any(alias is None or alias.is_write for alias in aliases):
            self._entries.append(_Entry(call, _own(_tensors(result), aliases)))


class _Unread(TorchFunctionMode):
    """Refuses what hands a tensor's values to Python, outside of providers' calls."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _READS and not self._tape.inside:
            name = func.__name__
            raise StepOrderError(f"capture: {name} reads a tensor's value, which a graph cannot")
        return func(*args, **(kwargs or {}))


def _by_places(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call indexes with places, so that its result's shape is known without a look."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return all(i is None or i.dtype not in (torch.bool, torch.uint8) for i in args[1])


def _own(kept: Sequence[Tensor], aliases: Sequence[object]) -> tuple[tuple[int, Tensor], ...]:
    """Results in memory of their own, by place; those of a list, which has one alias, are all."""
    if len(aliases) != len(kept):
        return tuple(enumerate(kept))
    return tuple((i, kept[i]) for i, alias in enumerate(aliases) if alias is None)


def _tensors(result: object) -> list[Tensor]:
    """The tensors of a result, which is one, none or several."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, tuple | list):
        return [tensor for part in result for tensor in _tensors(part)]
    return []
