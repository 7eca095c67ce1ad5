"""The plan of states: for every layer and rank its tensors, their shapes, layouts and bytes."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import prod

from hal.model.spec import (
    DTYPE_BYTES,
    CcaDims,
    DeltaDims,
    Dims,
    Kind,
    LayerSpec,
    ModelSpec,
    ScanDims,
)
from hal.sharding import shard

Segments = tuple[tuple[str, int, int | None], ...]


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One state tensor of one layer on one rank, without the slot axis.

    `segments` cut the sharded axis: (name, size, the axis or None where every rank holds it all).
    A state moves between parallel sizes segment by segment, never as one block. `whole` are the
    segments' sizes over all ranks; where a rank's own is more than its share, ranks hold the same.
    """

    layer: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    segments: Segments
    whole: tuple[int, ...] = ()

    @property
    def sizes(self) -> tuple[tuple[str, int, int], ...]:
        """Every segment's name, its size on this rank and over all ranks."""
        whole = self.whole or tuple(size for _, size, _ in self.segments)
        return tuple((s[0], s[1], total) for s, total in zip(self.segments, whole, strict=True))

    @property
    def bytes(self) -> int:
        """Bytes of one slot."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    def to_dict(self) -> dict[str, object]:
        """The plan entry as plain data."""
        return {**asdict(self), "bytes": self.bytes}


@dataclass(frozen=True, slots=True)
class StateFormat:
    """How the chosen providers keep states: layout by state, act and recurrent dtypes."""

    layouts: Mapping[str, str]
    dtype: str
    state_dtype: str


def plan_states(model: ModelSpec, size: int, form: StateFormat) -> tuple[StateSpec, ...]:
    """The states of every stateful layer for one rank of `size`."""
    return tuple(
        replace(spec, whole=tuple(whole for _, whole, _ in full.segments))
        for layer in model.stateful_layers()
        if layer.dims is not None
        for spec, full in zip(
            _layer_states(layer, shard(layer.dims, size), form),
            _layer_states(layer, layer.dims, form),
            strict=True,
        )
    )


def _layer_states(layer: LayerSpec, dims: Dims, form: StateFormat) -> Iterator[StateSpec]:
    if isinstance(dims, DeltaDims):
        yield _conv(layer, dims.segments, dims.W - 1, form)
        yield _recurrent(layer, dims, form)
    elif isinstance(dims, ScanDims):
        if dims.W:
            yield _conv(layer, _scan_segments(layer, dims), dims.W - 1, form, _whole(layer))
        yield _scan(layer, dims, form)
    elif isinstance(dims, CcaDims):
        heads = (("q", dims.HQ * dims.D), ("k", dims.HKV * dims.D))
        yield _conv(layer, heads, dims.carry, form)
        whole = (("hidden", dims.hidden, None),)
        yield StateSpec(layer.index, "hidden", (dims.hidden,), form.dtype, "", whole)
    else:
        yield _conv(layer, (("x", dims.hidden),), dims.W - 1, form)


def _conv(
    layer: LayerSpec,
    segments: tuple[tuple[str, int], ...],
    carry: int,
    form: StateFormat,
    whole: tuple[str, ...] = (),
) -> StateSpec:
    channels, layout = sum(size for _, size in segments), form.layouts["conv"]
    shape = {
        "CW": (channels, carry),
        "WC": (carry, channels),
        "ring": (carry + 1, channels),
    }[layout]
    axis = 0 if layout == "CW" else 1
    named = tuple((name, size, None if name in whole else axis) for name, size in segments)
    return StateSpec(layer.index, "conv", shape, form.dtype, layout, named)


def _recurrent(layer: LayerSpec, dims: DeltaDims, form: StateFormat) -> StateSpec:
    layout = form.layouts["recurrent"]
    tail = (dims.V, dims.K) if layout == "VK" else (dims.K, dims.V)
    heads = (("v_heads", dims.HV, 0),)
    return StateSpec(layer.index, "recurrent", (dims.HV, *tail), form.state_dtype, layout, heads)


def _scan(layer: LayerSpec, dims: ScanDims, form: StateFormat) -> StateSpec:
    flat = layer.stateful is Kind.MAMBA1
    shape = (dims.I, dims.N) if flat else (dims.H, dims.P, dims.N)
    segments = (("channels", dims.I, 0),) if flat else (("heads", dims.H, 0),)
    return StateSpec(layer.index, "scan", shape, form.state_dtype, form.layouts["scan"], segments)


def _scan_segments(layer: LayerSpec, dims: ScanDims) -> tuple[tuple[str, int], ...]:
    """Mamba-1 convolves x alone, Mamba-2 x, B and C side by side."""
    if layer.stateful is Kind.MAMBA1:
        return (("x", dims.I),)
    return (("x", dims.I), ("B", dims.G * dims.N), ("C", dims.G * dims.N))


def _whole(layer: LayerSpec) -> tuple[str, ...]:
    """The segments that every rank holds: B and C of a model with one group."""
    return ("B", "C") if isinstance(layer.dims, ScanDims) and layer.dims.G == 1 else ()
