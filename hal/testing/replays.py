"""Declared `graph`: a recorded call is replayed on tensors that were rewritten in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from hal.runtime.graphs import CudaGraph, Graph, TapeGraph
from hal.testing.held import Held, turned

if TYPE_CHECKING:
    from torch import Tensor

    from hal.testing.plan import Trial
    from hal.testing.subject import Subject

REPLAYS: Final = (3, 1, 0, 2)
"""How far the rows are turned in each replay."""


class Graphs:
    """Tests of operations that declare `graph`, recorded as the runtime would on the device."""

    def test_a_recorded_call_reads_what_its_tensors_hold_in_each_replay(
        self, hal_subject: Subject, graph_trial: Trial
    ) -> None:
        """Tokens, slots, bounds and states of every replay, in the tensors of the recording."""
        held = Held.of(hal_subject, graph_trial, turned(graph_trial, 0))
        graph, result = _recorded(held, hal_subject.place)
        for turn in REPLAYS:
            case = held.write(turned(graph_trial, turn))
            graph.replay()
            held.check(case, result, graph_trial.kind, f"replay with rows turned by {turn}")


def _recorded(held: Held, place: torch.device) -> tuple[Graph, Tensor]:
    """Run the call once, then record it."""
    cuda = place.type == "cuda"
    graph = CudaGraph(torch.cuda.graph_pool_handle()) if cuda else TapeGraph()
    held.run()
    if cuda:
        torch.cuda.synchronize()
    with graph.recording():
        result = held.block(graph.tape.opaque if graph.tape else lambda call: call)
    return graph, result
