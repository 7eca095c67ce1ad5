"""The operations as torch operators, so that a compiled graph holds them as opaque nodes.

One schema table, one namespace a provider and layout: two implementations under one name would
silently replace each other. Mutations stand in the schema, results are always new tensors, and a
fake gives the result's shape. Eager layers call the provider itself, which is cheaper.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.library import Library

from hal.interfaces import Gate
from hal.model.spec import GateKind

if TYPE_CHECKING:
    from hal.interfaces import Conv, DeltaRule, Provider

_ROWS: Final = "Tensor query_start_loc, SymInt max_len"
_CONV: Final = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state, Tensor src, Tensor dst, Tensor start"
)
_DELTA: Final = (
    "Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, str gate, Tensor? A_log, Tensor? dt_bias, "
    "float? lower_bound, float beta_scale, Tensor(a!) state, Tensor src, Tensor dst"
)
SCHEMAS: Final[Mapping[str, str]] = {
    "conv_prefill": f"({_CONV}, {_ROWS}, str? activation, Tensor? track) -> Tensor",
    "conv_decode": f"({_CONV}, str? activation) -> Tensor",
    "delta_rule_prefill": f"({_DELTA}, {_ROWS}, bool qk_l2norm, Tensor? track) -> Tensor",
    "delta_rule_decode": f"({_DELTA}, bool qk_l2norm) -> Tensor",
}
_READY: Final = "ready"
"""How the schema spells a gate of None: a is log decay and b is beta already."""


@dataclass(frozen=True, slots=True)
class Operators:
    """The operators of one provider; kept alive by this record, shared by its backends."""

    namespace: str
    library: Library

    def get(self, name: str) -> Callable[..., Tensor]:
        """One operator's default overload, which is the cheapest way to call it."""
        found: Callable[..., Tensor] = getattr(getattr(torch.ops, self.namespace), name).default
        return found


_REGISTERED: Final[dict[str, Operators]] = {}
_REGISTERING: Final = Lock()
"""Threads that bind layers at once register a namespace once."""


def operators(name: str, device: str, layouts: Mapping[str, str], provider: Provider) -> Operators:
    """Register a provider's operations once for its name, device and layouts."""
    words = [name, device, *(layouts[state] for state in sorted(layouts))]
    namespace = "hal_" + re.sub(r"\W", "_", "_".join(words))
    with _REGISTERING:
        if namespace not in _REGISTERED:
            _REGISTERED[namespace] = _register(namespace, provider)
    return _REGISTERED[namespace]


def _register(namespace: str, provider: Provider) -> Operators:
    library: Any = Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
    bodies: dict[str, Callable[..., Tensor]] = {}
    if provider.conv is not None:
        bodies |= _conv_bodies(provider.conv)
    if provider.delta_rule is not None:
        bodies |= _delta_bodies(provider.delta_rule)
    for name, body in bodies.items():
        library.define(name + SCHEMAS[name])
        library.impl(name, body, "CompositeExplicitAutograd")
        fake = _like_x if name.startswith("conv") else _like_v
        torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
    return Operators(namespace, library)


def _like_x(x: Tensor, *rest: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _like_v(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


def _conv_bodies(conv: Conv) -> dict[str, Callable[..., Tensor]]:
    def prefill(*given: Any) -> Tensor:
        *positional, activation, track = given
        return conv.prefill(*positional, activation=activation, track=track)

    def decode(*given: Any) -> Tensor:
        *positional, activation = given
        return conv.decode(*positional, activation=activation)

    return {"conv_prefill": prefill, "conv_decode": decode}


def _delta_bodies(rule: DeltaRule) -> dict[str, Callable[..., Tensor]]:
    def prefill(*given: Any) -> Tensor:
        *rest, qk_l2norm, track = given[10:]
        inputs = (*given[:5], _gate(*given[5:10]))
        return rule.prefill(*inputs, *rest, qk_l2norm=qk_l2norm, track=track)

    def decode(*given: Any) -> Tensor:
        *rest, qk_l2norm = given[10:]
        inputs: list[Any] = [*given[:5], _gate(*given[5:10]), *rest]
        return rule.decode(*inputs, qk_l2norm=qk_l2norm)

    return {"delta_rule_prefill": prefill, "delta_rule_decode": decode}


def _gate(
    kind: str, A_log: Tensor | None, dt_bias: Tensor | None, bound: float | None, scale: float
) -> Gate | None:
    if kind == _READY or A_log is None or dt_bias is None:
        return None
    return Gate(GateKind(kind), A_log, dt_bias, bound, scale)


def _flat(gate: Gate | None) -> tuple[str, Tensor | None, Tensor | None, float | None, float]:
    """A gate as a schema can carry it."""
    if gate is None:
        return _READY, None, None, None, 1.0
    return gate.kind.value, gate.A_log, gate.dt_bias, gate.lower_bound, gate.beta_scale


class OperatorConv:
    """A `Conv` whose calls are operators; `out` stays with the provider's own methods."""

    def __init__(self, found: Mapping[str, Operators]) -> None:
        self._prefill = found["prefill"].get("conv_prefill")
        self._decode = found["decode"].get("conv_decode")

    def prefill(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        src: Tensor,
        dst: Tensor,
        start: Tensor,
        query_start_loc: Tensor,
        max_len: int,
        *,
        activation: str | None = None,
        track: Tensor | None = None,
    ) -> Tensor:
        """As `Conv.prefill`."""
        return self._prefill(
            x, weight, bias, state, src, dst, start, query_start_loc, max_len, activation, track
        )

    def decode(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        src: Tensor,
        dst: Tensor,
        start: Tensor,
        *,
        activation: str | None = None,
    ) -> Tensor:
        """As `Conv.decode`."""
        return self._decode(x, weight, bias, state, src, dst, start, activation)


class OperatorDelta:
    """A `DeltaRule` whose prefill and decode are operators."""

    def __init__(self, found: Mapping[str, Operators]) -> None:
        self._prefill = found["prefill"].get("delta_rule_prefill")
        self._decode = found["decode"].get("delta_rule_decode")

    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        gate: Gate | None,
        state: Tensor,
        src: Tensor,
        dst: Tensor,
        query_start_loc: Tensor,
        max_len: int,
        *,
        qk_l2norm: bool = True,
        track: Tensor | None = None,
    ) -> Tensor:
        """As `DeltaRule.prefill`."""
        flat = _flat(gate)
        return self._prefill(
            q, k, v, a, b, *flat, state, src, dst, query_start_loc, max_len, qk_l2norm, track
        )

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        gate: Gate | None,
        state: Tensor,
        src: Tensor,
        dst: Tensor,
        *,
        qk_l2norm: bool = True,
    ) -> Tensor:
        """As `DeltaRule.decode`."""
        return self._decode(q, k, v, a, b, *_flat(gate), state, src, dst, qk_l2norm)
