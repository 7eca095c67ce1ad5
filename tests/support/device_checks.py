"""Parity of every operation with the float64 oracle on a CUDA device, as named checks.

Cases and limits are those of every other provider; only the call runs on the device. Storages
travel whole, so that strided views, gaps of NaN and write sets are checked there too.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hal.interfaces import Gate
from hal.model.spec import GateKind
from hal_cuda.provider import TritonProvider
from support.ops import Call, Case, Delta, Rows, conv_case, delta_case, i32, make_rows
from support.triton_cases import fused_case, gated_norm, mixed_qkv, on_ring, short_conv_case

DEVICE = "cuda:0"
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
GATES = (GateKind.SCALAR, GateKind.CHANNEL, GateKind.SAFE, None)
TOKENS = make_rows(
    [(1, "continue"), (1, "fresh"), (1, "pad"), (1, "fork"), (1, "stateless"), (1, "pad")] * 3,
    seed=5,
)
PACKED = make_rows(
    [
        (64, "continue"),
        (1, "fork"),
        (0, "continue"),
        (65, "fresh"),
        (1, "continue"),
        (3, "stateless"),
        (255, "fork"),
        (2, "fresh"),
        (0, "fork"),
        (33, "score"),
    ],
    seed=3,
    pads=70,
)
CONDITIONED = 4
"""A seed under which no fresh row's query is nearly orthogonal to its key.

