"""A call on tensors of its own on the device, whose contents move from step to step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hal.testing.plan import PACKED, TOKENS, verify_batch
from hal.testing.subject import prepared
from hal.testing.verify_cases import GARBAGE, STATES, poisoned
from hal_registry import interface_of

if TYPE_CHECKING:
    from hal.testing.case import Case
    from hal.testing.plan import Trial
    from hal.testing.subject import Subject

IDS: Final = ("src", "dst", "start", "query_start_loc", "last")

Keep = Callable[..., Any]
"""What a callable is wrapped in before it is called: nothing, or a graph's tape."""


def turned(trial: Trial, turn: int) -> Case:
    """Other tokens, and the rows in another order, so that pads and slots lie elsewhere."""
    width = trial.settings.get("verify_width")
    rows = verify_batch(width) if width else TOKENS if trial.decode else PACKED
    return trial.case((*rows[turn:], *rows[:turn]), seed=turn)


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """The case that it was made of, the tensors that the block reads, and the block."""

    first: Case
    args: dict[str, Any]
    block: Callable[[Keep], Tensor]

    @classmethod
    def of(cls, subject: Subject, trial: Trial, case: Case) -> Held:
        """Copy a case to the device, with the layer's weights laid out as at bind."""
        moved = case.args | _last(case)
        args = {name: _copied(value, subject.place) for name, value in moved.items()}
        args = prepared(subject.provider(trial.layouts), args)
        return cls(case, args, _block(subject, trial, args, case))

    def run(self) -> Tensor:
        """The call, as the tensors are now."""
        return self.block(lambda call: call)

    def write(self, own: Case) -> Case:
        """Rewrite whatever moves from step to step; the case that is there then."""
        moving = {*own.tokens, *own.pools, *IDS}
        kept = {n: value for n, value in self.first.args.items() if n not in moving}
        case = own.replace(**kept)
        for name, value in (case.args | _last(case)).items():
            if name in moving:
                self.args[name].copy_(value)
        return case

    def check(self, case: Case, result: Tensor, kind: str, when: str) -> None:
        """Assert that result and states are those of the case."""
        pools = {name: self.args[name].cpu() for name in case.pools}
        errors, limits = case.compare(result.cpu(), pools, *case.expect_all()), case.limits(kind)
        assert errors.within(limits), f"{when}: {errors}, {limits}"


def _last(case: Case) -> dict[str, Tensor]:
    """The last draft of each row."""
    lengths = torch.tensor(case.rows.lengths, dtype=torch.int32)
    return {"last": torch.where(lengths > 0, lengths - 1, GARBAGE).to(torch.int32)}


def _copied(value: Any, place: torch.device) -> Any:
    """A value whose tensors are the holder's own."""
    if isinstance(value, Tensor):
        return value.to(place, copy=True)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{f.name: _copied(getattr(value, f.name), place) for f in fields(value)}
        )
    return value


def _block(
    subject: Subject, trial: Trial, args: dict[str, Any], case: Case
) -> Callable[[Keep], Tensor]:
    """The operation on these tensors; of verify, with the commit of every draft."""
    provider, interface = subject.provider(trial.layouts), interface_of(trial.operation)
    served, verb = getattr(provider, interface), trial.operation.partition(".")[2]
    own = {name: value for name, value in args.items() if name != "last"} | case.options

    def plain(keep: Keep) -> Any:
        return keep(getattr(served, verb))(**own)

    if verb != "verify":
        return plain
    shapes = {STATES[interface]: tuple(args["state"].shape[1:])}
    asked = provider.scratch_spec(interface, shapes, len(args["src"]), trial.room)
    scratch = [tensor.to(subject.place) for tensor in poisoned(asked)]
    drafts = {name: value for name, value in own.items() if name != "dst"}
    rows = {name: args[name] for name in ("state", *IDS) if name in args}

    def both(keep: Keep) -> Any:
        result = keep(served.verify)(**drafts, scratch=scratch)
        keep(served.commit)(**rows, scratch=scratch)
        return result

    return both
