"""Fused operations equal the composition that they replace."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hal.model.spec import GateKind
from hal_triton.tuning import Config
from support.ops import Call, Case, Delta, delta_case, make_rows
from support.triton_cases import Fused, fused_case, gated_norm, mixed_qkv
from support.triton_guard import watch
from support.triton_ops import provider

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SMALL = Delta(H=2, HV=4, K=16, V=24)
TOKENS = make_rows(
    [(1, "continue"), (1, "pad"), (1, "fresh"), (1, "fork"), (1, "stateless")], seed=8
)
NARROW = {f"delta_rule.decode_fused{end}": Config({"BV": 8}) for end in ("", ".norm", ".channel")}


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


@pytest.mark.parametrize("gate", [GateKind.SCALAR, GateKind.CHANNEL])
@pytest.mark.parametrize("norm", [False, True])
def test_tiles_of_a_head_write_each_ring_row_once(norm: bool, gate: GateKind) -> None:
    rows = make_rows([(1, "continue"), (1, "fork")])
    check(fused_case(rows, replace(SMALL, gate=gate), norm=norm), **NARROW)


@pytest.mark.parametrize("name", ["x", "a", "b", "z"])
def test_a_step_whose_last_axis_is_not_dense_is_read_from_a_copy(name: str) -> None:
    case = fused_case(TOKENS, SMALL, norm=True)
    if name == "x":
        case = replace(case, conv=case.conv.replace(x=turned(case.conv.args["x"])))
    elif name == "z":
        assert case.z is not None
        case = replace(case, z=turned(case.z))
    else:
        case = replace(case, delta=case.delta.replace(**{name: turned(case.delta.args[name])}))
    check(case)


def turned(x: Tensor) -> Tensor:
    """The same values, laid out last axis first."""
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


def test_tiles_leave_the_norm_to_a_second_launch_that_skips_pads() -> None:
    rows = make_rows([(1, "pad"), (1, "fork")])
    case = fused_case(rows, SMALL, norm=True)
    assert case.z is not None
    case.z[0] = float("nan")
    with watch() as names:
        case.check(provider(NARROW).delta_rule.decode_fused)
    assert names == ["delta_decode_fused", "gated_norm"]


def fused_prefill(
    gate: GateKind | None, dtype: torch.dtype, norm: bool
) -> tuple[Case, Call, dict[str, Any]]:
    """Rows with pads, the call of their mixed_qkv, and the norm; NaN in every pad input."""
    rows = make_rows([(3, "continue"), (0, "fork"), (5, "fresh")], seed=2, pads=2)
    case = delta_case(rows, replace(SMALL, gate=gate), dtype=dtype)
    mixed, v = mixed_qkv(case, gap=8), case.args["v"]
    gen = torch.Generator().manual_seed(1)
    z = torch.randn(v.shape, generator=gen).to(dtype)
    z[8:] = float("nan")
    weight = torch.rand(v.shape[-1], generator=gen) + 0.5
    extra = {"z": z, "norm_weight": weight, "norm_eps": 1e-5} if norm else {}

    def call(**args: Any) -> Tensor:
        given = {n: v for n, v in args.items() if n not in ("q", "k", "v", "qk_l2norm")}
        with watch():
            return provider().delta_rule.prefill_fused(mixed, **given, **extra)

    return case, call, extra


@pytest.mark.parametrize("gate", [GateKind.SCALAR, GateKind.CHANNEL, GateKind.SAFE])
@pytest.mark.parametrize("dtype", FLOATS)
def test_fused_prefill_equals_split_and_prefill(dtype: torch.dtype, gate: GateKind) -> None:
    case, call, _ = fused_prefill(gate, dtype, norm=False)
    case.check(call, "one rounding" if dtype == torch.float32 else "chunked")


@pytest.mark.parametrize("gate", [GateKind.SCALAR, GateKind.CHANNEL, GateKind.SAFE])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_norm_of_a_fused_prefill_gives_zero_pads_whatever_they_hold(
    dtype: torch.dtype, gate: GateKind
) -> None:
    case, call, extra = fused_prefill(gate, dtype, norm=True)
    for name in ("q", "k", "v", "a", "b"):
        assert case.args[name][8:].isnan().all()
    got, _ = case.run(call, out=torch.full_like(case.args["v"], float("nan")))
    want = gated_norm(case.expect()[0], extra["z"], extra["norm_weight"], 1e-5, gate)
    assert torch.equal(got[8:], torch.zeros_like(got[8:]))
    error = (got[:8].double() - want[:8]).norm() / want[:8].norm()
    assert error < {torch.float32: 1e-5, torch.float16: 3e-3}.get(dtype, 2e-2)


def test_a_strided_result_of_a_fused_prefill_is_normed_as_a_dense_one_is() -> None:
    case, call, _ = fused_prefill(GateKind.SCALAR, torch.bfloat16, norm=True)
    want, _ = case.run(call)
    wide = torch.full((*want.shape[:-1], 2 * want.shape[-1]), float("nan"), dtype=want.dtype)
    got, _ = case.run(call, out=wide[..., ::2])
    assert torch.equal(got, want)
    assert wide[..., 1::2].isnan().all()


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
