"""Verify and commit as one case: draft tokens, then the accepted path of every row.

The committed pool must be read and never written by `verify`; scratch starts as NaN and large ids,
twice the size that the rows fill. `commit` must leave what the oracle's replay of the path leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from hal import reference
from hal.interfaces import Scratch
from hal.testing.case import Case, Errors
from hal.testing.rows import NAN, Rows, changed_outside, clone_view, i32

GARBAGE = 1 << 20


class Served(Protocol):
    """The two operations of an interface."""

    @property
    def verify(self) -> Callable[..., Tensor]:
        """Runs drafts and fills scratch."""
        ...

    @property
    def commit(self) -> Callable[..., None]:
        """Writes the accepted path."""
        ...


ScratchSpec = Callable[[str, dict[str, tuple[int, ...]], int, int], Sequence[Scratch]]


def chain(rows: Rows) -> Tensor:
    """The parents of a batch of chains; pads hold garbage."""
    own = [t - 1 for n in rows.lengths for t in range(n)]
    return i32(*own, *[GARBAGE] * rows.pads)


def tree(rows: Rows, *, seed: int = 0) -> Tensor:
    """Random topological parents: branches, several roots, and children out of order."""
    gen = torch.Generator().manual_seed(seed)
    own = [
        int(torch.randint(-1, t, (1,), generator=gen)) if t else -1
        for n in rows.lengths
        for t in range(n)
    ]
    return i32(*own, *[GARBAGE] * rows.pads)


def accept(rows: Rows, *, seed: int = 0) -> Tensor:
    """A last token for every row, -1 included; a row without tokens holds garbage."""
    gen = torch.Generator().manual_seed(seed)
    ends = [int(torch.randint(-1, n, (1,), generator=gen)) if n else GARBAGE for n in rows.lengths]
    return i32(*ends)


@dataclass(frozen=True, slots=True, eq=False)
class VerifyCase:
    """A prefill case whose tokens are drafts, with parents (None: chains) and last tokens."""

    case: Case
    parents: Tensor | None
    last: Tensor
    state_name: str

    @classmethod
    def of(cls, case: Case, parents: Tensor | None, last: Tensor) -> VerifyCase:
        """Turn a prefill case into a verify case; its rows keep their slots."""
        names = {"conv": "conv", "delta_rule": "recurrent", "scan": "scan"}
        interface = case.operation.partition(".")[0]
        return cls(case, parents, last, names[interface])

    @property
    def interface(self) -> str:
        """conv, delta_rule or scan."""
        return self.case.operation.partition(".")[0]

    def scratch(self, spec: ScratchSpec) -> list[Tensor]:
        """What the provider asks for, poisoned."""
        rows = self.case.rows
        shapes = {self.state_name: tuple(self.case.args["state"].shape[1:])}
        width = max((1, *rows.lengths))
        asked = spec(self.interface, shapes, 2 * len(rows.lengths) + 1, width)
        return [
            torch.full(
                s.shape, GARBAGE if s.dtype == "int32" else NAN, dtype=getattr(torch, s.dtype)
            )
            for s in asked
        ]

    def verify_args(self, state: Tensor) -> dict[str, Any]:
        """The arguments of verify without scratch, on the given pool."""
        args = {name: value for name, value in self.case.args.items() if name != "dst"}
        options = {name: v for name, v in self.case.options.items() if name != "track"}
        return {**args, **options, "state": state, "parents": self.parents}

    def commit_args(self, state: Tensor) -> dict[str, Any]:
        """The arguments of commit without scratch, on the given pool."""
        names = ["src", "dst", "query_start_loc", *(["start"] if self.interface == "conv" else [])]
        return {**{n: self.case.args[n] for n in names}, "state": state, "last": self.last}

    def expect(self) -> tuple[Tensor, Tensor]:
        """The result of verify and the pool after commit, from the oracle."""
        args, case = self.verify_args(self.case.args["state"]), self.case
        if self.interface != "scan":
            args["layout"] = case.layout
        result, ends = getattr(reference, f"{self.interface}_verify")(**args)
        held = case.args
        pool = reference.commit(
            held["state"], ends, held["dst"], held["query_start_loc"], self.last
        )
        return result, pool

    def run(
        self, served: Served, spec: ScratchSpec, *, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The result, the pool between verify and commit, and the pool after commit."""
        state, scratch = clone_view(self.case.args["state"]), self.scratch(spec)
        result = served.verify(**self.verify_args(state), scratch=scratch, out=out)
        between = clone_view(state)
        served.commit(**self.commit_args(state), scratch=scratch)
        return result, between, state

    def committed(self) -> Rows:
        """The rows as commit sees them: with the tokens of the accepted path."""
        ends = self.last.tolist()
        spans = pairwise(self.case.rows.bounds)
        given = None if self.parents is None else self.parents.tolist()
        lengths = tuple(
            len(reference.path_to(None if given is None else given[b:e], last))
            if b < e and last >= 0
            else 0
            for (b, e), last in zip(spans, ends, strict=True)
        )
        return replace(self.case.rows, lengths=lengths)

    def errors(self, served: Served, spec: ScratchSpec) -> tuple[Errors, int]:
        """What differs from the oracle, and how many committed elements verify has changed."""
        want, wanted = self.expect()
        out = torch.full(want.shape, NAN, dtype=self.case.dtype)
        got, between, state = self.run(served, spec, out=out)
        touched = changed_outside(self.case.args["state"], between, set())
        pool = self.case.pools[0]
        of_result = self.case.compare(got, {pool: between}, want, {pool: wanted})
        committed = replace(self.case, rows=self.committed())
        of_state = committed.compare(got, {pool: state}, want, {pool: wanted})
        return (
            Errors(of_result.out, of_state.state, of_result.head, of_result.pads, of_state.stray),
            touched,
        )

    def check(self, served: Served, spec: ScratchSpec, kind: str = "one rounding") -> None:
        """Assert parity with the oracle and that verify left the committed state alone."""
        errors, touched = self.errors(served, spec)
        limits = self.case.limits(kind)
        name = f"{self.interface}.verify"
        assert touched == 0, f"{name}: {touched} committed elements changed"
        assert errors.within(limits), f"{name} and commit: {errors}, limits {limits}"
