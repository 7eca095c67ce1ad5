"""A provider that rounds what the oracle says: every layout, fused operations, narrow states."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal import interfaces, reference
from hal.runtime.checks import check_conv, check_delta, check_out, check_rows, check_same
from hal.testing.delta_cases import Delta
from hal.testing.fused_cases import _oracle
from hal.testing.rows import Rows
from hal_cpu.provider import TorchProvider


def _written(args: dict[str, Any]) -> list[int]:
    """The slots that a call has to write."""
    bounds = args.get("query_start_loc")
    src, dst = args["src"].tolist(), args["dst"].tolist()
    lengths = tuple([1] * len(src) if bounds is None else bounds.diff().tolist())
    rows = Rows(lengths, tuple(src), tuple(dst), tuple([0] * len(src)), 0)
    return [*rows.ends(args.get("track"))]


def _store(args: dict[str, Any], pools: dict[str, Tensor], result: Tensor, like: Tensor) -> Tensor:
    """Round result and states to where they belong; nothing else is written."""
    out = args.get("out")
    if out is None:
        out = torch.empty(result.shape, dtype=like.dtype)
    out.copy_(result)
    bounds = args.get("query_start_loc")
    if bounds is not None:
        out[int(bounds[-1]) :] = 0
    for name, pool in pools.items():
        for slot in _written(args):
            args[name][slot] = pool[slot].to(args[name].dtype)
    return out


def _given(args: dict[str, Any]) -> dict[str, Any]:
    dropped = ("self", "out", *(n for n in ("track",) if args.get("track") is None))
    return {name: value for name, value in args.items() if name not in dropped}


def signed(like: Callable[..., Any], run: Callable[[dict[str, Any]], Tensor]) -> Any:
    """A function with the Protocol's signature that hands its arguments over by name."""
    signature = inspect.signature(like)
    mine = signature.replace(parameters=[*signature.parameters.values()][1:])

    def call(*args: Any, **named: Any) -> Tensor:
        found = mine.bind(*args, **named)
        found.apply_defaults()
        return run(dict(found.arguments))

    call.__signature__ = mine  # type: ignore[attr-defined]
    return call


class Served:
    """An interface whose operations are set one by one."""


class OracleProvider(TorchProvider):
    """Serves conv, short conv and delta rule by the oracle, in any layout and state dtype."""

    def __init__(self, device: str, options: Any) -> None:
        layouts = {"conv": "CW", "recurrent": "VK", **options.get("layouts", {})}
        if unknown := [v for v in layouts.values() if v not in ("CW", "WC", "ring", "VK", "KV")]:
            raise ValueError(f"oracle: layout {unknown[0]}")
        self._conv, self._recurrent = layouts["conv"], layouts["recurrent"]
        self.conv, self.delta_rule, self.short_conv = Served(), Served(), Served()
        self.scan = self.conv_state = None
        for verb in ("prefill", "decode"):
            like = getattr(interfaces.Conv, verb)
            setattr(self.conv, verb, signed(like, self._of_conv(verb)))
            setattr(self.short_conv, verb, self._of_short_conv(verb))
            like = getattr(interfaces.DeltaRule, verb)
            setattr(self.delta_rule, verb, signed(like, self._of_delta(verb)))
            like = getattr(interfaces.DeltaRule, f"{verb}_fused")
            setattr(self.delta_rule, f"{verb}_fused", signed(like, self._of_fused(verb)))

    def _of_conv(self, verb: str) -> Callable[[dict[str, Any]], Tensor]:
        def run(args: dict[str, Any]) -> Tensor:
            name = f"conv.{verb}"
            check_conv(name, args["x"], args["weight"], args["bias"], args["state"], self._conv,
                       args["activation"], args["out"])  # fmt: skip
            _check(name, args, args["x"])
            oracle = getattr(reference, f"conv_{verb}")
            result, state = oracle(**_given(args), layout=self._conv)
            return _store(args, {"state": state}, result, args["x"])

        return run

    def _of_short_conv(self, verb: str) -> Callable[..., Tensor]:
        def run(**args: Any) -> Tensor:
            name = f"short_conv.{verb}"
            check_conv(name, args["x"], args["weight"], args["bias"], args["state"], self._conv,
                       None, args.get("out"))  # fmt: skip
            _check(name, args, args["x"])
            for gate in "BC":
                check_same(name, gate, args[gate], args["x"].dtype, "x")
            oracle = getattr(reference, f"short_conv_{verb}")
            result, state = oracle(**_given(args), layout=self._conv)
            return _store(args, {"state": state}, result, args["x"])

        return run

    def _of_delta(self, verb: str) -> Callable[[dict[str, Any]], Tensor]:
        def run(args: dict[str, Any]) -> Tensor:
            name = f"delta_rule.{verb}"
            inputs = [args[n] for n in ("q", "k", "v", "a", "b", "gate", "state")]
            check_delta(name, *inputs, self._recurrent, args["out"],
                        state_dtypes=frozenset({torch.float32, torch.bfloat16}))  # fmt: skip
            _check(name, args, args["q"])
            oracle = getattr(reference, f"delta_rule_{verb}")
            result, state = oracle(**_given(args), layout=self._recurrent)
            return _store(args, {"state": state}, result, args["v"])

        return run

    def _of_fused(self, verb: str) -> Callable[[dict[str, Any]], Tensor]:
        def run(args: dict[str, Any]) -> Tensor:
            name, x = f"delta_rule.{verb}_fused", args["mixed_qkv"]
            if x.dtype not in (torch.float32, torch.bfloat16):
                raise TypeError(f"{name}: mixed_qkv is {str(x.dtype).removeprefix('torch.')}")
            if args["state"].ndim != 4:
                raise ValueError(f"{name}: state has {args['state'].ndim} axes, expected 4")
            _check(name, args, x)
            heads, rows, columns = args["state"].shape[1:]
            K, V = (columns, rows) if self._recurrent == "VK" else (rows, columns)
            key_heads = (x.shape[1] - heads * V) // (2 * K)
            if verb == "decode" and args["conv_weight"].shape[0] != x.shape[1]:
                sizes = f"{x.shape[1]} channels, weight has {args['conv_weight'].shape[0]}"
                raise ValueError(f"{name}: mixed_qkv has {sizes}")
            check_out(name, args["out"], (len(x), heads, V), x.dtype)
            dims = Delta(
                key_heads, heads, K, V, args["gate"] and args["gate"].kind, args["a"].ndim == 3
            )
            layout = self._conv if verb == "decode" else ""
            result, pools = _oracle(dims, self._recurrent, layout)(**_given(args))
            return _store(args, pools, result, x)

        return run


def _check(name: str, args: dict[str, Any], tokens: Tensor) -> None:
    bounds = args.get("query_start_loc")
    others = [(index, args[index]) for index in ("dst", "start") if index in args]
    check_rows(name, tokens.shape[0], args["src"], others, bounds)
