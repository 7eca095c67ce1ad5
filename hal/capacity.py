"""What a request costs, how many fit, and how fast memory lets them decode; arithmetic alone."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Final

from hal.model.spec import ModelSpec
from hal.states import StateSpec
from hal.weights import WeightBytes

RESERVE: Final = 0.1
"""Share of the memory that stays free for activations, the runtime and fragmentation."""

LINKS: Final = 8
"""Bytes beside a snapshot that say where on which path it is: two int32."""


@dataclass(frozen=True, slots=True)
class Load:
    """A model as it is served on one of `tp` ranks, for requests of `context` tokens.

    `expert_share` is the share of routed experts that one token reads at least.
    """

    model: ModelSpec
    states: Sequence[StateSpec]
    dtype: str
    tp: int
    context: int
    verify_width: int = 0
    weights: WeightBytes | None = None
    expert_share: float = 1.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """Bytes of one request on one rank, and the requests that fit; None is unknown.

    `scratch` is an upper bound: at each verify position a snapshot of every state, with its place
    in the path. It is in float32, which providers keep beside states of two bytes too.
    """

    kv: int
    kv_per_token: int
    state: int
    scratch: int
    weights: int | None
    requests: int | None

    @property
    def request(self) -> int:
        """All bytes of a request."""
        return self.kv + self.state + self.scratch

    def to_dict(self) -> dict[str, object]:
        """The plan as plain data."""
        return {**asdict(self), "request": self.request}


def capacity(load: Load, memory: int | None) -> Capacity:
    """The bytes of a request and, where memory and weights are known, how many fit."""
    state = sum(spec.bytes for spec in load.states)
    scratch = load.verify_width * sum(map(_snapshot, load.states))
    weights = None if load.weights is None else -(-load.weights.total // load.tp)
    requests = None
    if memory is not None and weights is not None:
        free = int(memory * (1 - RESERVE)) - weights - state  # slot 0 is reserved
        requests = max(0, free // max(1, kv_bytes(load) + state + scratch))
    return Capacity(
        kv_bytes(load), _kv_per_token(load, load.context), state, scratch, weights, requests
    )


def _snapshot(spec: StateSpec) -> int:
    """What a verify keeps of one state at one position, at most, links of the path included."""
    return 4 * prod(spec.shape) + LINKS


def kv_bytes(load: Load) -> int:
    """KV bytes of a request at the context's end; a sliding layer keeps its window."""
    return sum(
        layer.attention.kv_bytes_per_token(load.dtype, load.tp)
        * min(load.context, layer.attention.window or load.context)
        for layer in load.model.layers
        if layer.attention is not None
    )


def _kv_per_token(load: Load, position: int) -> int:
    """KV bytes that the next token adds: layers whose window is full add none."""
    return sum(
        layer.attention.kv_bytes_per_token(load.dtype, load.tp)
        for layer in load.model.layers
        if layer.attention is not None and (layer.attention.window or position) >= position
    )


def decode_bound(load: Load, batch: int, bandwidth: int) -> float | None:
    """Decode tokens a second that memory bandwidth allows at most; None without the weights.

    A step reads the weights once, and of every request its KV; states are read and written. Of
    routed experts only what a single token needs is counted, so that the bound holds for any
    routing.
    """
    if load.weights is None:
        return None
    dense = load.weights.total - load.weights.experts - load.weights.embedding
    weights = (dense + load.weights.experts * load.expert_share) / load.tp
    state = sum(spec.bytes for spec in load.states)
    return batch * bandwidth / (weights + batch * (kv_bytes(load) + 2 * state))
