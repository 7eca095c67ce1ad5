"""Verify rows as host data: which token follows which, and what commit has to write.

Tokens are named by their place in the packed batch, and -1 is the committed state.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from hal.runtime.checks import check_rows, check_slots, check_starts
from hal.runtime.verify_checks import check_last, check_parents, check_scratch
from hal_cpu.rows import gather

Advance = Callable[[Tensor, Tensor], Tensor]
"""Takes states `[n, …]` and the places of their next tokens; advances the states in place."""


@dataclass(frozen=True, slots=True)
class Level:
    """The tokens of one depth.

    `origins` are the places of their parents in the level above, or the slots of their rows
    (negative = none) at the top.
    """

    tokens: list[int]
    origins: list[int]


@dataclass(frozen=True, slots=True)
class Paths:
    """The rows of a verify batch: bounds, slots, and the parent of every token."""

    starts: list[int]
    sources: list[int]
    up: list[int]

    @classmethod
    def of(
        cls,
        operation: str,
        slots: int,
        tokens: int,
        src: Tensor,
        query_start_loc: Tensor,
        parents: Tensor | None,
        name: str,
    ) -> Self:
        """Read the batch; without `parents` every row is a chain. `name` is the input in messages.

        Only the tokens that belong to rows have a parent.
        """
        starts, sources = query_start_loc.tolist(), src.tolist()
        check_starts(operation, starts, tokens, name)
        check_slots(operation, "src", sources, slots)
        given = None if parents is None else parents.tolist()
        if given is not None:
            check_parents(operation, starts, given)
        up = []
        for begin, end in pairwise(starts):
            own = range(-1, end - begin - 1) if given is None else given[begin:end]
            up += [begin + parent if parent >= 0 else -1 for parent in own]
        return cls(starts, sources, up)

    def levels(self) -> list[Level]:
        """The tokens by depth, the roots first."""
        levels: list[Level] = []
        places: list[tuple[int, int]] = []
        for (begin, end), slot in zip(pairwise(self.starts), self.sources, strict=True):
            for token in range(begin, end):
                parent = self.up[token]
                depth, origin = (
                    (places[parent][0] + 1, places[parent][1]) if parent >= 0 else (0, slot)
                )
                if depth == len(levels):
                    levels.append(Level([], []))
                places.append((depth, len(levels[depth].tokens)))
                levels[depth].tokens.append(token)
                levels[depth].origins.append(origin)
        return levels

    def remember(self, parents: Tensor) -> None:
        """Keep the parents in scratch, where commit finds them."""
        parents[: len(self.up)] = torch.tensor(self.up, dtype=parents.dtype)


def run_levels(paths: Paths, state: Tensor, advance: Advance, result: Tensor) -> Tensor:
    """Run every token from its parent's state, level by level; `state` is only read.

    Pads of `result` are zeroed. A chain's states move on in place; a tree copies them where
    branches part or end.
    """
    result[paths.starts[-1] :] = 0
    held = state
    for depth, level in enumerate(paths.levels()):
        if depth == 0:
            held = gather(state, level.origins)
        elif level.origins != list(range(held.shape[0])):
            held = held.index_select(0, torch.tensor(level.origins))
        tokens = torch.tensor(level.tokens)
        result.index_copy_(0, tokens, advance(held, tokens))
    return result


@dataclass(frozen=True, slots=True)
class Accepted:
    """A row to commit: its slots (negative = none), and its accepted tokens in order."""

    src: int
    dst: int
    path: list[int]


def accepted(
    operation: str,
    state: Tensor,
    scratch: Sequence[Tensor],
    tensors: int,
    src: Tensor,
    dst: Tensor,
    query_start_loc: Tensor,
    last: Tensor,
    others: Sequence[tuple[str, Tensor]] = (),
) -> list[Accepted]:
    """The rows that write: with tokens, a `dst` and a last token. Parents are the last scratch.

    Scratch that no verify filled has no parents: a token that does not follow an earlier one of its
    row is refused.
    """
    named = (("dst", dst), ("last", last), *others)
    check_rows(operation, 0, src, named, query_start_loc)
    starts, ends = query_start_loc.tolist(), last.tolist()
    check_scratch(operation, scratch, tensors, starts[-1])
    check_starts(operation, starts, starts[-1], "scratch")
    check_last(operation, starts, ends)
    sources, targets = src.tolist(), dst.tolist()
    check_slots(operation, "src", sources, state.shape[0])
    check_slots(operation, "dst", targets, state.shape[0])
    up = scratch[-1][: starts[-1]].tolist()
    return [
        Accepted(source, target, _path(operation, up, begin, begin + token))
        for (begin, end), source, target, token in zip(
            pairwise(starts), sources, targets, ends, strict=True
        )
        if begin < end and target >= 0 and token >= 0
    ]


def _path(operation: str, up: Sequence[int], begin: int, token: int) -> list[int]:
    """The tokens from a root to `token`, in a row that begins at `begin`."""
    path = [token]
    while up[token] >= 0:
        if not begin <= up[token] < token:
            raise ValueError(
                f"{operation}: scratch says that token {token} follows {up[token]}, expected one "
                f"from {begin} up to it: it was not filled by a verify of these rows"
            )
        token = up[token]
        path.append(token)
    return path[::-1]
