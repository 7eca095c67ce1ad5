"""Checks of `cuda.hopper` on a CUDA device of sm_90, as named checks.

Every form of the kernel runs every case: a whole head a block, half of one, and half of one on
prepared chunks, in cuts of which some are too fine for their rows. What the manifest leaves to the
shared kernels is called too, since the kit calls it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from hal.model.spec import GateKind
from hal_cuda.hopper import prefill
from hal_cuda.hopper.cut import Cut
from hal_cuda.hopper.driver import Driver
from hal_cuda.hopper.provider import HopperDeltaRule
from hal_cuda.provider import tuning
from hal_triton.tuning import Config
from support import device_checks as checks
from support.device_gates import Named, hard_keys, lengths, slices, strengths, wide_gates
from support.ops import Call, Case, Delta, Rows, delta_case, i32, make_rows
from support.triton_cases import gated_norm, mixed_qkv

BF16 = torch.bfloat16
HEAD = Delta(H=2, HV=4, K=128, V=128)
HEADS = ((1, 1), (2, 2), (1, 2), (1, 3), (3, 3), (2, 8), (1, 8))
EDGES = make_rows(
    [
        (n, kind)
        for n in (1, 63, 64, 65, 127, 128, 129, 0, 192, 2)
        for kind in ("continue", "fresh")
    ],
    seed=4,
    pads=131,
)
READY = replace(HEAD, gate=None)
CUTS = (Cut(1, 1), Cut(3, 2), Cut(5, 1), Cut(9, 3))
MANY = make_rows([(70, "fork"), (1, "continue"), (130, "fresh")] * 15, seed=2, pads=5)
LONG = make_rows([(1500, "continue")], seed=1)


def rule(consumers: int | None = None) -> HopperDeltaRule:
    """The provider's delta rule, in one form of the kernel or in that of the table."""
    base = tuning("sm_90")
    forced = {} if consumers is None else {prefill.TABLE: Config({"CONSUMERS": consumers})}
    return HopperDeltaRule(replace(base, overrides=forced))


def cut_rule(table: str, form: Config, cut: Cut) -> Call:
    """Prefill on prepared chunks in a form, with rows cut as told whatever their lengths."""
    made = HopperDeltaRule(replace(tuning("sm_90"), overrides={table: form}))

    def call(**args: Any) -> Tensor:
        with (
            patch.object(prefill, "cut_of", lambda *sizes: cut),
            patch.object(prefill, "_LEAST_CHUNKS", 0),
        ):
            return made.prefill(**args)

    return call


@contextmanager
def launches() -> Iterator[list[int]]:
    """The programs of every launch of the kernel within the block."""
    found: list[int] = []

    def noting(launch: Any) -> Any:
        def noted(self: Driver, kernel: Any, programs: int, *rest: Any) -> None:
            found.append(programs)
            launch(self, kernel, programs, *rest)

        return noted

    with (
        patch.object(Driver, "launch", noting(Driver.launch)),
        patch.object(Driver, "chain", noting(Driver.chain)),
    ):
        yield found


def hopper_checks(dtype: torch.dtype) -> Iterator[tuple[str, checks.Check]]:
    """Every check of the provider, in the one dtype that it offers."""
    if dtype != BF16:
        return
    for consumers in (2, 1):
        for name, check in _kernel(rule(consumers).prefill, 1):
            yield f"hopper.prefill {name} NCONS={consumers}", check
    half = Config({"CONSUMERS": 1, "PREPARED": 1})
    for cut in CUTS:
        for name, check in _kernel(cut_rule(prefill.TABLE, half, cut), launches_of(cut)):
            yield f"hopper.prefill {name} parts={cut.parts} waves={cut.waves}", check
    yield from _channels()
    yield from _fused()
    yield from _shared()
    yield "hopper.prefill far slots", far_slots


def launches_of(cut: Cut) -> int:
    """Of a prefill on prepared chunks: a second walk and the borders come with parts."""
    return 2 if cut.parts == 1 else 4


def _kernel(call: Call, launched: int) -> Iterator[tuple[str, checks.Check]]:
    for name, case in (*_shapes(HEAD), *_variations(), *_gates(), *_views()):
        yield name, partial(_held, case, call, launched)


