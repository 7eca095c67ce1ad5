"""Calls and cases that the Triton provider has beyond the shared ones: rings, fused operations.

A ring is reached through the shared cases of layout "WC": `on_ring` builds the ring from the
windows by the rows' positions, runs the call on it and reads the written slots back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hal import reference
from hal.model.spec import GateKind
from support.ops import (
    LIMITS,
    NAN,
    Call,
    Case,
    Delta,
    Rows,
    changed_outside,
    clone_view,
    conv_case,
    delta_case,
    packed,
    worst,
)


def _ring_rows(position: int, width: int) -> list[int]:
    """Ring rows of the inputs before a position, oldest first."""
    return [p % width for p in range(position - width + 1, position)]


def make_ring(windows: Tensor, rows: Rows) -> Tensor:
    """A pool `[S, W, C]` of NaN whose `src` slots hold the windows `[S, W-1, C]`, free rows NaN."""
    slots, held, channels = windows.shape
    ring = torch.full((slots, held + 1, channels), NAN, dtype=windows.dtype)
    for src, start in zip(rows.src, rows.start, strict=True):
        if src >= 0:
            ring[src, _ring_rows(start, held + 1)] = windows[src]
    return ring


def _positions(rows: Rows, track: Tensor | None) -> dict[int, int]:
    """The position after what each written slot has seen."""
    ends = {
        dst: start + n
        for dst, start, n in zip(rows.dst, rows.start, rows.lengths, strict=True)
        if dst >= 0 and n
    }
    for row, count, slot in [] if track is None else track.tolist():
        if slot >= 0:
            ends[slot] = rows.start[row] + count
    return ends


def on_ring(call: Call, rows: Rows) -> Call:
    """The call on a ring, taking and leaving windows; nothing but written slots may change."""

    def run(**args: Any) -> Tensor:
        windows = args["state"]
        ring = make_ring(windows, rows)
        before = clone_view(ring)
        result = call(**{**args, "state": ring})
        written = rows.written(args.get("track"))
        assert changed_outside(before, ring, written) == 0
        for slot, position in _positions(rows, args.get("track")).items():
            windows[slot] = ring[slot, _ring_rows(position, ring.shape[1])]
        return result

    return run


@dataclass(frozen=True, slots=True, eq=False)
class Fused:
    """One fused decode: the conv's case, the recurrence's case, and an optional gated norm."""

    conv: Case
    delta: Case
    dims: Delta
    z: Tensor | None
    norm_weight: Tensor | None
    eps: float = 1e-5

    @property
    def _sizes(self) -> list[int]:
        dims = self.dims
        return [dims.H * dims.K, dims.H * dims.K, dims.HV * dims.V]

    def expect(self) -> tuple[Tensor, Tensor, Tensor]:
        """Result, recurrent state and conv windows by the oracle, nothing rounded between."""
        mixed, windows = self.conv.expect()
        dims, args = self.dims, self.delta.args
        q, k, v = (
            part.unflatten(1, (heads, -1))
            for part, heads in zip(
                mixed.split(self._sizes, 1), (dims.H, dims.H, dims.HV), strict=True
            )
        )
        o, state = reference.delta_rule_decode(**{**args, "q": q, "k": k, "v": v})
        return gated_norm(o, self.z, self.norm_weight, self.eps, dims.gate), state, windows

    def run(self, call: Call, out: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Result, recurrent state and ring by the call, on copies of both pools."""
        conv, delta = self.conv.args, self.delta.args
        ring, state = make_ring(conv["state"], self.conv.rows), clone_view(delta["state"])
        norm = {} if self.z is None else {"z": self.z, "norm_weight": self.norm_weight}
        result = call(
            conv["x"], delta["a"], delta["b"], conv["weight"], conv["bias"],
            self.conv.options["activation"], delta["gate"], ring, state, conv["src"], conv["dst"],
            conv["start"], norm_eps=self.eps, out=out, **norm,
        )  # fmt: skip
        return result, state, ring

    def check(self, call: Call) -> None:
        """Assert parity, exact ring rows, zero pads and an exact write set."""
        rows = self.conv.rows
        shape = (rows.tokens, self.dims.HV, self.dims.V)
        dtype = self.conv.args["x"].dtype
        got, state, ring = self.run(call, torch.full(shape, NAN, dtype=dtype))
        want, wanted, windows = self.expect()
        limits = LIMITS[str(dtype).removeprefix("torch."), "one rounding"]
        live = [i for i in range(rows.tokens) if rows.src[i] >= 0 or rows.dst[i] >= 0]
        pads = [i for i in range(rows.tokens) if i not in live]
        slots = sorted(rows.written(None) - {0})
        assert (got[pads] == 0).all()
        assert worst(got[live], want[live], 2) <= limits[0], worst(got[live], want[live], 2)
        assert worst(state[slots], wanted[slots], 2) <= limits[1]
        for slot, position in _positions(rows, None).items():
            held = ring[slot, _ring_rows(position, ring.shape[1])]
            assert torch.equal(held.double(), windows[slot]), slot
        before = make_ring(self.conv.args["state"], rows)
        assert changed_outside(before, ring, rows.written(None)) == 0
        assert changed_outside(self.delta.args["state"], state, rows.written(None)) == 0


def gated_norm(
    o: Tensor, z: Tensor | None, weight: Tensor | None, eps: float, kind: GateKind | None
) -> Tensor:
    """rms(o) * weight * silu(z), or sigmoid(z) for channel gates, in float64."""
    if z is None or weight is None:
        return o
    x, z = o.double(), z.double()
    x = x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()
    channel = kind in (GateKind.CHANNEL, GateKind.SAFE)
    return x * torch.sigmoid(z) * (1.0 if channel else z)


def fused_case(
    rows: Rows,
    dims: Delta,
    *,
    dtype: torch.dtype = torch.float32,
    width: int = 4,
    bias: bool = False,
    norm: bool = False,
    seed: int = 0,
) -> Fused:
    """A fused decode over the given rows, every row one token."""
    channels = 2 * dims.H * dims.K + dims.HV * dims.V
    conv = conv_case(
        rows, channels=channels, width=width, bias=bias, dtype=dtype, layout="WC", decode=True,
        seed=seed,
    )  # fmt: skip
    delta = delta_case(rows, dims, dtype=dtype, decode=True, seed=seed)
    gen = torch.Generator().manual_seed(seed + 1)
    z = torch.randn(rows.tokens, dims.HV, dims.V, generator=gen).to(dtype) if norm else None
    weight = torch.rand(dims.V, generator=gen) + 0.5 if norm else None
    return Fused(conv, delta, dims, z, weight)


def mixed_qkv(case: Case, gap: int = 0) -> Tensor:
    """q, k and v of a prefill case side by side `[T, C]`; `gap` makes it a slice of NaN."""
    flat = torch.cat([case.args[name].flatten(1) for name in ("q", "k", "v")], 1)
    return packed(flat.clone(), case.rows, gap)


def short_conv_case(case: Case, *, seed: int = 0) -> Case:
    """A short convolution over the rows of a plain one, with gates B and C of its own."""
    x = case.args["x"]
    gen = torch.Generator().manual_seed(seed + 5)
    gates = {name: torch.randn(x.shape, generator=gen).to(x.dtype) for name in "BC"}
    name = case.operation.replace("conv.", "short_conv.")
    return replace(case, operation=name, args={**gates, **case.args}, options={})
