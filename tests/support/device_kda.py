"""Checks of prefill where every channel decays on a CUDA device, as named checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hal.model.spec import GateKind
from support import device_checks as checks
from support.device_gates import hard_keys, lengths, strengths
from support.ops import Case, Delta, delta_case, i32, make_rows
from support.triton_cases import gated_norm, mixed_qkv

GATES = (GateKind.CHANNEL, GateKind.SAFE, None)
DIMS = (
    Delta(H=2, HV=2, K=128, V=128),
    Delta(H=1, HV=4, K=128, V=64),
    Delta(H=1, HV=3, K=16, V=24),
    Delta(H=1, HV=2, K=64, V=64),
    Delta(H=1, HV=2, K=64, V=128),
    Delta(H=1, HV=2, K=96, V=192),
    Delta(H=1, HV=1, K=256, V=256),
)
MANY = make_rows([(70, "fork"), (1, "continue")] * 17, seed=2, pads=5)


def kda_checks(dtype: torch.dtype) -> Iterator[tuple[str, checks.Check]]:
    """Prefill over gates, dims, strengths of decay, views, track points and grids."""
    yield from _plain(dtype)
    yield from _hard(dtype)
    yield from _views(dtype)
    yield from _fused(dtype)


def _dims(dims: Delta, gate: GateKind | None) -> Delta:
    return replace(dims, gate=gate, per_channel=gate is None)


def _check(case: Case, layout: str = "VK") -> checks.Check:
    call = checks.on_device(checks.provider(recurrent=layout).delta_rule.prefill)
    dtype: torch.dtype = case.args["v"].dtype
    return checks.bound(case, call, checks.kind_of(dtype))


def _plain(dtype: torch.dtype) -> Iterator[tuple[str, checks.Check]]:
    for dims in DIMS:
        for gate in GATES:
            case = delta_case(checks.PACKED, _dims(dims, gate), dtype=dtype)
            label = f"K{dims.K} V{dims.V} R{dims.HV // dims.H}"
            yield f"delta.prefill {label} {gate.value if gate else 'ready channel'}", _check(case)
    case = delta_case(MANY, _dims(DIMS[0], GateKind.CHANNEL), dtype=dtype)
    yield "delta.prefill channel many rows", _check(case)
    channel = replace(DIMS[0], gate=GateKind.CHANNEL)
    wanted = ((1e-4, True), (0.2, False), (1e-3, False))
    for name, case in lengths(channel, dtype, wanted):
        yield f"delta.prefill channel {name}", _check(case)


def _hard(dtype: torch.dtype) -> Iterator[tuple[str, checks.Check]]:
    ready = Delta(H=1, HV=2, K=128, V=128, gate=None, per_channel=True)
    for name, case in (*hard_keys(ready, dtype), *strengths(_dims(DIMS[0], None), dtype)):
        yield f"delta.prefill channel {name}", _check(case)


def _views(dtype: torch.dtype) -> Iterator[tuple[str, checks.Check]]:
    for gap in (3, 8):
        case = delta_case(checks.PACKED, _dims(DIMS[3], GateKind.SAFE), dtype=dtype, layout="KV",
                          gap=gap, strided=True)  # fmt: skip
        yield f"delta.prefill channel KV strided gap={gap}", _check(case, "KV")
    rows = make_rows([(200, "fork"), (64, "fresh"), (130, "continue")], spare=9)
    unused = [s for s in range(1, rows.slots) if s not in {*rows.src, *rows.dst}]
    points = [(0, 64), (0, 192), (1, 64), (2, 128)]
    flat = [n for i, (row, count) in enumerate(points) for n in (row, count, unused[i])]
    track = i32(*flat).view(-1, 3)
    case = delta_case(rows, _dims(DIMS[0], GateKind.CHANNEL), dtype=dtype, track=track)
    yield "delta.prefill channel tracked", _check(case)


def _fused(dtype: torch.dtype) -> Iterator[tuple[str, checks.Check]]:
    for gate in (GateKind.SCALAR, GateKind.CHANNEL, GateKind.SAFE):
        for norm in (False, True):
            case = delta_case(checks.PACKED, replace(DIMS[0], gate=gate), dtype=dtype)
            name = f"delta.prefill_fused {gate.value} norm={norm} NaN pads"
            yield name, _fused_check(case, gate, norm)


def _fused_check(case: Case, gate: GateKind, norm: bool) -> checks.Check:
    mixed, v, end = mixed_qkv(case, gap=8), case.args["v"], case.rows.bounds[-1]
    gen = torch.Generator().manual_seed(9)
    z = torch.randn(v.shape, generator=gen).to(v.dtype)
    z[end:] = float("nan")
    weight = torch.rand(v.shape[-1], generator=gen) + 0.5
    extra = {"z": z, "norm_weight": weight, "norm_eps": 1e-5} if norm else {}
    limit = {torch.float32: 1e-5, torch.float16: 3e-3}.get(v.dtype, 2e-2)

    def call(**args: Any) -> Tensor:
        names = ("a", "b", "gate", "state", "src", "dst", "query_start_loc", "max_len", "out")
        given = {name: args[name] for name in names}
        ops = checks.provider().delta_rule
        return checks.on_device(ops.prefill_fused)(mixed_qkv=mixed, **given, **extra)

    def check() -> None:
        if not norm:
            case.check(call, checks.kind_of(v.dtype))
            return
        got, _ = case.run(call, out=torch.full_like(v, float("nan")))
        want = gated_norm(case.expect()[0], z, weight, 1e-5, gate)
        assert torch.equal(got[end:], torch.zeros_like(got[end:])), "pads are not zero"
        for span in case.rows.spans():
            if span.stop > span.start:
                error = (got[span].double() - want[span]).norm() / want[span].norm()
                assert error < limit, error

    return check
