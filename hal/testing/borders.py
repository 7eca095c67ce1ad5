"""Where a declared set or range is tested: its borders, something odd between, and one beyond."""

from collections.abc import Collection, Iterator
from typing import Any, Final

FEW: Final = 8
"""So many members are all tested."""


def members(values: Collection[int]) -> list[int]:
    """First, last, and the odd non-power of two nearest to the middle of the range (by ratio)."""
    inside = sorted(value for value in values if value > 0)
    if len(inside) < 3:
        return inside
    middle = (inside[0] * inside[-1]) ** 0.5
    strange = [v for v in inside[1:-1] if v & (v - 1)] or inside[1:-1]
    odd = [v for v in strange if v % 2] or strange
    return [inside[0], min(odd, key=lambda v: abs(v - middle)), inside[-1]]


def each(values: Collection[int]) -> list[int]:
    """Every member where there are few, since kernels are written out for each; else borders."""
    inside = sorted(value for value in values if value > 0)
    return inside if len(inside) <= FEW else members(inside)


def typical(values: Collection[int], wanted: int) -> int:
    """The member nearest to a size that keeps cases small."""
    return min((value for value in values if value > 0), key=lambda v: (abs(v - wanted), v))


def outside(values: Collection[int]) -> list[int]:
    """Integers just beyond the borders and in the first gap between members."""
    inside = sorted(value for value in values if value > 0)
    if not inside:
        return [1]
    gap = next((v + 1 for v in inside if v + 1 not in inside), inside[-1] + 1)
    around = {inside[0] - 1, gap, inside[-1] + 1}
    return sorted(v for v in around if v > 0 and v not in inside)


def other(values: Collection[str], known: Collection[str]) -> str:
    """A word that is not declared: a known one if there is one left."""
    return next((word for word in known if word not in values), "undeclared")


def pairs(dims: Collection[Any]) -> Iterator[tuple[int, int]]:
    """(K, V) at the borders: declared pairs as such, dims that each may have crosswise."""
    yield from sorted(pair for pair in dims if isinstance(pair, tuple))
    single = [dim for dim in dims if not isinstance(dim, tuple)]
    edges = members(single)
    for i, dim in enumerate(edges):
        yield dim, edges[i - 1]


def pairs_outside(dims: Collection[Any]) -> list[tuple[int, int]]:
    """(K, V) of which no part, or no combination, is declared."""
    single = [dim for dim in dims if not isinstance(dim, tuple)]
    declared = [pair for pair in dims if isinstance(pair, tuple)]
    swapped = [(v, k) for k, v in declared if (v, k) not in declared]
    large = max([*single, *(n for pair in declared for n in pair)], default=0) + 1
    tried = [(large, large), *swapped[:1], *((v, v) for v in outside(single) if v < large)]
    return [pair for pair in tried if pair not in declared and not all(v in single for v in pair)]
