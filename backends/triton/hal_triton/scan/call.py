"""The arguments of a scan call, and what kernels are told about them.

Kernels know heads of P channels. Mamba-1's groups are its heads: I / G channels each, whose steps
are their own and whose decay differs along N ("by channel").
"""

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from hal.runtime.checks import check_rows, dtype_name
from hal.runtime.scan_checks import check_scan
from hal_triton.launch import dense_or_none, rows_are_dense, signature
from hal_triton.tuning import Tuning

STATE_DTYPES: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Dtypes of the state; every one is carried in float32 within a call."""

UNLIMITED: Final = (0.0, float("inf"))
"""The dt limit that only keeps dt from being negative."""


@dataclass(frozen=True, slots=True)
class Dims:
    """Heads, channels of a head, state size and groups of a call."""

    H: int
    P: int
    N: int
    G: int

    @property
    def ratio(self) -> int:
        """Heads that share B and C."""
        return self.H // self.G


@dataclass(frozen=True, slots=True, eq=False)
class ScanCall:
    """The arguments of one call; without `query_start_loc` it is a decode."""

    operation: str
    x: Tensor
    dt: Tensor | None
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    dt_bias: Tensor | None
    z: Tensor | None
    state: Tensor
    src: Tensor
    dst: Tensor
    query_start_loc: Tensor | None = None
    track: Tensor | None = None
    parents: Tensor | None = None
    dt_limit: tuple[float, float] = UNLIMITED
    dt_softplus: bool = True
    out: Tensor | None = None

    @property
    def by_channel(self) -> bool:
        """Whether this is Mamba-1."""
        return self.x.ndim == 2

    @property
    def dims(self) -> Dims:
        """Heads and dims, read off the inputs."""
        groups, size = self.B.shape[1:]
        if self.by_channel:
            return Dims(groups, self.x.shape[1] // max(1, groups), size, groups)
        return Dims(self.x.shape[1], self.x.shape[2], size, groups)

    def tokens(self) -> tuple[Tensor | None, ...]:
        """The tensors that have a row for every token."""
        return self.x, self.dt, self.B, self.C, self.z, self.out

    def indices(self) -> tuple[Tensor | None, ...]:
        """The index tensors."""
        return self.src, self.dst, self.query_start_loc, self.track, self.parents

    def rates(self) -> tuple[Tensor | None, ...]:
        """What the layer applies to every token."""
        return self.A, self.D, self.dt_bias

    def signature(self) -> tuple[object, ...]:
        """What decides the plan of this call."""
        held = signature(*self.tokens(), *self.rates(), self.state, *self.indices())
        return self.dt_limit, self.dt_softplus, held

    def is_tidy(self) -> bool:
        """Whether kernels can take the tensors as they are: dense rows, dense indices."""
        whole = (*self.indices(), *self.rates())
        return rows_are_dense(*self.tokens()) and all(t is None or t.is_contiguous() for t in whole)

    def tidied(self) -> "ScanCall":
        """The same call on dense copies, without `out`."""
        rows: dict[str, Any] = {name: dense_or_none(getattr(self, name)) for name in _BY_TOKEN}
        whole: dict[str, Any] = {name: _contiguous(getattr(self, name)) for name in _WHOLE}
        return replace(self, **rows, **whole, out=None)

    def check(self) -> None:
        """Refuse what does not fit, before anything is written."""
        check_scan(
            self.operation, self.x, self.dt, self.A, self.B, self.C, self.D, self.dt_bias, self.z,
            self.state, self.dt_limit, self.out, state_dtypes=STATE_DTYPES,
        )  # fmt: skip
        others = () if self.dst is self.src else (("dst", self.dst),)
        check_rows(
            self.operation, self.x.shape[0], self.src, others, self.query_start_loc, self.track,
            self.parents,
        )  # fmt: skip
        for name, tensor in zip(("A", "D", "dt_bias"), self.rates(), strict=True):
            if tensor is not None and tensor.dtype != torch.float32:
                found = dtype_name(tensor.dtype)
                raise TypeError(f"{self.operation}: {name} is {found}, expected float32")


_BY_TOKEN: Final = ("x", "dt", "B", "C", "z")
_WHOLE: Final = ("A", "D", "dt_bias", "src", "dst", "query_start_loc", "track", "parents")


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def inputs(call: ScanCall) -> tuple[Tensor, ...]:
    """x, dt, A, B, C, D, dt_bias and z; any tensor of the dtype stands in for one that is None."""
    x, A = call.x, call.A
    return (
        *(x, x if call.dt is None else call.dt, A, call.B, call.C),
        *(A if call.D is None else call.D, A if call.dt_bias is None else call.dt_bias),
        x if call.z is None else call.z,
    )


def input_strides(call: ScanCall) -> tuple[int, ...]:
    """Strides of token and head or group: x, dt (token alone), B, C, z, out."""
    dims = call.dims
    dt_t = 0 if call.dt is None else call.dt.stride(0)
    z = (0, 0) if call.z is None else _by_head(call.z, dims)
    out = (dims.H * dims.P, dims.P) if call.out is None else _by_head(call.out, dims)
    return (
        *(*_by_head(call.x, dims), dt_t, *call.B.stride()[:2], *call.C.stride()[:2]),
        *(*z, *out),
    )


def _by_head(tensor: Tensor, dims: Dims) -> tuple[int, int]:
    """Strides of token and head of x, z or the result."""
    return (tensor.stride(0), dims.P if tensor.ndim == 2 else tensor.stride(1))


def state_strides(state: Tensor, dims: Dims) -> tuple[int, int, int, int]:
    """Strides of slot, head, channel and state."""
    if state.ndim == 4:
        slot, head, channel, size = state.stride()
        return slot, head, channel, size
    slot, channel, size = state.stride()
    return slot, dims.P * channel, channel, size


def limits(call: ScanCall) -> tuple[float, float]:
    """The least and the most that d may be."""
    return float(call.dt_limit[0]), float(call.dt_limit[1])


def forms(call: ScanCall, tuning: Tuning) -> dict[str, object]:
    """The constants that say which inputs there are, in the order of every kernel that has them."""
    rough = call.x.dtype == torch.bfloat16
    return {
        "DT": "one" if call.dt is None else "softplus" if call.dt_softplus else "plain",
        "HAS_BIAS": call.dt_bias is not None and call.dt is not None,
        "HAS_D": call.D is not None,
        "HAS_Z": call.z is not None,
        "CHANNEL": call.by_channel,
        "SILU": tuning.fast_silu if rough else tuning.silu,
    }


def points(call: ScanCall) -> int:
    """How many track points the call has, unused ones included."""
    return 0 if call.track is None else call.track.shape[0]


def bounds(call: ScanCall) -> Tensor:
    """query_start_loc of a packed call."""
    if call.query_start_loc is None:
        raise TypeError(f"{call.operation}: query_start_loc is None")
    return call.query_start_loc
