"""Checks at the borders of what the NVIDIA manifest declares, beyond those of every run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hal.model.spec import GateKind
from support import device_checks as checks
from support.ops import Call, Delta, conv_case, delta_case
from support.triton_cases import fused_case, on_ring, short_conv_case

WIDTHS = range(2, 9)
SHORT_WIDTHS = range(3, 8)
DIMS = (
    Delta(H=1, HV=8, K=64, V=64),
    Delta(H=1, HV=4, K=64, V=128),
    Delta(H=1, HV=1, K=96, V=192),
    Delta(H=1, HV=2, K=128, V=64),
)


def border_checks(dtype: torch.dtype) -> Iterator[tuple[str, checks.Check]]:
    """Every declared width, pair of dims and ratio that the ordinary checks leave out."""
    yield from _conv_widths(dtype)
    yield from _short_widths(dtype)
    yield from _conv_tracked(dtype)
    yield from _delta_dims(dtype)
    yield from _fused_slices(dtype)


def _conv_widths(dtype: torch.dtype) -> Iterator[tuple[str, checks.Check]]:
    for layout in ("ring", "CW", "WC"):
        shown = "WC" if layout == "ring" else layout
        ops = checks.provider(conv=layout).conv
        for width in WIDTHS:
            for verb, rows in (("prefill", checks.PACKED), ("decode", checks.TOKENS)):
                case = conv_case(
                    rows, layout=shown, width=width, channels=40, dtype=dtype, gap=8,
                    decode=verb == "decode", activation="silu" if width % 2 else None,
                )  # fmt: skip
                run = checks.on_device(ops.prefill if verb == "prefill" else ops.decode)
                run = on_ring(run, rows) if layout == "ring" else run
                yield f"conv.{verb} border {layout} W{width} sliced", checks.bound(case, run)


def _short_widths(dtype: torch.dtype) -> Iterator[tuple[str, checks.Check]]:
    ops = checks.provider().short_conv
    for width in SHORT_WIDTHS:
        for verb, rows in (("prefill", checks.PACKED), ("decode", checks.TOKENS)):
            case = conv_case(rows, layout="WC", width=width, channels=40, dtype=dtype,
                             decode=verb == "decode")  # fmt: skip
            run = checks.on_device(ops.prefill if verb == "prefill" else ops.decode)
            name = f"short_conv.{verb} border W{width}"
            yield name, checks.bound(short_conv_case(case), on_ring(run, rows))


def _conv_tracked(dtype: torch.dtype) -> Iterator[tuple[str, checks.Check]]:
    rows, track = checks.conv_track()
    for layout in ("CW", "WC"):
        run = checks.on_device(checks.provider(conv=layout).conv.prefill)
        case = conv_case(rows, layout=layout, channels=512, dtype=dtype, track=track)
        yield f"conv.prefill border tracked {layout}", checks.bound(case, run)


def _delta_dims(dtype: torch.dtype) -> Iterator[tuple[str, checks.Check]]:
    ops, kind = checks.provider().delta_rule, checks.kind_of(dtype)
    for dims in DIMS:
        for gate in (GateKind.SCALAR, None):
            named = replace(dims, gate=gate)
            label = f"border K{dims.K} V{dims.V} R{dims.HV // dims.H} {gate and gate.value}"
            case = delta_case(checks.TOKENS, named, dtype=dtype, decode=True)
            run = checks.on_device(ops.decode)
            yield f"delta.decode {label}", checks.bound(case, run)
            case = delta_case(checks.PACKED, named, dtype=dtype)
            yield f"delta.prefill {label}", checks.bound(case, checks.on_device(ops.prefill), kind)


def _fused_slices(dtype: torch.dtype) -> Iterator[tuple[str, checks.Check]]:
    call = sliced(checks.on_device(checks.provider().delta_rule.decode_fused))
    for dims in checks.DIMS[:3]:
        case = fused_case(checks.TOKENS, dims, dtype=dtype, bias=True, seed=checks.CONDITIONED)
        name = f"delta.decode_fused border K{dims.K} V{dims.V} sliced"
        yield name, lambda c=case: c.check(call)


def sliced(call: Call) -> Call:
    """The call on a first argument that is a slice of something wider, NaN beside it."""

    def run(mixed: Tensor, *args: Any, **named: Any) -> Tensor:
        tokens, channels = mixed.shape
        wide = torch.full((tokens, channels + 8), float("nan"), dtype=mixed.dtype)
        wide[:, :channels] = mixed
        return call(wide[:, :channels], *args, **named)

    return run
