"""Cut a model's linear layers for tensor parallelism, or say why they do not cut."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from hal.model.spec import CcaDims, DeltaDims, Dims, Kind, LayerSpec, ModelSpec, ScanDims
from hal.options import Shard
from hal_registry import Code, Reason

LABELS: Final = {
    Kind.GATED_DELTA_NET: "Gated DeltaNet",
    Kind.KIMI_DELTA: "Kimi Delta Attention",
    Kind.MAMBA2: "Mamba-2",
    Kind.MAMBA1: "Mamba-1",
    Kind.LIGHTNING: "lightning",
    Kind.SHORT_CONV: "short-conv",
    Kind.CCA: "CCA",
    Kind.MULTI_SHORT_CONV: "multi-short-conv",
    Kind.RG_LRU: "RG-LRU",
}
"""What people call a kind, in reasons."""

MAX_SIZE: Final = 64
"""The largest parallel size that a fix suggests."""


def shard_reasons(model: ModelSpec, size: int) -> tuple[Reason, ...]:
    """Why the stateful layers cannot be cut into `size` parts; empty where they can."""
    different = {(layer.stateful, layer.dims): layer for layer in model.stateful_layers()}
    uneven = [(layer, *pair) for layer in different.values() for pair in _uneven(layer, size)]
    if not uneven:
        return ()
    most = max(value for _, _, value in uneven)
    fits = [n for n in range(1, min(most, MAX_SIZE) + 1) if not _any_uneven(different.values(), n)]
    found = (_reason(layer, what, value, size, fits) for layer, what, value in uneven)
    return tuple(dict.fromkeys(found))


def _any_uneven(layers: Iterable[LayerSpec], size: int) -> bool:
    return any(True for layer in layers for _ in _uneven(layer, size))


def _reason(layer: LayerSpec, what: str, value: int, size: int, fits: Sequence[int]) -> Reason:
    kind = layer.stateful
    return Reason(
        Code.SHARD_UNSUPPORTED,
        subject=LABELS[kind] if kind else "layer",
        needed=f"tensor parallel size {size}",
        offered=f"{value} {what}",
        fix=f"use a size of {', '.join(map(str, fits))}",
    )


def _uneven(layer: LayerSpec, size: int) -> Iterator[tuple[str, int]]:
    """The counts that `size` does not divide, by name."""
    for what, value in _counts(layer, size):
        if value % size:
            yield what, value


def _counts(layer: LayerSpec, size: int) -> Iterator[tuple[str, int]]:
    dims = layer.dims
    if isinstance(dims, DeltaDims):
        yield from (("key heads", dims.H), ("value heads", dims.HV))
    elif isinstance(dims, CcaDims):
        yield from (("query heads", dims.HQ), ("key-value heads", dims.HKV))
    elif isinstance(dims, ScanDims):
        yield from _scan_counts(layer, dims, size)
    elif dims is not None:
        yield "channels", dims.hidden


def _scan_counts(layer: LayerSpec, dims: ScanDims, size: int) -> Iterator[tuple[str, int]]:
    """What has to divide; whole groups or heads may span ranks where those are a multiple."""
    if layer.stateful is Kind.MAMBA1:
        yield "channels", dims.I
        if size % dims.H:
            yield "heads", dims.H
        return
    yield "heads", dims.H
    if layer.stateful is Kind.MAMBA2 and size % dims.G:
        yield "groups", dims.G
    if dims.norm_groups not in (None, dims.G) and size % dims.norm_groups:
        yield "norm groups", dims.norm_groups


def shard(dims: Dims, size: int) -> Dims:
    """The dims of one rank; `shard_reasons` has said that they cut."""
    if isinstance(dims, DeltaDims):
        return replace(dims, H=dims.H // size, HV=dims.HV // size)
    if isinstance(dims, CcaDims):
        return replace(dims, HQ=dims.HQ // size, HKV=dims.HKV // size)
    if isinstance(dims, ScanDims):
        heads = max(1, dims.H // size)
        norm = None if dims.norm_groups is None else max(1, dims.norm_groups // size)
        channels, groups = dims.I // size, max(1, dims.G // size)
        return replace(dims, H=heads, P=channels // heads, G=groups, norm_groups=norm)
    return replace(dims, hidden=dims.hidden // size)


def norm_span(dims: Dims, size: int) -> int:
    """How many neighbouring ranks share a group of the norm after the scan; 1: none is cut."""
    if not isinstance(dims, ScanDims) or dims.norm_groups is None:
        return 1
    return max(1, size // dims.norm_groups)


def offset(local: int, whole: int, shard: Shard) -> int:
    """Where a rank's `local` part of a segment of `whole` begins.

    A segment that has fewer parts than there are ranks (a group of B and C) is held by as many
    neighbours as share its heads.
    """
    return shard.rank * (whole // local) // shard.size * local
