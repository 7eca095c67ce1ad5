"""A record of calls for devices without graphs: replayed on the tensor objects of the recording.

It keeps to what a graph does. Python ran once and does not run again; every result is written to
the tensor that it was recorded in; and a value read back while recording is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hal.errors import StepOrderError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_FROZEN: Final = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
"""Operations whose result Python would have to look at."""

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
        if not _FROZEN.isdisjoint(func.tags):
            raise StepOrderError(f"capture: {func} reads a tensor's value, which a graph cannot")
        with self:  # inference mode hands composed operations over whole, as views they may not be
            result = func.decompose(*args, **named)
        if result is not NotImplemented:
            return result
        result = func(*args, **named)
        self._keep(func, partial(func, *args, **named), result)
        return result

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

    def replay(self) -> None:
        """Run every call again, in order."""
        with torch.inference_mode():
            for entry in self._entries:
                entry.run()

    def _keep(self, func: Any, call: Callable[[], object], result: object) -> None:
        """A view needs no second run, and what is written in place needs no copy."""
        aliases = [returned.alias_info for returned in func._schema.returns]
        if aliases and all(alias is not None and not alias.is_write for alias in aliases):
            return
        kept = _tensors(result)
        if len(aliases) == len(kept):
            pairs = zip(enumerate(kept), aliases, strict=True)
            results = tuple(pair for pair, alias in pairs if alias is None)
        else:
            results = tuple(enumerate(kept))
        self._entries.append(_Entry(call, results))


def _tensors(result: object) -> list[Tensor]:
    """The tensors of a result, which is one, none or several."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, tuple | list):
        return [tensor for part in result for tensor in _tensors(part)]
    return []
