"""The CPU provider with fused operations, which are its own pieces one after the other."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hal.interfaces import Gate
from hal.model.spec import GateKind
from hal.runtime.gates import gated_norm
from hal_cpu.provider import TorchProvider

CALLS: list[str] = []
"""The fused operations that ran, in order."""


class FusedRule:
    """A delta rule that also runs the split, the conv of a decode step and the gated norm."""

    def __init__(self, provider: TorchProvider) -> None:
        self._conv, self._rule = provider.conv, provider.delta_rule
        self.prefill, self.decode = self._rule.prefill, self._rule.decode
        self.verify, self.commit = self._rule.verify, self._rule.commit

    def decode_fused(
        self,
        mixed_qkv: Tensor,
        a: Tensor,
        b: Tensor,
        conv_weight: Tensor,
        conv_bias: Tensor | None,
        activation: str | None,
        gate: Gate | None,
        conv_state: Tensor,
        state: Tensor,
        src: Tensor,
        dst: Tensor,
        start: Tensor,
        *,
        z: Tensor | None = None,
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-6,
        out: Tensor | None = None,
    ) -> Tensor:
        CALLS.append("decode")
        mixed = self._conv.decode(
            mixed_qkv, conv_weight, conv_bias, conv_state, src, dst, start, activation=activation
        )
        o = self._rule.decode(*_split(mixed, state), a, b, gate, state, src, dst)
        return _norm(o, z, norm_weight, norm_eps, (src < 0) & (dst < 0))

    def prefill_fused(
        self,
        mixed_qkv: Tensor,
        a: Tensor,
        b: Tensor,
        gate: Gate | None,
        state: Tensor,
        src: Tensor,
        dst: Tensor,
        query_start_loc: Tensor,
        max_len: int,
        *,
        z: Tensor | None = None,
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-6,
        out: Tensor | None = None,
        track: Tensor | None = None,
    ) -> Tensor:
        CALLS.append("prefill")
        rows: tuple[Any, ...] = (src, dst, query_start_loc, max_len)
        o = self._rule.prefill(*_split(mixed_qkv, state), a, b, gate, state, *rows, track=track)
        pads = torch.arange(o.shape[0]) >= query_start_loc[-1]
        return _norm(o, z, norm_weight, norm_eps, pads)


def _split(mixed: Tensor, state: Tensor) -> list[Tensor]:
    _, heads, V, K = state.shape
    key = (mixed.shape[1] - heads * V) // 2
    parts = mixed.split([key, key, heads * V], dim=-1)
    return [part.unflatten(1, (-1, dim)) for part, dim in zip(parts, (K, K, V), strict=True)]


def _norm(o: Tensor, z: Tensor | None, weight: Tensor | None, eps: float, pads: Tensor) -> Tensor:
    if z is None or weight is None:
        return o
    return gated_norm(o, z, weight, eps, GateKind.SCALAR).masked_fill(pads.view(-1, 1, 1), 0)


class FusedProvider(TorchProvider):
    """The CPU provider, fused."""

    def __init__(self, device: str, options: Mapping[str, object]) -> None:
        super().__init__(device, options)
        self.delta_rule = FusedRule(self)  # type: ignore[assignment]
