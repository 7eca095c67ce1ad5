"""What bound layers share: the running step, the scratch of drafts, and the checks of a call."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from hal.errors import ProviderError, StepOrderError
from hal.runtime.checks import ACT_DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from hal.runtime.step import Step


@dataclass(slots=True)
class Current:
    """The step that `begin` made last; all layers of a backend share this one cell."""

    step: Step | None = None

    def get(self) -> Step:
        """The step, or an error that names the missing call."""
        if self.step is None:
            raise StepOrderError("a layer was called before begin(batch), or after one that failed")
        return self.step


Served = TypeVar("Served")


def verifier(served: Served | None, draft: Draft | None) -> tuple[Served, Draft]:
    """The operation and its scratch, or an error where speculation was not selected."""
    if served is None or draft is None:
        raise StepOrderError("verify and commit need a selection with speculative")
    return served, draft


def failed(operation: str, error: RuntimeError, *tensors: Tensor) -> ProviderError:
    """A provider's raw error with the operation, shapes, dtypes and device around it."""
    shapes = ", ".join(f"{list(t.shape)} {t.dtype} on {t.device}" for t in tensors)
    return ProviderError(f"{operation} failed on inputs {shapes}: {error}")


@dataclass(slots=True)
class Draft:
    """The scratch of one operation of one layer, and the verify step that filled it last."""

    scratch: tuple[Tensor, ...]
    filled: Step | None = None

    def take(self, step: Step, layer: str) -> tuple[Tensor, ...]:
        """The scratch, if this step filled it; else a commit would write another step's tokens."""
        if self.filled is not step:
            raise StepOrderError(f"commit: {layer} did not run in the verify step")
        return self.scratch


@contextmanager
def filling(
    step: Step, drafts: tuple[Draft, ...], operation: str, *tensors: Tensor
) -> Iterator[None]:
    """A block that fills drafts with a step's tokens; one that fails leaves them of no step."""
    for draft in drafts:
        draft.filled = None
    try:
        yield
    except RuntimeError as error:
        raise failed(operation, error, *tensors) from error
    for draft in drafts:
        draft.filled = step
    step.filled.extend(drafts)


def check_tokens(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse an input of another shape before any state of the layer moves; nothing broadcasts."""
    if tensor.shape != shape:
        raise ValueError(f"layer call: {name} is {list(tensor.shape)}, expected {list(shape)}")


def check_act(name: str, tensor: Tensor, dtype: torch.dtype, step: Step) -> None:
    """Refuse activations of another dtype than was selected for, too few, or with gradients.

    A provider cannot ask the device how many tokens the rows have, and would read behind the last.
    """
    if tensor.dtype != dtype:
        raise TypeError(f"layer call: {name} is {tensor.dtype}, selected for {dtype}")
    if tensor.shape[0] < step.tokens:
        raise ValueError(
            f"layer call: {name} has {tensor.shape[0]} tokens, the step has {step.tokens}"
        )
    if tensor.requires_grad:
        raise _carries_gradients(name)


def check_beside(name: str, tensor: Tensor, shape: tuple[int, ...] | None = None) -> None:
    """Refuse a gate's or step width's input that is of no activation dtype or carries gradients.

    These may be float32 beside bfloat16 activations. A `shape` is held as `check_tokens` does.
    """
    if shape is not None and tensor.shape != shape:
        check_tokens(name, tensor, shape)
    if tensor.dtype not in ACT_DTYPES:
        offered = ", ".join(sorted(map(str, ACT_DTYPES)))
        raise TypeError(f"layer call: {name} is {tensor.dtype}, expected one of {offered}")
    if tensor.requires_grad:
        raise _carries_gradients(name)


def _carries_gradients(name: str) -> ValueError:
    """A graph of autograd would reach the pool, and keep every step alive."""
    return ValueError(f"layer call: {name} requires grad; run under torch.inference_mode()")


def result(operation: str, out: object, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A provider's result; one that its contract has not would be broadcast or cast unseen."""
    if isinstance(out, torch.Tensor) and out.shape == shape and out.dtype == dtype:
        return out
    given = f"{list(out.shape)} {out.dtype}" if isinstance(out, torch.Tensor) else repr(out)
    raise ProviderError(f"{operation} gave {given}, expected {list(shape)} {dtype}")


def check_once(ran: Step | None, step: Step, what: str) -> None:
    """Refuse a second call in one step, which would move the state twice."""
    if ran is step:
        raise StepOrderError(f"{what} of a layer ran twice in one step")
