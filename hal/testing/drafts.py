"""Verify and commit as one call with the arguments of prefill, so that the same tests hold them.

All drafts of a row are accepted, which leaves what a prefill of them leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hal.testing.rows import changed_outside, clone_view
from hal.testing.verify_cases import GARBAGE, STATES, ScratchSpec, poisoned
from hal_registry import interface_of

if TYPE_CHECKING:
    from hal.testing.case import Call
    from hal.testing.plan import Trial
    from hal.testing.subject import Subject

SMALL = 1 << 24
"""Elements of a pool that is compared before and after verify."""


def call_of(subject: Subject, trial: Trial) -> Call:
    """A trial's operation as a call on CPU tensors; of verify, with the commit of every draft."""
    own = subject.call(trial)
    if not trial.operation.endswith(".verify"):
        return own
    interface = interface_of(trial.operation)
    (state,) = (trial.case([(1, "continue")]).args[name] for name in ("state",))
    spec = subject.provider(trial.layouts).scratch_spec
    shapes = {STATES[interface]: tuple(state.shape[1:])}
    return _Accepted(own, subject.call(trial, "commit"), spec, shapes, trial).run


@dataclass(frozen=True, slots=True, eq=False)
class _Accepted:
    """Verify into scratch that is wider than the rows and has room for more, then commit."""

    verify: Callable[..., Any]
    commit: Callable[..., Any]
    spec: ScratchSpec
    shapes: dict[str, tuple[int, ...]]
    trial: Trial

    def run(self, *, state: Tensor, dst: Tensor, out: Tensor | None = None, **args: Any) -> Tensor:
        """The result of verify; `dst` holds the state after each row's last token."""
        bounds, width = args["query_start_loc"], max(self.trial.room, args["max_len"])
        rows = 2 * len(dst) + 1
        asked = self.spec(interface_of(self.trial.operation), self.shapes, rows, width)
        scratch, before = poisoned(asked), clone_view(state) if state.numel() < SMALL else None
        result: Tensor = self.verify(**args, state=state, scratch=scratch, out=out)
        if before is not None:
            stray = changed_outside(before, state, set())
            assert stray == 0, f"verify changed {stray} committed elements"
        lengths = bounds.diff()
        last = torch.where(lengths > 0, lengths - 1, GARBAGE).to(torch.int32)
        own = {name: args[name] for name in ("src", "start", "query_start_loc") if name in args}
        self.commit(**own, state=state, dst=dst, scratch=scratch, last=last)
        return result