def _shapes(dims: Delta) -> Named:
    """Heads by key heads, rows around the borders of chunks, many and long ones, track points."""
    for H, HV in HEADS:
        yield f"H{H} HV{HV}", delta_case(checks.PACKED, replace(dims, H=H, HV=HV), dtype=BF16)
    for name, rows in (("edges", EDGES), ("many rows", MANY), ("one long row", LONG)):
        yield name, delta_case(rows, dims, dtype=BF16)
    yield "tracked", _tracked(dims)


def _variations() -> Named:
    yield "ready gates", delta_case(checks.PACKED, READY, dtype=BF16)
    yield from lengths(HEAD, BF16, ((1e-4, True), (0.2, False), (30.0, True)))
    yield from hard_keys(READY, BF16)
    yield "no values", _no_values()
    hard = replace(HEAD, hard=True, beta_scale=2)
    yield "hard, beta to 2", delta_case(checks.PACKED, hard, dtype=BF16)


def _channels() -> Iterator[tuple[str, checks.Check]]:
    for consumers, cut in ((2, Cut()), (1, Cut()), (1, Cut(3, 2)), (1, Cut(5, 1))):
        call = cut_rule(prefill.CHANNEL_TABLE, Config({"CONSUMERS": consumers}), cut)
        label = f"NCONS={consumers} parts={cut.parts}"
        for name, case in _channel_cases():
            check = partial(_held, case, call, launches_of(cut))
            yield f"hopper.prefill channel {name} {label}", check
    for gate in (GateKind.SCALAR, GateKind.CHANNEL):
        for pads in (5, 1500):
            case = delta_case(make_rows([], pads=pads), replace(HEAD, gate=gate), dtype=BF16)
            name = f"hopper.prefill {gate.value}, {pads} pads alone"
            yield name, partial(_held, case, rule().prefill, 1)
    for gate in (GateKind.CHANNEL, GateKind.SAFE):
        case = delta_case(checks.PACKED, replace(HEAD, gate=gate), dtype=BF16)
        name = f"hopper.prefill_fused {gate.value}"
        yield name, _fused_check(case, 8, norm=False)


def _channel_cases() -> Named:
    channel = replace(HEAD, gate=GateKind.CHANNEL)
    ready = replace(READY, per_channel=True)
    yield from _shapes(channel)
    for name, dims in (("safe", replace(HEAD, gate=GateKind.SAFE)), ("ready", ready)):
        yield name, delta_case(checks.PACKED, dims, dtype=BF16)
    yield from lengths(channel, BF16, ((1e-4, True), (0.2, False), (1e-3, False), (30.0, True)))
    yield from hard_keys(ready, BF16)
    yield from strengths(ready, BF16)
    yield from wide_gates(channel, BF16)
    yield from slices(channel, BF16, (8, 3))


def _no_values() -> Case:
    """A state that only decays, to less than the smallest number that has a reciprocal."""
    case = delta_case(make_rows([(400, "fork"), (70, "fresh")]), READY, dtype=BF16)
    g = torch.full_like(case.args["a"], -0.75)
    return case.replace(a=g, v=torch.zeros_like(case.args["v"]))


def _gates() -> Named:
    """Decays of every strength, extreme raw gates, and gates of other dtypes."""
    yield from strengths(READY, BF16)
    case = delta_case(checks.PACKED, HEAD, dtype=BF16)
    for name, value in (("a", 60.0), ("a", -60.0), ("b", 60.0), ("b", -60.0)):
        raw = case.args[name].clone()
        raw[::3] = value
        yield f"{name} of {value:g}", case.replace(**{name: raw})
    yield from wide_gates(HEAD, BF16)
    yield "a alone in float32", case.replace(a=case.args["a"].float())


def _views() -> Named:
    """Slices that bulk copies can address, and others that have to be copied."""
    yield from slices(HEAD, BF16, (8, 64, 3, 1))
    yield "strided indices", delta_case(checks.PACKED, HEAD, dtype=BF16, strided=True)
    case = delta_case(checks.PACKED, HEAD, dtype=BF16)
    whole = case.args["state"]
    spread = torch.full((whole.shape[0], 6, 128, 128), float("nan"))
    spread[:, 1:5] = whole
    yield "slots with gaps", case.replace(state=spread[:, 1:5])


