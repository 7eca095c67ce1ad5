"""Kernels of a selection in the form of SGLang's own, by (device, attention kind, phase).

An engine that looks kernels up under such keys takes these as they are. They have the arguments of
SGLang's `LinearAttnKernelBase`; the convolution, the pool and its slots are then the engine's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from hal.binding import build
from hal.errors import ProviderError
from hal.interfaces import Gate
from hal.model.spec import GateKind, Kind
from hal.runtime.batch import NO_SLOT
from hal.runtime.gates import ready

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from hal.interfaces import DeltaRule
    from hal.selection import Selection

PHASES: Final = {"decode": "delta_rule.decode", "prefill": "delta_rule.prefill"}
"""SGLang's phases, and the operation that serves each."""


class Key(NamedTuple):
    """What a kernel is looked up by: a device type, "gdn", and a phase."""

    device: str
    kind: str
    phase: str


def factories(selection: Selection) -> dict[Key, Callable[[], DeltaKernel]]:
    """A factory for each phase of a selection's Gated DeltaNet layers; none where it has none."""
    kinds = {layer.stateful for layer in selection.model.stateful_layers()}
    if Kind.GATED_DELTA_NET not in kinds:
        return {}
    device = selection.device.type
    return {
        Key(device, "gdn", phase): partial(_kernel, selection, operation)
        for phase, operation in PHASES.items()
    }


def _kernel(selection: Selection, operation: str) -> DeltaKernel:
    candidate = selection.choices[operation].candidate
    rule = build(candidate, selection.device, selection.layouts).delta_rule
    if rule is None:
        raise ProviderError(f"{candidate} was chosen for {operation} and has no delta rule")
    gates = candidate.manifest.offers[operation].gates or ()
    return DeltaKernel(rule, fuses_gate=GateKind.SCALAR.value in gates)


@dataclass(frozen=True, slots=True)
class DeltaKernel:
    """A provider's delta rule with SGLang's arguments: q, k, v `[1, T, heads, dim]`, slots by row.

    `ssm_states` `[slots, …]` is updated in place, in the selection's layout. A slot below zero is
    none; slot 0 is SGLang's own for pads. What SGLang passes beyond that is not needed.
    """

    rule: DeltaRule
    fuses_gate: bool

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        A_log: Tensor,
        dt_bias: Tensor,
        ssm_states: Tensor,
        cache_indices: Tensor,
        **unused: Any,
    ) -> Tensor:
        """A token a row, on raw gate projections a, b `[B, HV]`; the result is `[1, B, HV, V]`."""
        gate: Gate | None = Gate(GateKind.SCALAR, A_log.float(), dt_bias.float())
        a, b = a.view(-1, v.shape[2]), b.view(-1, v.shape[2])
        if gate is not None and not self.fuses_gate:
            a, b, gate = *ready(gate, a, b), None
        rows = _slots(cache_indices)
        return self.rule.decode(q[0], k[0], v[0], a, b, gate, ssm_states, rows, rows)[None]

    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        ssm_states: Tensor,
        cache_indices: Tensor,
        query_start_loc: Tensor,
        **unused: Any,
    ) -> tuple[Tensor, None, None]:
        """Rows of any length on log decay g and beta `[1, T, HV]`; no states inside a step."""
        rows, starts = _slots(cache_indices), query_start_loc.to(torch.int32)
        tokens = q.shape[1]
        state = (ssm_states, rows, rows, starts, tokens)
        return self.rule.prefill(q[0], k[0], v[0], g[0], beta[0], None, *state)[None], None, None


def _slots(indices: Tensor) -> Tensor:
    rows = indices.to(torch.int32)
    return rows.masked_fill(rows < 0, NO_SLOT)
