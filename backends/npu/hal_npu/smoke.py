"""Small calls against the oracle, once a process: a signature says nothing about layouts.

Later releases of the vendor's package turned a recurrent state around under the same signature, so
K differs from V here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Self

import torch
from torch import Tensor

from hal import reference
from hal.interfaces import Gate
from hal.model.spec import GateKind
from hal_npu.delta_rule import AscendDeltaRule
from hal_npu.symbols import Found, Status
from hal_npu.vendor import Vendor
from hal_registry import Failure, attempt

H: Final = 2
K: Final = 64
V: Final = 128
TOKENS: Final = 3
CHUNK: Final = "chunk_gated_delta_rule_npu"
MOVE: Final = "speculative_state_scatter_npu"
LIMIT: Final = 2e-2
"""Of chunked bfloat16; a state that is turned around is wrong by far more."""


def place(index: int) -> torch.device:
    """Where the calls run."""
    return torch.device("npu", index)


def smoke(found: Mapping[str, Found], index: int) -> Mapping[str, Found]:
    """The symbols again, those marked as wrong whose results are not the oracle's."""
    vendor = Vendor.of(found)
    unbound = {name for name, each in found.items() if each.call is None}
    tried = {name: run for name, run in _runs(vendor, index).items() if name not in unbound}
    if MOVE in unbound:  # without it no state reaches the pool
        tried = {name: run for name, run in tried.items() if name == CHUNK}
    return {**found, **{name: _marked(found[name], run) for name, run in tried.items()}}


def _runs(vendor: Vendor, index: int) -> dict[str, Callable[[], float]]:
    """A call by the symbol that it tries."""
    return {
        CHUNK: partial(_error, vendor, "KV", index, TOKENS),
        "fused_sigmoid_gating_delta_rule_update_npu": partial(_error, vendor, "KV", index, 1),
        "kda_target_verify_npu": partial(_error, vendor, "VK", index, 1),
    }


def _marked(found: Found, run: Callable[[], float]) -> Found:
    error = attempt(run)
    if isinstance(error, Failure):
        return replace(found, status=Status.WRONG, seen=error.text[:200], call=None)
    if error <= LIMIT:
        return found
    seen = f"a relative error of {error:.1e} for K = {K}, V = {V}"
    return replace(found, status=Status.WRONG, seen=seen, call=None)


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """One row that continues slot 1, with a gate that decays slowly, so that the state counts."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    gate: Gate
    state: Tensor
    ids: Tensor
    bounds: Tensor

    @classmethod
    def of(cls, tokens: int, dtype: torch.dtype, layout: str) -> Self:
        gen = torch.Generator().manual_seed(0)
        shapes = ((H, K), (H, K), (H, V), (H,), (H,))
        q, k, v, a, b = (torch.randn(tokens, *shape, generator=gen).to(dtype) for shape in shapes)
        gate = Gate(GateKind.SCALAR, torch.full((H,), -3.0), torch.zeros(H))
        state = torch.randn((2, H, V, K) if layout == "VK" else (2, H, K, V), generator=gen)
        bounds = torch.tensor([0, tokens], dtype=torch.int32)
        return cls(q, k, v, a, b, gate, state, bounds.new_ones(1), bounds)

    def to(self, place: torch.device) -> "_Row":
        """The same row elsewhere; the state is a copy anywhere."""
        gate = replace(
            self.gate, A_log=self.gate.A_log.to(place), dt_bias=self.gate.dt_bias.to(place)
        )
        tensors = (self.q, self.k, self.v, self.a, self.b)
        q, k, v, a, b = (tensor.to(place) for tensor in tensors)
        state = self.state.clone().to(place)
        return _Row(q, k, v, a, b, gate, state, self.ids.to(place), self.bounds.to(place))


def _error(vendor: Vendor, layout: str, index: int, tokens: int) -> float:
    """The worst relative error of result and state."""
    row = _Row.of(tokens, torch.float32 if tokens == 1 else torch.bfloat16, layout)
    want, pool = reference.delta_rule_prefill(
        row.q, row.k, row.v, row.a, row.b, row.gate, row.state, row.ids, row.ids, row.bounds,
        tokens, layout=layout,
    )  # fmt: skip
    there = row.to(place(index))
    got = _run(vendor, layout, there, tokens)
    return max(_relative(got, want), _relative(there.state[1], pool[1]))


def _run(vendor: Vendor, layout: str, row: _Row, tokens: int) -> Tensor:
    rule = AscendDeltaRule(vendor.chunk, vendor.update, vendor.steps, vendor.move, layout)
    if tokens == 1:
        return rule.decode(row.q, row.k, row.v, row.a, row.b, row.gate, row.state, row.ids, row.ids)
    return rule.prefill(
        row.q, row.k, row.v, row.a, row.b, row.gate, row.state, row.ids, row.ids, row.bounds, tokens
    )


def _relative(got: Tensor, want: Tensor) -> float:
    return float((got.cpu().double() - want).norm() / want.norm())
