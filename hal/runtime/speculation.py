"""What a commit says: which token of every verified row is the last that stays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hal.runtime.step import Step


def last_tokens(
    step: Step,
    accepted: Sequence[int] | Tensor,
    tips: Sequence[int] | Tensor | None,
    device: torch.device,
) -> Tensor:
    """The row-relative index of each row's last accepted token, i32 `[B]`, -1 for none."""
    tree = step.parents is not None
    if tree and tips is None:
        raise ValueError("commit: a tree needs tips, the last accepted token of every row")
    if tips is not None and not tree:
        raise ValueError("commit: tips were given, but the verify step was of chains")
    given = accepted if tips is None else tips
    if isinstance(given, Tensor):
        _check_tensor(given, step.rows)
        return given if tree else given - 1
    _check_counts(step, accepted)
    if tips is not None:
        _check_tips(step, accepted, given)
        return torch.tensor(given, dtype=torch.int32, device=device)
    return torch.tensor([count - 1 for count in given], dtype=torch.int32, device=device)


def _check_tensor(given: Tensor, rows: int) -> None:
    if given.dtype != torch.int32 or tuple(given.shape) != (rows,):
        raise ValueError(
            f"commit: got {list(given.shape)} {given.dtype}, expected [{rows}] torch.int32"
        )


def _check_counts(step: Step, accepted: Sequence[int] | Tensor) -> None:
    if isinstance(accepted, Tensor):
        _check_tensor(accepted, step.rows)
        return
    if len(accepted) != step.rows:
        raise ValueError(f"commit: {len(accepted)} counts, the verify step had {step.rows} rows")
    for row, (count, length) in enumerate(zip(accepted, step.lengths, strict=True)):
        if not 0 <= count <= length:
            raise ValueError(f"commit: {count} accepted in row {row}, width is {length}")


def _check_tips(step: Step, accepted: Sequence[int] | Tensor, tips: Sequence[int]) -> None:
    """A tip is a token of its row, and there is one exactly where something was accepted."""
    if len(tips) != step.rows:
        raise ValueError(f"commit: {len(tips)} tips, the verify step had {step.rows} rows")
    for row, (tip, length) in enumerate(zip(tips, step.lengths, strict=True)):
        if not -1 <= tip < length:
            raise ValueError(f"commit: tip {tip} in row {row}, which has {length} tokens")
        if not isinstance(accepted, Tensor) and (tip < 0) != (accepted[row] == 0):
            raise ValueError(f"commit: {accepted[row]} accepted in row {row}, but its tip is {tip}")
