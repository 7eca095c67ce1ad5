"""One call of an operation that a provider and the oracle take alike.

A case poisons what nobody may read: free slots, pads, the result buffer and the memory between
strided views hold NaN, and rows without tokens carry live slots. `check` compares with the oracle,
then asserts zero pads and that no byte outside the write set changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hal import reference
from hal.testing.metric import LIMITS, by_head, worst
from hal.testing.rows import NAN, Rows, changed_outside, clone_view

Call = Callable[..., Tensor]


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
    """Arguments of one call by name, and how to judge it."""

    operation: str
    args: dict[str, Any]
    rows: Rows
    layout: str
    heads: int
    options: dict[str, Any] = field(default_factory=dict)
    width: int = 0

    @property
    def track(self) -> Tensor | None:
        """The call's track points, if it has any."""
        track: Tensor | None = self.options.get("track")
        return track

    def run(self, call: Call, *, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The provider's result and its state, on a copy of the pool."""
        state = clone_view(self.args["state"])
        result = call(**{**self.args, "state": state}, **self.options, out=out)
        return result, state

    def expect(self) -> tuple[Tensor, Tensor]:
        """What the oracle says."""
        oracle = getattr(reference, self.operation.replace(".", "_"))
        result, state = oracle(**self.args, **self.options, layout=self.layout)
        return result, state

    def errors(self, call: Call, *, out: Tensor | None = None) -> Errors:
        """Run and compare; nothing is asserted."""
        got, state = self.run(call, out=out)
        want, wanted = self.expect()
        split = [(got[s], want[s]) for s in self.rows.spans() if s.stop > s.start]
        head = max((by_head(g[: self.width - 1], w[: self.width - 1], 0) for g, w in split),
                   default=0.0) if self.width else 0.0  # fmt: skip
        slots = sorted(self.rows.written(self.track) - {0})
        return Errors(
            out=max((by_head(g, w, self.heads) for g, w in split), default=0.0),
            state=worst(state[slots], wanted[slots], 2 if self.heads else 1),
            head=head,
            pads=self._pads(got),
            stray=changed_outside(self.args["state"], state, self.rows.written(self.track)),
        )

    def _pads(self, got: Tensor) -> int:
        """Elements of pad tokens and pad rows that are not zero; NaN is not zero."""
        pads = torch.ones(got.shape[0], dtype=torch.bool)
        for span, src, dst in zip(self.rows.spans(), self.rows.src, self.rows.dst, strict=True):
            if not self.operation.endswith("decode") or src >= 0 or dst >= 0:
                pads[span] = False
        return int((got[pads] != 0).sum())

    def check(self, call: Call, kind: str = "one rounding", *, poison: bool = True) -> None:
        """Assert parity within the limits of this dtype and class, and an exact write set."""
        inputs = self.args["v" if self.heads else "x"]
        out = torch.full_like(inputs, NAN, memory_format=torch.contiguous_format)
        errors = self.errors(call, out=out if poison else None)
        limits = LIMITS[str(inputs.dtype).removeprefix("torch."), kind]
        assert errors.within(limits), f"{self.operation}: {errors}, limits {limits}"

    def replace(self, **args: Any) -> Case:
        """The same case with other arguments."""
        return replace(self, args={**self.args, **args})
