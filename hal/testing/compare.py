"""How two runs, or a run and the oracle, are compared."""

import torch
from torch import Tensor

from hal.testing.case import Case, Pools
from hal.testing.metric import by_head, worst
from hal.testing.rows import changed_outside


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


def twice(limits: tuple[float, float]) -> tuple[float, float]:
    """The limits of two results that are each within them."""
    return 2 * limits[0], 2 * limits[1]