def _tracked(dims: Delta) -> Case:
    rows = make_rows([(200, "fork"), (64, "fresh"), (130, "continue")], spare=9)
    unused = [s for s in range(1, rows.slots) if s not in {*rows.src, *rows.dst}]
    points = [(0, 64), (0, 192), (0, 200), (1, 64), (2, 128)]
    flat = [n for i, (row, count) in enumerate(points) for n in (row, count, unused[i])]
    return delta_case(rows, dims, dtype=BF16, track=i32(*flat, 0, 5, -1).view(-1, 3))


def _held(case: Case, call: Call, launched: int) -> None:
    """Parity by the kernels and by nothing else."""
    with launches() as found:
        case.check(checks.on_device(call), "chunked")
    assert len(found) == launched, f"{len(found)} launches, expected {launched}"


def _fused() -> Iterator[tuple[str, checks.Check]]:
    for gap in (8, 3):
        for norm in (False, True):
            case = delta_case(checks.PACKED, HEAD, dtype=BF16)
            yield f"hopper.prefill_fused gap={gap} norm={norm}", _fused_check(case, gap, norm)


def _fused_check(case: Case, gap: int, norm: bool) -> checks.Check:
    mixed, v, end = mixed_qkv(case, gap=gap), case.args["v"], case.rows.bounds[-1]
    gen = torch.Generator().manual_seed(9)
    z = torch.randn(v.shape, generator=gen).to(v.dtype)
    z[end:] = float("nan")
    weight = torch.rand(v.shape[-1], generator=gen) + 0.5
    extra = {"z": z, "norm_weight": weight, "norm_eps": 1e-5} if norm else {}

    def call(**args: Any) -> Tensor:
        names = ("a", "b", "gate", "state", "src", "dst", "query_start_loc", "max_len", "out")
        given = {name: args[name] for name in names}
        return checks.on_device(rule().prefill_fused)(mixed_qkv=mixed, **given, **extra)

    def check() -> None:
        if not norm:
            case.check(call, "chunked")
            return
        got, _ = case.run(call, out=torch.full_like(v, float("nan")))
        want = gated_norm(case.expect()[0], z, weight, 1e-5, GateKind.SCALAR)
        assert torch.equal(got[end:], torch.zeros_like(got[end:])), "pads are not zero"
        for span in case.rows.spans():
            if span.stop > span.start:
                error = (got[span].double() - want[span]).norm() / want[span].norm()
                assert error < 2e-2, error

    return check


def _shared() -> Iterator[tuple[str, checks.Check]]:
    """States that the kernel cannot address: the shared kernels serve them under the same name."""
    for gap in (3, 8):
        case = delta_case(checks.PACKED, HEAD, dtype=BF16, gap=gap, strided=True)
        yield (
            f"hopper.prefill shared, rows of the state {gap} apart",
            checks.bound(case, checks.on_device(rule().prefill), "chunked"),
        )


def far_slots(slots: int = 4500) -> None:
    """Prefill in a pool whose slots lie beyond 2^31 elements."""
    dims = replace(HEAD, H=16, HV=32)
    near: Rows = make_rows([(65, "fork"), (1, "continue"), (3, "fresh")], seed=2)
    shift = slots - near.slots
    pool = torch.empty(slots, 32, 128, 128, device=checks.DEVICE)
    case = delta_case(near, dims, dtype=BF16)

    def run(**args: Any) -> Tensor:
        moved = {n: checks.to_device(v) for n, v in args.items() if n not in ("state", "out")}
        pool[shift:] = args["state"].to(checks.DEVICE)
        for name in ("src", "dst"):
            moved[name] = torch.where(moved[name] >= 0, moved[name] + shift, moved[name])
        result = rule().prefill(**moved, state=pool).cpu()
        args["state"].copy_(pool[shift:])
        return result

    case.check(run, "chunked", poison=False)