Such a row's output is v (k.q) with k and q from a float32 convolution, whose rounding 1 / |k.q|
magnifies: at 9e-4, under seed 0, float32 itself is wrong by 1e-5.
"""
Check = Callable[[], None]


def flat(view: Tensor) -> Tensor:
    """The whole storage under a view, as one axis."""
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(view.untyped_storage())


def to_device(value: Any) -> Any:
    """A tensor with its whole storage and its strides, or a gate, on the device."""
    if isinstance(value, Tensor):
        moved = flat(value).to(DEVICE)
        return moved.as_strided(value.shape, value.stride(), value.storage_offset())
    if isinstance(value, Gate):
        return replace(value, A_log=to_device(value.A_log), dt_bias=to_device(value.dt_bias))
    return value


def on_device(call: Call) -> Call:
    """The call on device copies; what it writes into its arguments comes back."""

    def run(*args: Any, **named: Any) -> Tensor:
        there = [to_device(a) for a in args]
        there_named = {name: to_device(value) for name, value in named.items()}
        result = call(*there, **there_named)
        torch.cuda.synchronize()
        pairs = [*zip(args, there, strict=True), *((named[n], there_named[n]) for n in named)]
        for here, moved in pairs:
            if isinstance(here, Tensor):
                flat(here).copy_(flat(moved))
        return named["out"] if isinstance(named.get("out"), Tensor) else result.cpu()

    return run


def provider(**layouts: str) -> TritonProvider:
    """A provider for the given layouts."""
    return TritonProvider(DEVICE, {"layouts": layouts})


def kind_of(dtype: torch.dtype) -> str:
    """The kind of limits that prefill in this dtype is held to."""
    return "one rounding" if dtype == torch.float32 else "chunked"


def _check(case: Case, call: Call, kind: str = "one rounding") -> Check:
    return lambda: case.check(on_device(call), kind)


def conv_checks(dtype: torch.dtype) -> Iterator[tuple[str, Check]]:
    """Both kernels over layouts, widths and channel counts, and the short convolution."""
    for layout in ("ring", "CW", "WC"):
        shown, on = ("WC", True) if layout == "ring" else (layout, False)
        ops = provider(conv=layout)
        for width, channels, rows in ((4, 1000, PACKED), (4, 512, PACKED), (2, 24, PACKED),
                                      (8, 24, PACKED)):  # fmt: skip
            for name, decode, batch, call in (
                ("prefill", False, rows, ops.conv.prefill),
                ("decode", True, TOKENS, ops.conv.decode),
            ):
                case = conv_case(batch, layout=shown, width=width, channels=channels, dtype=dtype,
                                 decode=decode, bias=width != 4 or channels == 1000,
                                 activation="silu" if width != 8 else None)  # fmt: skip
                run = on_device(call)
                run = on_ring(run, batch) if on else run
                yield f"conv.{name} {layout} W{width} C{channels}", bound(case, run)
    ops = provider()
    for width in (3, 7):
        case = short_conv_case(
            conv_case(PACKED, layout="WC", width=width, channels=512, dtype=dtype)
        )
        call = on_ring(on_device(ops.short_conv.prefill), PACKED)
        yield f"short_conv.prefill W{width}", bound(case, call)
        case = short_conv_case(
            conv_case(TOKENS, layout="WC", width=width, channels=512, dtype=dtype, decode=True)
        )
        call = on_ring(on_device(ops.short_conv.decode), TOKENS)
        yield f"short_conv.decode W{width}", bound(case, call)
    track = conv_track()
    case = conv_case(track[0], layout="WC", channels=512, dtype=dtype, track=track[1])
    yield "conv.prefill tracked", bound(case, on_ring(on_device(ops.conv.prefill), track[0]))


def bound(case: Case, call: Call, kind: str = "one rounding") -> Check:
    """The check of a case by a call that reaches the device already."""
    return lambda: case.check(call, kind)


def conv_track() -> tuple[Rows, Tensor]:
    """Rows and track points of a convolution, one of them behind the last row."""
    rows = make_rows([(70, "fork"), (1, "fresh"), (9, "continue")], spare=12)
    unused = [s for s in range(1, rows.slots) if s not in {*rows.src, *rows.dst}]
    points = [(0, 1), (0, 2), (0, 33), (0, 70), (1, 1), (2, 9), (2, 2)]
    flat = [n for i, (row, count) in enumerate(points) for n in (row, count, unused[i])]
    return rows, i32(*flat, 0, 5, -1).view(-1, 3)


DIMS = (
    Delta(H=2, HV=4, K=128, V=128),
    Delta(H=2, HV=2, K=64, V=96),
    Delta(H=1, HV=3, K=16, V=24),
    Delta(H=1, HV=2, K=256, V=256),
)


def delta_checks(dtype: torch.dtype) -> Iterator[tuple[str, Check]]:
    """Decode and prefill over dims, gates, layouts, hard inputs and track points."""
    ops = provider().delta_rule
    for dims in DIMS:
        for gate in GATES if dims.K == 64 else (GateKind.SCALAR, None):
            named = replace(dims, gate=gate)
            label = f"K{dims.K} V{dims.V} R{dims.HV // dims.H} {gate and gate.value}"
            case = delta_case(TOKENS, named, dtype=dtype, decode=True)
            yield f"delta.decode {label}", _check(case, ops.decode)
            case = delta_case(PACKED, named, dtype=dtype)
            yield f"delta.prefill {label}", _check(case, ops.prefill, kind_of(dtype))
    turned = provider(recurrent="KV").delta_rule
    case = delta_case(TOKENS, DIMS[1], dtype=dtype, decode=True, layout="KV", gap=3, strided=True)
    yield "delta.decode KV strided", _check(case, turned.decode)
    case = delta_case(PACKED, DIMS[1], dtype=dtype, layout="KV", gap=3, strided=True)
    yield "delta.prefill KV strided", _check(case, turned.prefill, kind_of(dtype))
    for log_g in (-1e-3, -1e-4):
        hard = Delta(H=1, HV=2, K=128, V=128, gate=None, hard=True, beta_scale=2, log_g=log_g)
        case = delta_case(make_rows([(513, "fork"), (64, "fresh")]), hard, dtype=dtype)
        yield f"delta.prefill hard g={log_g}", _check(case, ops.prefill, kind_of(dtype))
    for scale, norm in ((1e-4, True), (0.2, False)):
        dims = replace(DIMS[0], scale=scale, qk_l2norm=norm)
        case = delta_case(PACKED, dims, dtype=dtype)
        yield f"delta.prefill scale={scale} norm={norm}", _check(case, ops.prefill, kind_of(dtype))
        case = delta_case(TOKENS, dims, dtype=dtype, decode=True)
        yield f"delta.decode scale={scale} norm={norm}", _check(case, ops.decode)
    rows = make_rows([(200, "fork"), (64, "fresh"), (130, "continue")], spare=9)
    unused = [s for s in range(1, rows.slots) if s not in {*rows.src, *rows.dst}]
    flat = [n for i, (row, count) in enumerate([(0, 64), (0, 192), (1, 64), (2, 128)])
            for n in (row, count, unused[i])]  # fmt: skip
    case = delta_case(rows, DIMS[0], dtype=dtype, track=i32(*flat, 0, 5, -1).view(-1, 3))
    yield "delta.prefill tracked", _check(case, ops.prefill, kind_of(dtype))


def fused_checks(dtype: torch.dtype) -> Iterator[tuple[str, Check]]:
    """Fused decode with and without norm, and fused prefill from a strided view."""
    ops = provider().delta_rule
    for dims in DIMS[:3]:
        for gate in (GateKind.SCALAR, GateKind.CHANNEL, None):
            for norm in (False, True):
                case = fused_case(TOKENS, replace(dims, gate=gate), dtype=dtype, bias=norm,
                                  norm=norm, seed=CONDITIONED)  # fmt: skip
                label = f"K{dims.K} V{dims.V} {gate and gate.value} norm={norm}"
                yield (
                    f"delta.decode_fused {label}",
                    lambda c=case: c.check(on_device(ops.decode_fused)),
                )
    for norm in (False, True):
        case = delta_case(PACKED, DIMS[0], dtype=dtype)
        yield f"delta.prefill_fused norm={norm}", _fused_prefill(case, ops, norm)


def _fused_prefill(case: Case, ops: Any, norm: bool) -> Check:
    mixed = mixed_qkv(case, gap=8)
    gen = torch.Generator().manual_seed(9)
    v = case.args["v"]
    z = torch.randn(v.shape, generator=gen).to(v.dtype) if norm else None
    weight = torch.rand(v.shape[-1], generator=gen) + 0.5 if norm else None

    def call(**args: Any) -> Tensor:
        names = ("a", "b", "gate", "state", "src", "dst", "query_start_loc", "max_len", "out")
        given = {name: args[name] for name in names}
        extra = {"z": z, "norm_weight": weight, "norm_eps": 1e-5} if norm else {}
        return on_device(ops.prefill_fused)(mixed_qkv=mixed, **given, **extra)

    def check() -> None:
        if not norm:
            case.check(call, kind_of(v.dtype))
            return
        got, _ = case.run(call, out=torch.full_like(v, float("nan")))
        want = gated_norm(case.expect()[0], z, weight, 1e-5, GateKind.SCALAR)
        for span in case.rows.spans():
            if span.stop > span.start:
                error = (got[span].double() - want[span]).norm() / want[span].norm()
                assert error < {torch.float32: 1e-5, torch.float16: 3e-3}.get(v.dtype, 2e-2), error
        assert (got[case.rows.bounds[-1] :] == 0).all()

    return check


def far_slots(dtype: torch.dtype, slots: int = 4500) -> None:
    """Decode and prefill in a pool whose slots lie beyond 2^31 elements."""
    ops, dims = provider().delta_rule, Delta(H=16, HV=32, K=128, V=128)
    near = make_rows([(1, "fork"), (1, "continue"), (1, "fresh")], seed=2)
    shift = slots - near.slots
    pool = torch.empty(slots, 32, 128, 128, device=DEVICE)
    for decode, call in ((True, ops.decode), (False, ops.prefill)):
        case = delta_case(near, dims, dtype=dtype, decode=decode)

        def run(call: Call = call, **args: Any) -> Tensor:
            moved = {n: to_device(v) for n, v in args.items() if n not in ("state", "out")}
            pool[shift:] = args["state"].to(DEVICE)
            for name in ("src", "dst"):
                moved[name] = torch.where(moved[name] >= 0, moved[name] + shift, moved[name])
            result = call(**moved, state=pool).cpu()
            args["state"].copy_(pool[shift:])
            return result

        case.check(run, "one rounding" if decode else kind_of(dtype), poison=False)


SMALL = (
    "bfloat16 conv.prefill ring W4 C512", "bfloat16 conv.decode ring W4 C512",
    "bfloat16 conv.prefill tracked", "float32 short_conv.prefill W3",
    "bfloat16 short_conv.decode W3", "bfloat16 delta.decode K64 V96 R1 scalar",
    "float32 delta.prefill K16 V24 R3 scalar", "bfloat16 delta.prefill K64 V96 R1 scalar",
    "float16 delta.prefill K16 V24 R3 scalar",
    "bfloat16 delta.prefill K16 V24 R3 channel", "float16 delta.prefill K16 V24 R3 safe",
    "bfloat16 delta.prefill_fused channel norm=True NaN pads",
    "bfloat16 delta.decode_fused K64 V96 scalar norm=True",
    "bfloat16 delta.decode_fused K128 V128 scalar norm=False",
    "bfloat16 conv.verify tree ring W4", "bfloat16 delta.verify tree short K64 V96 R1 scalar",
    "float32 delta.verify tree short K64 V96 R1 channel",
    "bfloat16 scan.decode mamba2 H3 P24 N48 G1 z=False",
    "bfloat16 scan.prefill mamba2 H3 P24 N48 G1 z=False",
    "float32 scan.prefill mamba2 H3 P24 N48 G1 z=False",
    "bfloat16 scan.prefill lightning in segments",
    "bfloat16 scan.prefill mamba1 H8 P24 N8 G2 z=False",
    "bfloat16 scan.verify mamba2 H3 P24 N48 G1 z=False tree",
    "bfloat16 scan.verify mamba1 H8 P24 N8 G2 z=False tree",
    "bfloat16 hopper.prefill edges NCONS=2", "bfloat16 hopper.prefill edges NCONS=1",
    "bfloat16 hopper.prefill edges parts=1 waves=1",
    "bfloat16 hopper.prefill edges parts=3 waves=2",
    "bfloat16 hopper.prefill channel edges NCONS=1 parts=3",
    "bfloat16 delta.bound layer", "bfloat16 conv_state.step bound layer",
    "bfloat16 conv_state.step bound cca layer",
)  # fmt: skip
"""Checks that between them launch every kernel, on few programs: what a sanitizer can afford."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one check gave: None for an error means that it passed."""

    name: str
    seconds: float
    error: str | None


