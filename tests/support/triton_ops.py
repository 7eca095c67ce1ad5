"""The Triton provider in the interpreter: few programs a launch, every launch watched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hal_triton.kernels.math import silu
from hal_triton.provider import TritonProvider
from hal_triton.tuning import DEFAULT, Config, Tuning
from support.ops import Call
from support.triton_guard import guarded, watch

WIDE: Mapping[str, Config] = {
    "conv.prefill": Config({"BT": 16, "BG": 4, "BC": 32}),
    "conv.prefill.float32": Config({"BT": 16, "BG": 4, "BC": 32}),
    "conv.decode": Config({"BC": 16}),
    "short_conv.prefill": Config({"BT": 16, "BG": 4, "BC": 32}),
    "short_conv.prefill.float32": Config({"BT": 16, "BG": 4, "BC": 32}),
    "short_conv.decode": Config({"BC": 16}),
    "delta_rule.decode": Config({"BV": 128}),
    "delta_rule.decode_fused": Config({"BV": 128}),
    "delta_rule.decode_fused.norm": Config({"BV": 128}),
    "delta_rule.decode_fused.channel": Config({"BV": 128}),
    "delta_rule.recurrent": Config({"BV": 128}),
    "delta_rule.walk": Config({"BV": 128}),
    "delta_rule.walk.float16": Config({"BV": 128}),
    "delta_rule.walk.wide": Config({"BV": 128}),
    "delta_rule.walk.float16.wide": Config({"BV": 128}),
    "conv.verify": Config({"BT": 4, "BC": 32}),
    "conv.commit": Config({"BC": 32}),
    "delta_rule.verify": Config({"BV": 128, "BK": 128}),
    "delta_rule.verify.long": Config({"BV": 128, "BK": 128}),
    "delta_rule.verify.cut": Config({"BV": 128, "BK": 128}),
    "delta_rule.verify.cut.long": Config({"BV": 128, "BK": 128}),
    "delta_rule.verify.float32": Config({"BV": 128, "BK": 128}),
    "delta_rule.verify.float32.long": Config({"BV": 128, "BK": 128}),
    "delta_rule.commit": Config({"BV": 128, "BG": 4}),
    "scan.decode": Config({"BP": 128}),
    "scan.decode.channel": Config({"BP": 128}),
    "scan.recurrent": Config({"BP": 128}),
    "scan.walk": Config({"BP": 128, "BT": 64, "BJ": 32}),
    "scan.walk.wide": Config({"BP": 128, "BT": 64}),
    "scan.walk.float16": Config({"BP": 128, "BT": 64}),
    "scan.walk.float16.wide": Config({"BP": 128, "BT": 32}),
    "scan.walk.float32": Config({"BP": 128, "BT": 32}),
    "scan.walk.float32.wide": Config({"BP": 128, "BT": 32}),
    "scan.verify": Config({"BP": 128}),
    "scan.verify.channel": Config({"BP": 128}),
    "scan.commit": Config({"BP": 128}),
    "scan.commit.channel": Config({"BP": 128}),
}
"""Tiles as large as a head, since a program costs the interpreter what a launch costs a GPU."""


def provider(blocks: Mapping[str, Config] | None = None, **layouts: str) -> TritonProvider:
    """A provider on CPU tensors; `blocks` replace entries of `WIDE`."""
    tuning = Tuning(DEFAULT, silu, silu, "tf32", {**WIDE, **(blocks or {})})
    return TritonProvider("cpu", {"layouts": layouts, "tuning": tuning})


def watched(call: Call) -> Call:
    """The call under the guard, on copies of its dense tensors with gaps of NaN around them."""

    def run(**args: Any) -> Tensor:
        apart = {n: guarded(v) if _is_free(v) else v for n, v in args.items()}
        with watch():
            result = call(**apart)
        for name, value in args.items():
            if apart[name] is not value:
                value.copy_(apart[name])
        return args["out"] if isinstance(args.get("out"), Tensor) else result

    return run


def _is_free(value: object) -> bool:
    """Whether a tensor can move: a view with holes is left, since its holes are watched anyway."""
    return isinstance(value, torch.Tensor) and value.is_contiguous() and value.numel() > 0
