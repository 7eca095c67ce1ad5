"""What a model asks of the hardware layer: layers, dims and attention, as frozen data.

Single letters follow the field: H and HV key and value heads, K and V their dims, W conv width,
P scan head dim, N scan state size, G scan groups, I inner width. All dims are those of the whole
model; `hal.sharding` cuts them for one tensor-parallel rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


class Kind(StrEnum):
    """What a layer holds; a layer may hold two (Falcon-H1: attention and scan in parallel)."""

    FULL_ATTENTION = "full_attention"
    SLIDING_ATTENTION = "sliding_attention"
    INDEXED_ATTENTION = "indexed_attention"
    GATED_DELTA_NET = "gated_delta_net"
    KIMI_DELTA = "kimi_delta"
    MAMBA2 = "mamba2"
    MAMBA1 = "mamba1"
    LIGHTNING = "lightning"
    SHORT_CONV = "short_conv"
    CCA = "cca"
    MULTI_SHORT_CONV = "multi_short_conv"
    RG_LRU = "rg_lru"
    MLP = "mlp"
    MOE = "moe"


ATTENTION_KINDS: Final = frozenset(
    {Kind.FULL_ATTENTION, Kind.SLIDING_ATTENTION, Kind.INDEXED_ATTENTION}
)
"""Kinds that stay the engine's: `hal` plans their memory and runs none of them."""

STATEFUL_KINDS: Final = frozenset(Kind) - ATTENTION_KINDS - {Kind.MLP, Kind.MOE}
"""Kinds that keep a conv or recurrent state, so that a provider has to serve them."""


class GateKind(StrEnum):
    """How a delta-rule layer makes its log decay from the raw projection; see contracts 4."""

    SCALAR = "scalar"
    CHANNEL = "channel"
    SAFE = "safe"


@dataclass(frozen=True, slots=True)
class DeltaDims:
    """A Gated DeltaNet or Kimi Delta layer. Conv channels are 2*H*K + HV*V in the order q, k, v."""

    H: int
    HV: int
    K: int
    V: int
    W: int
    gate: GateKind = GateKind.SCALAR
    beta_scale: float = 1.0
    lower_bound: float | None = None

    @property
    def segments(self) -> tuple[tuple[str, int], ...]:
        """The conv channels by name, in order; tensor parallelism cuts each by itself."""
        return (("q", self.H * self.K), ("k", self.H * self.K), ("v", self.HV * self.V))


@dataclass(frozen=True, slots=True)
class ScanDims:
    """A Mamba-2, Mamba-1 or lightning layer.

    Mamba-2: H heads of P, G groups of N. Mamba-1: H is 1 unless the family scans in heads (Zamba),
    and P = I / H. Lightning: one group a head, no conv (W = 0), N the key dim.
    """

    H: int
    P: int
    N: int
    G: int
    W: int
    conv_bias: bool = True
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    dt_rank: int | None = None
    norm_groups: int | None = None
    """Groups of the gated norm after the scan; None: no norm, z gates inside the scan."""

    @property
    def I(self) -> int:  # noqa: E743 - the field's name for the inner width
        """Inner width, H * P."""
        return self.H * self.P


@dataclass(frozen=True, slots=True)
class ShortConvDims:
    """A gated short convolution (LFM2, LFM3): `hidden` channels, the carry is W - 1 inputs."""

    hidden: int
    W: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class CcaDims:
    """ZAYA's convolution inside attention: (HQ + HKV) * D channels through two convs."""

    HQ: int
    HKV: int
    D: int
    time0: int
    time1: int
    hidden: int

    @property
    def channels(self) -> int:
        """Conv channels, raw q then raw k."""
        return (self.HQ + self.HKV) * self.D

    @property
    def carry(self) -> int:
        """Raw rows that the window keeps, over both convs."""
        return self.time0 - 1 + self.time1 - 1


Dims = DeltaDims | ScanDims | ShortConvDims | CcaDims


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The attention of a layer, for memory planning; the engine runs it.

    `latent` is the width of a compressed KV row (MLA: kv_lora_rank + rope dim); such a row is
    replicated over ranks. `window` bounds the tokens that a sliding layer keeps.
    """

    kind: Kind
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    latent: int | None = None

    def kv_bytes_per_token(self, dtype: str, tp: int = 1) -> int:
        """Bytes that one token of one request adds on one of `tp` ranks."""
        size = DTYPE_BYTES[dtype]
        if self.latent is not None:
            return self.latent * size
        return 2 * max(1, self.kv_heads // tp) * self.head_dim * size


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: its kinds, the dims of the stateful one, and its attention, if any.

    `kinds` without a dims record (`rg_lru`, `multi_short_conv`) are named only to be refused.
    """

    index: int
    kinds: tuple[Kind, ...]
    dims: Dims | None = None
    attention: AttentionSpec | None = None

    @property
    def stateful(self) -> Kind | None:
        """The kind that keeps a state for `hal` to serve, or None."""
        return next((kind for kind in self.kinds if kind in STATEFUL_KINDS), None)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as the hardware layer sees it; equal for the object, dict and path of one model.

    `model_type` is that of the text config, which may sit inside a wrapper. `dtype` is the one the
    checkpoint was saved in ("float32" where the config names none). `state_dtype` is the recurrent
    state's where the config names one, else None.
    """

    model_type: str
    layers: tuple[LayerSpec, ...]
    dtype: str
    vocab_size: int
    hidden_size: int
    state_dtype: str | None = None

    def stateful_layers(self) -> Iterator[LayerSpec]:
        """The layers that a provider has to serve, in order."""
        return (layer for layer in self.layers if layer.stateful is not None)

    def count(self, kind: Kind) -> int:
        """How many layers hold `kind`."""
        return sum(kind in layer.kinds for layer in self.layers)
