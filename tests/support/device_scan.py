"""Parity of the scan with the float64 oracle on a CUDA device, as named checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hal.testing.scan_cases import Scan, scan_case
from hal.testing.verify_cases import VerifyCase, accept, chain, tree
from hal_cuda.kernels.math import silu_tanh
from hal_cuda.provider import TritonProvider
from hal_cuda.tables import table
from hal_triton.kernels.math import silu
from hal_triton.tuning import Config, Tuning
from support import device_checks as checks
from support.ops import Case, i32, make_rows

INF = float("inf")
DIMS = (
    Scan(H=16, P=64, N=128, G=2),
    Scan(H=4, P=64, N=128, G=1, z=True),
    Scan(H=4, P=64, N=256, G=2, z=True),
    Scan(H=4, P=32, N=16, G=4, D=False, dt_bias=False),
    Scan(H=3, P=24, N=48, G=1),
    Scan(H=4, P=96, N=64, G=2, dt_softplus=False, dt_limit=(1e-3, 0.5)),
    Scan(kind="lightning", H=4, P=128, N=128),
    Scan(kind="lightning", H=2, P=96, N=64),
    Scan(kind="mamba1", H=8, P=64, N=16, G=1, z=True),
    Scan(kind="mamba1", H=8, P=24, N=8, G=2),
    Scan(H=8, P=80, N=128, G=2),
)
"""What is served: Mamba-2 with and without groups and gate, lightning, Mamba-1, odd sizes."""

LIMITS = ((0.0, 0.1), (0.5, INF), (1e-3, INF))
DRAFTS = make_rows(
    [(4, "continue"), (1, "fork"), (0, "continue"), (5, "fresh"), (7, "fork"), (3, "stateless"),
     (16, "continue"), (2, "fresh")],
    seed=3, pads=3,
)  # fmt: skip
CUT = make_rows(
    [(128, "fork"), (0, "fork"), (385, "fresh"), (2, "continue"), (256, "continue"),
     (129, "stateless")],
    seed=7, pads=70, spare=6,
)  # fmt: skip
"""Rows of one, two and four segments of 128 tokens."""


def scan_checks(dtype: torch.dtype) -> Iterator[tuple[str, checks.Check]]:
    """Every operation over dims, limits, strides, states, track points, segments and trees."""
    ops = checks.provider().scan
    for dims in DIMS:
        yield from _both(dims, dtype, _label(dims))
    for limit in LIMITS:
        for kind in ("mamba2", "mamba1"):
            dims = Scan(kind=kind, G=1, dt_limit=limit)
            yield from _both(dims, dtype, f"{kind} limit={limit}")
    for dims in (DIMS[1], DIMS[8]):
        yield from _both(dims, dtype, f"{_label(dims)} strided", gap=3, strided=True)
        yield from _narrow_states(dims, dtype)
        yield f"scan.prefill {dims.kind} tracked", _tracked(dims, dtype)
    for log_a in (-1e-4, -1e-2):
        dims = Scan(H=2, P=64, N=64, G=1)
        case = scan_case(make_rows([(1024, "fork"), (257, "fresh")]), dims, dtype=dtype)
        case = case.replace(A=torch.full((2,), log_a))
        yield f"scan.prefill slow A={log_a}", _check(case, ops.prefill, dims)
    yield from _segments(dtype)
    yield from _drafts(dtype)


def _label(dims: Scan) -> str:
    return f"{dims.kind} H{dims.H} P{dims.P} N{dims.N} G{dims.groups} z={dims.z}"


def _kind(dims: Scan, dtype: torch.dtype) -> str:
    return "one rounding" if dims.kind == "mamba1" else checks.kind_of(dtype)


def _check(case: Case, call: Callable[..., Tensor], dims: Scan) -> checks.Check:
    kind = "one rounding" if case.decode else _kind(dims, case.dtype)
    return lambda: case.check(checks.on_device(call), kind)


def _both(
    dims: Scan, dtype: torch.dtype, label: str, **options: Any
) -> Iterator[tuple[str, checks.Check]]:
    ops = checks.provider().scan
    case = scan_case(checks.TOKENS, dims, dtype=dtype, decode=True, **options)
    yield f"scan.decode {label}", _check(case, ops.decode, dims)
    case = scan_case(checks.PACKED, dims, dtype=dtype, **options)
    yield f"scan.prefill {label}", _check(case, ops.prefill, dims)


def _narrow_states(dims: Scan, dtype: torch.dtype) -> Iterator[tuple[str, checks.Check]]:
    ops = checks.provider().scan
    for state in (torch.bfloat16, torch.float16):
        name = str(state).removeprefix("torch.")
        for decode, call in ((True, ops.decode), (False, ops.prefill)):
            rows = checks.TOKENS if decode else checks.PACKED
            case = scan_case(rows, dims, dtype=dtype, decode=decode)
            case = case.replace(state=case.args["state"].to(state))
            verb = "decode" if decode else "prefill"
            yield f"scan.{verb} {dims.kind} {name} state", _check(case, call, dims)


def _tracked(dims: Scan, dtype: torch.dtype) -> checks.Check:
    rows = make_rows([(200, "fork"), (64, "fresh"), (130, "continue")], spare=9)
    unused = [s for s in range(1, rows.slots) if s not in {*rows.src, *rows.dst}]
    flat = [n for i, (row, count) in enumerate([(0, 64), (0, 192), (1, 64), (2, 128)])
            for n in (row, count, unused[i])]  # fmt: skip
    case = scan_case(rows, dims, dtype=dtype, track=i32(*flat, 0, 5, -1).view(-1, 3))
    return _check(case, checks.provider().scan.prefill, dims)


def cut_provider(segment: int = 128) -> TritonProvider:
    """A provider that cuts every row that is longer than a segment."""
    base = table("sm_90")
    cut = {
        name: replace(config, blocks={**config.blocks, "SEG": segment})
        for name in ("scan.walk", "scan.walk.float16", "scan.walk.float32")
        for config in [_last(base[name])]
    }
    tuning = Tuning(base, silu, silu_tanh, "tf32", cut)
    return TritonProvider(checks.DEVICE, {"tuning": tuning})


def _last(entries: Any) -> Config:
    found: Config = entries[-1][1]
    return found


def _segments(dtype: torch.dtype) -> Iterator[tuple[str, checks.Check]]:
    call = cut_provider().scan.prefill
    unused = [s for s in range(1, CUT.slots) if s not in {*CUT.src, *CUT.dst}]
    track = i32(0, 64, unused[0], 2, 128, unused[1], 2, 320, unused[2], 4, 192, unused[3])
    for dims in (DIMS[1], DIMS[6]):
        case = scan_case(CUT, dims, dtype=dtype, track=track.view(-1, 3))
        yield f"scan.prefill {dims.kind} in segments", _check(case, call, dims)


def _drafts(dtype: torch.dtype) -> Iterator[tuple[str, checks.Check]]:
    for dims in (DIMS[0], DIMS[2], DIMS[4], DIMS[7], DIMS[8], DIMS[9]):
        for shape in ("none", "chain", "tree"):
            yield f"scan.verify {_label(dims)} {shape}", _drafted(dims, dtype, shape)
    yield "scan.verify strided", _drafted(DIMS[1], dtype, "tree", gap=3, strided=True)


def _drafted(dims: Scan, dtype: torch.dtype, shape: str, **options: Any) -> checks.Check:
    served = checks.provider()
    parents = {"none": None, "chain": chain(DRAFTS), "tree": tree(DRAFTS, seed=2)}[shape]
    case = scan_case(DRAFTS, dims, dtype=dtype, **options)
    verify = VerifyCase.of(case, parents, accept(DRAFTS))
    return lambda: verify.check(_Moved(served.scan), served.scratch_spec)


class _Moved:
    """Verify and commit on device copies, scratch included."""

    def __init__(self, scan: Any) -> None:
        self.verify = self._moved(scan.verify)
        self.commit = self._moved(scan.commit)

    @staticmethod
    def _moved(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(scratch: list[Tensor], **args: Any) -> Any:
            there = [tensor.to(checks.DEVICE) for tensor in scratch]
            moved = {name: checks.to_device(value) for name, value in args.items()}
            result = call(**moved, scratch=there)
            torch.cuda.synchronize()
            for here, back in zip(scratch, there, strict=True):
                here.copy_(back)
            for name in ("state", "out"):
                if isinstance(args.get(name), Tensor):
                    checks.flat(args[name]).copy_(checks.flat(moved[name]))
            return None if result is None else result.cpu()

        return run


def far_slots(dtype: torch.dtype, slots: int = 4500) -> None:
    """Decode and prefill in a pool whose slots lie beyond 2^31 elements."""
    ops, dims = checks.provider().scan, Scan(H=64, P=64, N=128, G=2)
    near = make_rows([(1, "fork"), (1, "continue"), (1, "fresh")], seed=2)
    shift = slots - near.slots
    pool = torch.empty(slots, 64, 64, 128, device=checks.DEVICE)
    for decode, call in ((True, ops.decode), (False, ops.prefill)):
        case = scan_case(near, dims, dtype=dtype, decode=decode)

        def run(call: Any = call, **args: Any) -> Tensor:
            moved = {n: checks.to_device(v) for n, v in args.items() if n not in ("state", "out")}
            pool[shift:] = args["state"].to(checks.DEVICE)
            for name in ("src", "dst"):
                moved[name] = torch.where(moved[name] >= 0, moved[name] + shift, moved[name])
            result: Tensor = call(**moved, state=pool).cpu()
            args["state"].copy_(pool[shift:])
            return result

        case.check(run, "one rounding" if decode else checks.kind_of(dtype), poison=False)
