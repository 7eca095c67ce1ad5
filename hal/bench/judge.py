"""Hold an outcome against the oracle within the kit's limits, before anything is timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from hal.bench.entrant import Outcome
from hal.testing.case import Case, Errors, Pools

WHOLE: Final = 1024
"""Tokens up to which the oracle is run on the very inputs that are timed."""
CUT: Final = (200, 65, 1)
"""The rows that stand for a shape beyond it."""
EQUAL: Final = (200, 200)
"""The rows that stand for one of equal rows, for those that take no others."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The errors of an outcome and the limits; `state` is None where a peer gives no state."""

    result: float
    state: float | None
    limits: tuple[float, float]
    right: bool


def checked_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    """The rows to check: all, or a few short ones with the same dims."""
    if sum(lengths) <= WHOLE:
        return tuple(lengths)
    return tuple(
        min(most, length) for most, length in zip(CUT, sorted(lengths)[::-1], strict=False)
    )


def judge(case: Case, kind: str, want: tuple[Tensor, Pools], got: Outcome) -> Verdict:
    """An outcome against what is right; a NaN, or an element that nobody may write, is wrong."""
    pools = {n: p.cpu() for n, p in (got.pools or {}).items()}
    if got.pools is None:
        pools = {name: want[1][name].to(case.args[name].dtype) for name in case.pools}
    errors = case.compare(got.result.detach().cpu(), pools, *want)
    if got.pools is None:
        errors = Errors(errors.out, 0.0, errors.head, errors.pads)
    limits = case.limits(kind)
    state = None if got.pools is None else errors.state
    return Verdict(max(errors.out, errors.head), state, limits, errors.within(limits))


def like(case: Case, kind: str, first: Outcome, other: Outcome) -> Verdict:
    """Two outcomes that may each be off by the limits, as those at sizes nobody ran the oracle."""
    pools = {name: pool.cpu().double() for name, pool in (first.pools or {}).items()}
    found = judge(case, kind, (first.result.cpu().double(), pools), other)
    out, state = (2 * limit for limit in found.limits)
    right = found.result <= out and (found.state or 0.0) <= state
    return Verdict(found.result, found.state, (out, state), right)
