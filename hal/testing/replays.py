"""Declared `graph`: a recorded call is replayed on tensors that were rewritten in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hal.runtime.graphs import CudaGraph, Graph, TapeGraph
from hal.testing.plan import TOKENS, verify_batch
from hal.testing.subject import prepared
from hal.testing.verify_cases import GARBAGE, STATES, poisoned
from hal_registry import interface_of

if TYPE_CHECKING:
    from hal.testing.case import Case
    from hal.testing.plan import Trial
    from hal.testing.subject import Subject

IDS: Final = ("src", "dst", "start", "query_start_loc", "last")
REPLAYS: Final = (3, 1, 0, 2)
"""How far the rows are turned in each replay, so that pads and slots come to lie elsewhere."""


class Graphs:
    """Tests of operations that declare `graph`, recorded as the runtime would on the device."""

    def test_a_recorded_call_reads_what_its_tensors_hold_in_each_replay(
        self, hal_subject: Subject, graph_trial: Trial
    ) -> None:
        """Tokens, slots, bounds and states of every replay, in the tensors of the recording."""
        first = _turned(graph_trial, 0)
        held = _Recorded.of(hal_subject, graph_trial, first)
        for turn in REPLAYS:
            own = _turned(graph_trial, turn)
            moving = {*own.tokens, *own.pools, *IDS}
            kept = {n: value for n, value in first.args.items() if n not in moving}
            case = own.replace(**kept)
            held.write(case)
            held.graph.replay()
            pools = {name: held.args[name].cpu() for name in case.pools}
            errors = case.compare(held.result.cpu(), pools, *case.expect_all())
            limits = case.limits(graph_trial.kind)
            assert errors.within(limits), f"replay with rows turned by {turn}: {errors}, {limits}"


def _turned(trial: Trial, turn: int) -> Case:
    """Other tokens, and the rows in another order."""
    width = trial.settings.get("verify_width")
    rows = verify_batch(width) if width else TOKENS
    return trial.case((*rows[turn:], *rows[:turn]), seed=turn)


@dataclass(frozen=True, slots=True, eq=False)
class _Recorded:
    """A recorded block: its graph, the tensors that it reads, and its result."""

    graph: Graph
    args: dict[str, Any]
    result: Tensor

    @classmethod
    def of(cls, subject: Subject, trial: Trial, case: Case) -> _Recorded:
        """Run the call once, then record it."""
        place = subject.place
        cuda = place.type == "cuda"
        graph = CudaGraph(torch.cuda.graph_pool_handle()) if cuda else TapeGraph()
        args = {name: _copied(value, place) for name, value in (case.args | _last(case)).items()}
        args = prepared(subject.provider(trial.layouts), args)
        block = _block(subject, trial, args, case)
        block(lambda call: call)
        if cuda:
            torch.cuda.synchronize()
        with graph.recording():
            result = block(graph.tape.opaque if graph.tape else lambda call: call)
        return cls(graph, args, result)

    def write(self, case: Case) -> None:
        """Rewrite whatever moves from step to step."""
        for name, value in (case.args | _last(case)).items():
            if name in (*case.tokens, *case.pools, *IDS):
                self.args[name].copy_(value)


def _last(case: Case) -> dict[str, Tensor]:
    """The last draft of each row."""
    lengths = torch.tensor(case.rows.lengths, dtype=torch.int32)
    return {"last": torch.where(lengths > 0, lengths - 1, GARBAGE).to(torch.int32)}


def _copied(value: Any, place: torch.device) -> Any:
    """A value whose tensors are the recording's own."""
    if isinstance(value, Tensor):
        return value.to(place, copy=True)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{f.name: _copied(getattr(value, f.name), place) for f in fields(value)}
        )
    return value


def _block(
    subject: Subject, trial: Trial, args: dict[str, Any], case: Case
) -> Callable[[Callable[..., Any]], Tensor]:
    """The operation on these tensors; of verify, with the commit of every draft."""
    provider, interface = subject.provider(trial.layouts), interface_of(trial.operation)
    served, verb = getattr(provider, interface), trial.operation.partition(".")[2]
    own = {name: value for name, value in args.items() if name != "last"} | case.options

    def plain(keep: Callable[..., Any]) -> Any:
        return keep(getattr(served, verb))(**own)

    if verb != "verify":
        return plain
    shapes = {STATES[interface]: tuple(args["state"].shape[1:])}
    asked = provider.scratch_spec(interface, shapes, len(args["src"]), trial.room)
    scratch = [tensor.to(subject.place) for tensor in poisoned(asked)]
    drafts = {name: value for name, value in own.items() if name != "dst"}
    rows = {name: args[name] for name in ("state", *IDS) if name in args}

    def both(keep: Callable[..., Any]) -> Any:
        result = keep(served.verify)(**drafts, scratch=scratch)
        keep(served.commit)(**rows, scratch=scratch)
        return result

    return both
