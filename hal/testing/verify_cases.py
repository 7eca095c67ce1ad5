"""Verify and commit as one case: draft tokens, then the accepted path of every row.

The committed pool must be read and never written by `verify`; scratch starts as NaN and large ids,
twice the size that the rows fill. `commit` must leave what the oracle's replay of the path leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from hal import reference
from hal.interfaces import Scratch
from hal.testing.case import Case, Errors
from hal.testing.compare import unwritten
from hal.testing.rows import NAN, Rows, changed_outside, clone_view, i32
from hal_registry import interface_of

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


STATES: Final = {"conv": "conv", "delta_rule": "recurrent", "scan": "scan"}
"""The state that each interface commits, by its name."""

ScratchSpec = Callable[[str, dict[str, tuple[int, ...]], int, int], Sequence[Scratch]]


def poisoned(asked: Sequence[Scratch]) -> list[Tensor]:
    """Scratch of the asked shapes, full of NaN and large ids."""
    return [
        torch.full(s.shape, GARBAGE if s.dtype == "int32" else NAN, dtype=getattr(torch, s.dtype))
        for s in asked
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A verify: its result, the pool as it left it, the pool to commit to, and its scratch."""

    result: Tensor
    between: Tensor
    state: Tensor
    scratch: list[Tensor]


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
    room: int = 0
    """The width that scratch is asked for where it is more than the rows'."""

    @classmethod
    def of(cls, case: Case, parents: Tensor | None, last: Tensor, room: int = 0) -> VerifyCase:
        """Turn a prefill case into a verify case; its rows keep their slots."""
        return cls(case, parents, last, STATES[interface_of(case.operation)], room)

    @property
    def interface(self) -> str:
        """conv, delta_rule or scan."""
        return self.case.operation.partition(".")[0]

    def scratch(self, spec: ScratchSpec) -> list[Tensor]:
        """What the provider asks for, poisoned."""
        rows = self.case.rows
        shapes = {self.state_name: tuple(self.case.args["state"].shape[1:])}
        width = max((1, self.room, *rows.lengths))
        return poisoned(spec(self.interface, shapes, 2 * len(rows.lengths) + 1, width))

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
        flight = self.start(served, spec, out=out)
        self.land(served, flight)
        return flight.result, flight.between, flight.state

    def start(self, served: Served, spec: ScratchSpec, *, out: Tensor | None = None) -> Flight:
        """Verify on a copy of the pool, and leave it uncommitted."""
        state, scratch = clone_view(self.case.args["state"]), self.scratch(spec)
        args = self.verify_args(state)
        with unwritten(args, ["state"]):
            result = served.verify(**args, scratch=scratch, out=out)
        return Flight(result, clone_view(state), state, scratch)

    def land(self, served: Served, flight: Flight) -> None:
        """Commit what was verified."""
        args = self.commit_args(flight.state)
        with unwritten(args, ["state"]):
            served.commit(**args, scratch=flight.scratch)

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
        flight = self.start(served, spec, out=self.blank())
        self.land(served, flight)
        return self.judge(flight)

    def blank(self) -> Tensor:
        """A poisoned result, shaped as the oracle's."""
        tokens: Tensor = next(self.case.args[name] for name in "vx" if name in self.case.args)
        return torch.full(tokens.shape, NAN, dtype=self.case.dtype)

    def judge(self, flight: Flight) -> tuple[Errors, int]:
        """What of a committed flight differs from the oracle, and what verify has changed."""
        want, wanted = self.expect()
        got, between, state = flight.result, flight.between, flight.state
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
        check_together([self], served, spec, kind)

    def hold(self, flight: Flight, kind: str) -> None:
        """Assert that a committed flight is within the limits."""
        errors, touched = self.judge(flight)
        limits = self.case.limits(kind)
        name = f"{self.interface}.verify"
        assert touched == 0, f"{name}: {touched} committed elements changed"
        assert errors.within(limits), f"{name} and commit: {errors}, limits {limits}"


def check_together(
    cases: Sequence[VerifyCase], served: Served, spec: ScratchSpec, kind: str
) -> None:
    """Verify every case before the first is committed, as a step does with its layers."""
    flights = [case.start(served, spec, out=case.blank()) for case in cases]
    for case, flight in zip(cases, flights, strict=True):
        case.land(served, flight)
    for case, flight in zip(cases, flights, strict=True):
        case.hold(flight, kind)
