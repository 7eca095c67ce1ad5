"""Fused operations equal the composition that they replace."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hal.model.spec import GateKind
from hal_triton.tuning import Config
from support.ops import Delta, delta_case, make_rows
from support.triton_cases import Fused, fused_case, gated_norm, mixed_qkv
from support.triton_guard import watch
from support.triton_ops import provider

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SMALL = Delta(H=2, HV=4, K=16, V=24)
TOKENS = make_rows(
    [(1, "continue"), (1, "pad"), (1, "fresh"), (1, "fork"), (1, "stateless")], seed=8
)
NARROW = {f"delta_rule.decode_fused{end}": Config({"BV": 8}) for end in ("", ".norm")}


def check(case: Fused, **blocks: Config) -> None:
    with watch():
        case.check(provider(blocks).delta_rule.decode_fused)


@pytest.mark.parametrize("gate", [GateKind.SCALAR, GateKind.CHANNEL, GateKind.SAFE, None])
@pytest.mark.parametrize("dtype", FLOATS)
def test_fused_decode_equals_conv_split_and_recurrence(
    dtype: torch.dtype, gate: GateKind | None
) -> None:
    check(fused_case(TOKENS, replace(SMALL, gate=gate), dtype=dtype))


@pytest.mark.parametrize("width", [2, 3, 8])
def test_every_width_and_bias_is_right(width: int) -> None:
    check(fused_case(TOKENS, SMALL, width=width, bias=True))


@pytest.mark.parametrize("gate", [GateKind.SCALAR, GateKind.CHANNEL])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_gated_norm_follows_in_the_same_launch(dtype: torch.dtype, gate: GateKind) -> None:
    case = fused_case(TOKENS, replace(SMALL, gate=gate), dtype=dtype, norm=True)
    with watch() as names:
        case.check(provider().delta_rule.decode_fused)
    assert names == ["delta_decode_fused"]


@pytest.mark.parametrize("norm", [False, True])
def test_tiles_of_a_head_write_each_ring_row_once(norm: bool) -> None:
    rows = make_rows([(1, "continue"), (1, "fork")])
    check(fused_case(rows, SMALL, norm=norm), **NARROW)


def test_tiles_leave_the_norm_to_a_second_launch_that_skips_pads() -> None:
    rows = make_rows([(1, "pad"), (1, "fork")])
    case = fused_case(rows, SMALL, norm=True)
    assert case.z is not None
    case.z[0] = float("nan")
    with watch() as names:
        case.check(provider(NARROW).delta_rule.decode_fused)
    assert names == ["delta_decode_fused", "gated_norm"]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("norm", [False, True])
def test_fused_prefill_equals_split_prefill_and_norm(dtype: torch.dtype, norm: bool) -> None:
    rows = make_rows([(3, "continue"), (0, "fork"), (5, "fresh")], seed=2, pads=2)
    case = delta_case(rows, SMALL, dtype=dtype)
    mixed, v = mixed_qkv(case, gap=8), case.args["v"]
    gen = torch.Generator().manual_seed(1)
    z = torch.randn(v.shape, generator=gen).to(dtype)
    weight = torch.rand(v.shape[-1], generator=gen) + 0.5
    extra = {"z": z, "norm_weight": weight, "norm_eps": 1e-5} if norm else {}

    def call(**args: Any) -> Tensor:
        given = {n: v for n, v in args.items() if n not in ("q", "k", "v", "qk_l2norm")}
        with watch():
            return provider().delta_rule.prefill_fused(mixed, **given, **extra)

    if not norm:
        case.check(call, "one rounding" if dtype == torch.float32 else "chunked")
        return
    got, _ = case.run(call)
    want = gated_norm(case.expect()[0], z, weight, 1e-5, GateKind.SCALAR)
    assert (got[8:] == 0).all()
    error = (got[:8].double() - want[:8]).norm() / want[:8].norm()
    assert error < {torch.float32: 1e-5, torch.float16: 3e-3}.get(dtype, 2e-2)


def test_z_without_a_norm_weight_is_refused() -> None:
    case = fused_case(TOKENS, SMALL, norm=True)
    with pytest.raises(ValueError, match="z was given without norm_weight"):
        replace(case, norm_weight=None).run(provider().delta_rule.decode_fused)


def test_channels_that_fit_no_heads_are_refused() -> None:
    case = fused_case(TOKENS, SMALL)
    args = case.conv.args
    short = {name: args[name][..., :-1] for name in ("x", "state")}
    conv = case.conv.replace(**short, weight=args["weight"][:-1])
    with pytest.raises(ValueError, match="159 channels, expected 2"):
        replace(case, conv=conv).run(provider().delta_rule.decode_fused)
