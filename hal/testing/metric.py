"""The metric and the limits that every provider is held to."""

from typing import Final

import torch
from torch import Tensor

LIMITS: Final[dict[tuple[str, str], tuple[float, float]]] = {
    ("float32", "one rounding"): (1e-5, 1e-5),
    ("float32", "chunked"): (1e-5, 1e-5),
    ("float32", "tf32"): (3e-3, 3e-3),
    ("bfloat16", "one rounding"): (4e-3, 1e-5),
    ("bfloat16", "chunked"): (2e-2, 2e-2),
    ("float16", "one rounding"): (5e-4, 1e-5),
    ("float16", "chunked"): (3e-3, 3e-3),
}
"""(result, state) limits by (dtype, class); a change of one is a change of the kit."""

DRIFT: Final = {"float32": 0.0, "bfloat16": 4e-3, "float16": 5e-4}
"""What a state of that dtype may lose by its rounding, times the root of the number of calls."""


def limits(
    dtype: torch.dtype, kind: str, state_dtype: torch.dtype = torch.float32, calls: int = 1
) -> tuple[float, float]:
    """(result, state) limits of a run of `calls` calls, each of which rounds the state once."""
    out, state = LIMITS[name_of(dtype), kind]
    drift = DRIFT[name_of(state_dtype)] * calls**0.5
    return out + drift, max(state, drift)


def name_of(dtype: torch.dtype) -> str:
    """The name as manifests spell it."""
    return str(dtype).removeprefix("torch.")


def worst(got: Tensor, want: Tensor, groups: int) -> float:
    """The largest relative Frobenius error over the first `groups` axes; NaN counts as infinite.

    A group that should be all zero must be exactly that. Elements below the smallest normal number
    of the result's dtype have no relative precision, so a group counts as at least that large.
    """
    if want.numel() == 0:
        return 0.0
    dims = tuple(range(groups, want.ndim))
    distance = torch.linalg.vector_norm(got.double() - want.double(), dim=dims)
    size = torch.linalg.vector_norm(want.double(), dim=dims)
    least = torch.finfo(got.dtype).tiny * (want[(0,) * groups].numel() ** 0.5)
    error = distance / size.clamp(min=least)
    return float(error.nan_to_num(nan=float("inf")).max())


def by_head(got: Tensor, want: Tensor, heads: int) -> float:
    """Error of one row's tokens: per head, or of the row where there are none."""
    if heads:
        return worst(got.transpose(0, 1), want.transpose(0, 1), 1)
    return worst(got.unsqueeze(0), want.unsqueeze(0), 1)
