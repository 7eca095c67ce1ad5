"""Cases of the fused delta-rule operations; their oracle is the plain ones in a row."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from hal import reference
from hal.testing.case import Case, Pools
from hal.testing.conv_cases import window_pool
from hal.testing.delta_cases import Delta, delta_case
from hal.testing.rows import Rows, i32, packed

PLAIN: Final = Delta()


def prefill_fused_case(
    rows: Rows, dims: Delta = PLAIN, *, norm: bool = False, gap: int = 0, **settings: Any
) -> Case:
    """Split and prefill, and the gated norm where asked; mixed_qkv comes after the conv."""
    case = delta_case(rows, dims, gap=gap, **settings)
    dropped = ("q", "k", "v")
    args = {name: value for name, value in case.args.items() if name not in dropped}
    args["mixed_qkv"] = packed(_mixed(case), rows, gap)
    return _normed(replace(case, args=args), dims, "delta_rule.prefill_fused", norm, gap)


def decode_fused_case(
    rows: Rows,
    dims: Delta = PLAIN,
    *,
    width: int = 4,
    bias: bool = False,
    activation: str | None = "silu",
    conv_layout: str = "CW",
    norm: bool = False,
    gap: int = 0,
    **settings: Any,
) -> Case:
    """Conv, split and decode, and the gated norm where asked; mixed_qkv comes before the conv."""
    case = prefill_fused_case(rows, dims, gap=gap, norm=norm, **{**settings, "decode": True})
    mixed, gen = case.args["mixed_qkv"], torch.Generator().manual_seed(7)
    channels, dtype = mixed.shape[1], mixed.dtype
    args = {
        **case.args,
        "conv_weight": torch.randn(channels, width, generator=gen).to(dtype),
        "conv_bias": torch.randn(channels, generator=gen).to(dtype) if bias else None,
        "activation": activation,
        "conv_state": window_pool(rows, channels, width, dtype, conv_layout, gen, gap),
        "start": i32(*rows.start),
    }
    return replace(
        case,
        operation="delta_rule.decode_fused",
        args=args,
        pools=("state", "conv_state"),
        layouts={"conv_state": conv_layout},
        oracle=_oracle(dims, case.layout, conv_layout),
    )


def _mixed(case: Case) -> Tensor:
    return torch.cat([case.args[name].flatten(1) for name in ("q", "k", "v")], 1)


def _normed(case: Case, dims: Delta, name: str, norm: bool, gap: int) -> Case:
    extra: dict[str, Any] = {}
    if norm:
        gen = torch.Generator().manual_seed(3)
        z = torch.randn(case.rows.tokens, dims.HV, dims.V, generator=gen).to(case.dtype)
        weight = torch.rand(dims.V, generator=gen) + 0.5
        extra = {"z": packed(z, case.rows, gap), "norm_weight": weight, "norm_eps": 1e-5}
    options = {n: value for n, value in case.options.items() if n != "qk_l2norm"}
    oracle = _oracle(dims, case.layout, "")
    return replace(
        case, operation=name, args={**case.args, **extra}, options=options, oracle=oracle
    )


def _oracle(dims: Delta, layout: str, conv_layout: str) -> Callable[..., tuple[Tensor, Pools]]:
    """The plain operations in a row, with nothing rounded between them."""

    def expect(**args: Any) -> tuple[Tensor, Pools]:
        mixed, pools = args.pop("mixed_qkv"), {}
        norm = [args.pop(name, None) for name in ("z", "norm_weight", "norm_eps")]
        if conv_layout:
            conv = {n: args.pop(f"conv_{n}") for n in ("weight", "bias", "state")}
            conv |= {n: args[n] for n in ("src", "dst")} | {"start": args.pop("start")}
            activation = args.pop("activation")
            mixed, windows = reference.conv_decode(
                mixed, **conv, activation=activation, layout=conv_layout
            )
            pools["conv_state"] = windows
        operation: Callable[..., tuple[Tensor, Tensor]] = reference.delta_rule_prefill
        if conv_layout:
            operation = reference.delta_rule_decode
        result, state = operation(**_split(mixed, dims), **args, layout=layout)
        return _gate(result, dims, *norm), {"state": state, **pools}

    return expect


def _split(mixed: Tensor, dims: Delta) -> dict[str, Tensor]:
    heads = (dims.H, dims.H, dims.HV)
    parts = torch.split(mixed, [dims.H * dims.K, dims.H * dims.K, dims.HV * dims.V], 1)
    return {
        name: part.reshape(len(part), count, part.shape[1] // count)
        for name, part, count in zip("qkv", parts, heads, strict=True)
    }


def _gate(
    o: Tensor, dims: Delta, z: Tensor | None, weight: Tensor | None, eps: float | None
) -> Tensor:
    """The gated norm; tokens whose z nobody may look at are zero before and after."""
    if z is None or weight is None:
        return o
    normed = reference.gated_rms_norm(
        o, z, weight, eps or 0.0, activation="sigmoid" if dims.by_channel else "silu"
    )
    return torch.where(o == 0, 0.0, normed)