def all_checks() -> list[tuple[str, Check]]:
    """Every check by name, dtype first."""
    from support.device_borders import border_checks
    from support.device_bound import bound_checks
    from support.device_hopper import hopper_checks
    from support.device_kda import kda_checks
    from support.device_scan import far_slots as far_scan_slots
    from support.device_scan import scan_checks
    from support.device_verify import verify_checks

    found: list[tuple[str, Check]] = []
    for dtype in FLOATS:
        short = str(dtype).removeprefix("torch.")
        parts = (conv_checks, delta_checks, fused_checks, border_checks, bound_checks)
        for part in (*parts, kda_checks, verify_checks, scan_checks, hopper_checks):
            found += [(f"{short} {name}", check) for name, check in part(dtype)]
        found.append((f"{short} far slots", lambda d=dtype: far_slots(d)))
        found.append((f"{short} scan far slots", lambda d=dtype: far_scan_slots(d)))
    return found


def run_part(part: tuple[int, int]) -> list[Outcome]:
    """The checks of one worker: every n-th one, from the i-th on."""
    first, step = part
    torch.set_num_threads(1)
    outcomes = []
    for name, check in all_checks()[first::step]:
        begin, error = time.perf_counter(), None
        try:
            check()
        except Exception as fault:  # every fault is a line of the report
            where = traceback.extract_tb(fault.__traceback__)[-1]
            text = f"{type(fault).__name__}: {fault}".strip()
            error = f"{text[:300]} ({where.filename.split('/')[-1]}:{where.lineno})"
        outcomes.append(Outcome(name, time.perf_counter() - begin, error))
        if error and "CUDA error" in error:
            break
    return outcomes
