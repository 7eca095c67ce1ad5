"""The arguments of a delta-rule call, and what kernels are told about them."""

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from hal.interfaces import Gate
from hal.model.spec import GateKind
from hal.runtime.checks import check_delta, check_rows
from hal_triton.launch import dense, dense_or_none, rows_are_dense, signature

STATE_DTYPES: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Dtypes of the recurrent state; every one is carried in float32 within a call."""


@dataclass(frozen=True, slots=True)
class Dims:
    """Heads and dims of a call, per rank."""

    H: int
    HV: int
    K: int
    V: int

    @property
    def ratio(self) -> int:
        """Value heads that share a key head."""
        return self.HV // self.H


@dataclass(frozen=True, slots=True, eq=False)
class DeltaCall:
    """The arguments of one call; without `query_start_loc` it is a decode."""

    operation: str
    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    gate: Gate | None
    state: Tensor
    src: Tensor
    dst: Tensor
    query_start_loc: Tensor | None = None
    track: Tensor | None = None
    qk_l2norm: bool = True
    out: Tensor | None = None

    @property
    def dims(self) -> Dims:
        """Heads and dims, read off the inputs."""
        return Dims(self.q.shape[1], self.v.shape[1], self.q.shape[2], self.v.shape[2])

    def tokens(self) -> tuple[Tensor | None, ...]:
        """The tensors that have a row for every token."""
        return self.q, self.k, self.v, self.a, self.b, self.out

    def indices(self) -> tuple[Tensor | None, ...]:
        """The index tensors."""
        return self.src, self.dst, self.query_start_loc, self.track

    @property
    def points(self) -> int:
        """Track points, unused entries included."""
        return 0 if self.track is None else self.track.shape[0]

    @property
    def is_channel(self) -> bool:
        """Whether every key channel decays by itself."""
        return self.a.ndim == 3

    def bounds(self) -> tuple[Tensor, Tensor]:
        """query_start_loc and track; any index tensor stands in for track points not given."""
        if self.query_start_loc is None:
            raise TypeError(f"{self.operation}: query_start_loc is None")
        return self.query_start_loc, self.src if self.track is None else self.track

    def signature(self) -> tuple[object, ...]:
        """What decides the plan of this call; a gate is known by its identity."""
        held = signature(*self.tokens(), self.state, *self.indices())
        return self.gate, self.qk_l2norm, held

    def is_tidy(self) -> bool:
        """Whether kernels can take the tensors as they are: dense rows, dense indices."""
        return rows_are_dense(*self.tokens()) and all(
            t is None or t.is_contiguous() for t in self.indices()
        )

    def tidied(self) -> "DeltaCall":
        """The same call on dense copies, without `out`."""
        return replace(
            self,
            q=dense(self.q),
            k=dense(self.k),
            v=dense(self.v),
            a=dense(self.a),
            b=dense(self.b),
            src=dense(self.src),
            dst=dense(self.dst),
            query_start_loc=dense_or_none(self.query_start_loc),
            track=self.track if self.track is None else self.track.contiguous(),
            out=None,
        )

    def check(self, layout: str) -> None:
        """Refuse what does not fit, before anything is written."""
        name = self.operation
        check_delta(
            name, self.q, self.k, self.v, self.a, self.b, self.gate, self.state, layout, self.out,
            state_dtypes=STATE_DTYPES,
        )  # fmt: skip
        others = (("dst", self.dst),)
        check_rows(name, self.q.shape[0], self.src, others, self.query_start_loc, self.track)
        check_gate_tensors(name, self.gate)


def check_gate_tensors(operation: str, gate: Gate | None) -> None:
    """Refuse gate parameters that kernels would misread: they take dense float32."""
    if gate is None:
        return
    for name, tensor in (("A_log", gate.A_log), ("dt_bias", gate.dt_bias)):
        if tensor.dtype != torch.float32:
            raise TypeError(f"{operation}: {name} is {tensor.dtype}, expected torch.float32")
        if not tensor.is_contiguous():
            raise ValueError(f"{operation}: {name} has strides {tensor.stride()}, expected dense")


def gate_constants(gate: Gate | None, a: Tensor) -> dict[str, object]:
    """The gate's kind as kernels name it, and whether every key channel decays by itself."""
    kind = "ready" if gate is None else gate.kind.value
    channel = a.ndim == 3 if gate is None else gate.kind is not GateKind.SCALAR
    return {"GATE": kind, "CHANNEL": channel}


def gate_numbers(gate: Gate | None, key_dim: int) -> tuple[float, float, float]:
    """Scale of the queries, beta_scale and lower_bound."""
    scale = float(key_dim) ** -0.5
    return (scale, 1.0, 0.0) if gate is None else (scale, gate.beta_scale, gate.lower_bound or 0.0)


def gate_tensors(gate: Gate | None, unused: Tensor) -> tuple[Tensor, Tensor]:
    """A_log and dt_bias; ready gates have neither, so that any tensor stands in."""
    return (unused, unused) if gate is None else (gate.A_log, gate.dt_bias)


def state_strides(state: Tensor, layout: str) -> tuple[int, int, int, int]:
    """Strides of slot, head, value row and key column."""
    slot, head, first, second = state.stride()
    return (slot, head, first, second) if layout == "VK" else (slot, head, second, first)


def result_strides(out: Tensor | None, dims: Dims) -> tuple[int, int]:
    """Strides of token and head of the result, given or to be allocated."""
    return (dims.HV * dims.V, dims.V) if out is None else (out.stride(0), out.stride(1))
