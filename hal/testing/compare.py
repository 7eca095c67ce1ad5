"""How two runs, or a run and the oracle, are compared."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from hal.testing.case import Case, Pools
from hal.testing.metric import by_head, worst
from hal.testing.rows import changed_outside, whole_of


def same_bits(one: Tensor, two: Tensor) -> bool:
    """Bitwise equality, NaN included."""
    whole = {4: torch.int32, 2: torch.int16, 8: torch.int64}[one.element_size()]
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    return torch.equal(one.contiguous().view(whole), two.contiguous().view(whole))


def same_pools(one: Pools, two: Pools) -> bool:
    """Bitwise equality of all pools, memory between the slots included."""
    return all(changed_outside(one[name], two[name], set()) == 0 for name in one)


def agree(
    case: Case,
    got: Tensor,
    pools: Pools,
    want: Tensor,
    ends: Pools,
    limits: tuple[float, float],
) -> None:
    """Results of the rows and the states that they wrote agree within (result, state)."""
    split = [(got[s], want[s].double()) for s in case.rows.spans() if s.stop > s.start]
    error = max((by_head(g, w, case.heads) for g, w in split), default=0.0)
    assert error <= limits[0], f"results differ by {error}, limit {limits[0]}"
    for name in case.pools:
        mine, right = case.held(name, pools[name]), case.held(name, ends[name])
        error = worst(mine, right.double(), 2 if case.heads and name == case.pools[0] else 1)
        assert error <= limits[1], f"{name} differs by {error}, limit {limits[1]}"


@contextmanager
def unwritten(args: Mapping[str, Any], pools: Collection[str] = ()) -> Iterator[None]:
    """Assert that nothing of a call's arguments but its pools is written.

    Memory beside strided inputs counts, and so do the tensors of records.
    """
    held = [(n, t) for n, value in args.items() if n not in pools for t in _tensors(value)]
    before = [whole_of(tensor).clone() for _, tensor in held]
    yield
    for (name, tensor), was in zip(held, before, strict=True):
        assert torch.equal(whole_of(tensor), was), f"input {name} changed"


def _tensors(value: Any) -> list[Tensor]:
    """The tensors of an argument."""
    if is_dataclass(value) and not isinstance(value, type):
        return [t for f in fields(value) for t in _tensors(getattr(value, f.name))]
    return [value] if isinstance(value, Tensor) else []


def twice(limits: tuple[float, float]) -> tuple[float, float]:
    """The limits of two results that are each within them."""
    return 2 * limits[0], 2 * limits[1]
