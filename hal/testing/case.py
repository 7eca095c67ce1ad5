"""One call of an operation that a provider and the oracle take alike.

A case poisons what nobody may read: free slots, pads, the result buffer and the memory between
strided views hold NaN, and rows without tokens carry live slots. `check` compares with the oracle,
then asserts zero pads and that no byte outside the write set changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from hal import reference
from hal.reference.conv import read_window
from hal.testing.metric import by_head, limits, name_of, worst
from hal.testing.rows import NAN, Rows, changed_outside, clone_view

Call = Callable[..., Tensor]
Pools = dict[str, Tensor]
Oracle = Callable[..., tuple[Tensor, Pools]]

TOKEN_ARGS: Final = frozenset({"x", "q", "k", "v", "a", "b", "dt", "B", "C", "z", "mixed_qkv"})
"""Arguments that hold a row for every token."""


@dataclass(frozen=True, slots=True)
class Errors:
    """What a comparison found: error of result and state, and of the first W-1 tokens (conv)."""

    out: float
    state: float
    head: float = 0.0
    pads: int = 0
    stray: int = 0

    def within(self, limits: tuple[float, float]) -> bool:
        """Whether the errors are inside (result, state) and nothing else was touched."""
        clean = self.pads == 0 and self.stray == 0
        return clean and max(self.out, self.head) <= limits[0] and self.state <= limits[1]


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Arguments of one call by name, and how to judge it.

    `pools` names the arguments that are state, `layouts` their layouts where they differ from
    `layout`. `oracle` stands in for the reference operation of the same name.
    """

    operation: str
    args: dict[str, Any]
    rows: Rows
    layout: str
    heads: int
    options: dict[str, Any] = field(default_factory=dict)
    width: int = 0
    pools: tuple[str, ...] = ("state",)
    layouts: dict[str, str] = field(default_factory=dict)
    oracle: Oracle | None = None

    @property
    def track(self) -> Tensor | None:
        """The call's track points, if it has any."""
        track: Tensor | None = self.options.get("track")
        return track

    @property
    def decode(self) -> bool:
        """Whether every row is one token."""
        return "query_start_loc" not in self.args

    @property
    def dtype(self) -> torch.dtype:
        """The activation dtype."""
        inputs: Tensor = next(self.args[n] for n in ("v", "x", "mixed_qkv") if n in self.args)
        return inputs.dtype

    @property
    def tokens(self) -> dict[str, Tensor]:
        """The arguments that hold a row for every token."""
        return {n: t for n, t in self.args.items() if n in TOKEN_ARGS and t is not None}

    def run(self, call: Call, *, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The provider's result and its state, on a copy of the pool."""
        result, pools = self.run_all(call, out=out)
        return result, pools[self.pools[0]]

    def run_all(self, call: Call, *, out: Tensor | None = None) -> tuple[Tensor, Pools]:
        """The provider's result and all its states, on copies of the pools."""
        pools = {name: clone_view(self.args[name]) for name in self.pools}
        result = call(**{**self.args, **pools}, **self.options, out=out)
        return result, pools

    def expect(self) -> tuple[Tensor, Tensor]:
        """What the oracle says."""
        result, pools = self.expect_all()
        return result, pools[self.pools[0]]

    def expect_all(self) -> tuple[Tensor, Pools]:
        """What the oracle says, for all states."""
        if self.oracle is not None:
            return self.oracle(**self.args, **self.options)
        name = self.operation.replace("verify", "prefill")  # all drafts, one after the other
        oracle = getattr(reference, name.replace(".", "_"))
        named = {"layout": self.layout} if self.layout != "PN" else {}
        result, state = oracle(**self.args, **self.options, **named)
        return result, {self.pools[0]: state}

    def errors(self, call: Call, *, out: Tensor | None = None) -> Errors:
        """Run and compare; nothing is asserted."""
        got, pools = self.run_all(call, out=out)
        return self.compare(got, pools, *self.expect_all())

    def compare(self, got: Tensor, pools: Pools, want: Tensor, wanted: Pools) -> Errors:
        """The errors of a result and the pools after it."""
        split = [(got[s], want[s]) for s in self.rows.spans() if s.stop > s.start]
        lost = range(max(0, self.width - 1))
        head = [by_head(g[: len(lost)], w[: len(lost)], self.heads) for g, w in split if lost]
        pads = torch.ones(got.shape[0], dtype=torch.bool)
        pads[self.rows.live(decode=self.decode)] = False
        written = self.rows.written(self.track)
        return Errors(
            out=max((by_head(g, w, self.heads) for g, w in split), default=0.0),
            state=max(self._state_error(n, pools[n], wanted[n]) for n in self.pools),
            head=max(head, default=0.0),
            pads=int((got[pads] != 0).sum()),
            stray=sum(changed_outside(self.args[n], pools[n], written) for n in self.pools),
        )

    def held(self, name: str, pool: Tensor) -> Tensor:
        """What the written slots of a pool hold; of a ring only its live rows, oldest first."""
        ends = dict(sorted((s, p) for s, p in self.rows.ends(self.track).items() if s > 0))
        if self.layouts.get(name, self.layout) != "ring":
            return pool[list(ends)]
        width = pool.shape[1]
        windows = [read_window(pool, s, p, width, "ring") for s, p in ends.items()]
        return torch.stack(windows) if windows else pool[:0]

    def _state_error(self, name: str, got: Tensor, want: Tensor) -> float:
        """The error of a pool; windows of the inputs' own dtype are exact or wrong."""
        mine, right = self.held(name, got), self.held(name, want)
        if name == "conv_state" or self.width:
            same = torch.equal(mine.double(), right)
            return 0.0 if same else max(worst(mine, right, 1), torch.finfo(torch.float32).tiny)
        return worst(mine, right, 2 if self.heads else 1)

    def limits(self, kind: str, calls: int = 1) -> tuple[float, float]:
        """(result, state) limits of this case in a class; windows have no tolerance."""
        state = torch.float32 if self.width else self.args[self.pools[0]].dtype
        out, held = limits(self.dtype, kind, state, calls)
        return out, 0.0 if self.width else held

    def check(self, call: Call, kind: str = "one rounding", *, poison: bool = True) -> None:
        """Assert parity within the limits of this dtype and class, and an exact write set."""
        want, wanted = self.expect_all()
        out = torch.full(want.shape, NAN, dtype=self.dtype) if poison else None
        got, pools = self.run_all(call, out=out)
        errors = self.compare(got, pools, want, wanted)
        allowed = self.limits(kind)
        text = f"{self.operation} in {name_of(self.dtype)}, {kind}: {errors}, limits {allowed}"
        assert errors.within(allowed), text

    def replace(self, **args: Any) -> Case:
        """The same case with other arguments."""
        return replace(self, args={**self.args, **args})
