"""Pools of several ranks for one model, and the whole model's state spelt out by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hal.model.spec import CcaDims, DeltaDims, Kind, ScanDims
from hal.options import Shard
from hal.runtime.pool import Pool
from hal.states import StateFormat, plan_states

if TYPE_CHECKING:
    from torch import Tensor

    from hal.model.spec import LayerSpec, ModelSpec

FORM = StateFormat({"conv": "CW", "recurrent": "VK", "scan": "PN"}, "float32", "float32")

Whole = dict[tuple[int, str], dict[str, "Tensor"]]
"""By layer and state, every segment of the whole model, its cut axis first."""


def pools(model: ModelSpec, size: int, form: StateFormat = FORM, slots: int = 3) -> list[Pool]:
    """A pool a rank, each full of NaN."""
    made = [
        Pool(plan_states(model, size, form), slots, torch.device("cpu"), Shard(rank, size))
        for rank in range(size)
    ]
    for pool in made:
        for spec in pool.states:
            pool.tensors(spec.layer)[spec.name].fill_(float("nan"))
    return made


def whole_state(model: ModelSpec, dtype: torch.dtype = torch.float32) -> Whole:
    """A state in which every channel and head is another number, so that none can be mistaken."""
    found: Whole = {}
    for layer in model.stateful_layers():
        for name, segments in _shapes(layer).items():
            held = found.setdefault((layer.index, name), {})
            for segment, shape in segments.items():
                held[segment] = torch.randn(shape).to(dtype)
    return found


def _shapes(layer: LayerSpec) -> dict[str, dict[str, tuple[int, ...]]]:
    dims = layer.dims
    if isinstance(dims, DeltaDims):
        conv = {"q": dims.H * dims.K, "k": dims.H * dims.K, "v": dims.HV * dims.V}
        return {
            "conv": {name: (size, dims.W - 1) for name, size in conv.items()},
            "recurrent": {"v_heads": (dims.HV, dims.V, dims.K)},
        }
    if isinstance(dims, CcaDims):
        taps = dims.time0 + dims.time1 - 2
        return {
            "conv": {"q": (dims.HQ * dims.D, taps), "k": (dims.HKV * dims.D, taps)},
            "hidden": {"hidden": (dims.hidden,)},
        }
    if isinstance(dims, ScanDims):
        return _scan_shapes(layer, dims)
    assert dims is not None
    return {"conv": {"x": (dims.hidden, dims.W - 1)}}


def _scan_shapes(layer: LayerSpec, dims: ScanDims) -> dict[str, dict[str, tuple[int, ...]]]:
    if layer.stateful is Kind.MAMBA1:
        channels = dims.H * dims.P
        return {
            "conv": {"x": (channels, dims.W - 1)},
            "scan": {"channels": (channels, dims.N)},
        }
    scan = {"scan": {"heads": (dims.H, dims.P, dims.N)}}
    if not dims.W:
        return scan
    sizes = {"x": dims.H * dims.P, "B": dims.G * dims.N, "C": dims.G * dims.N}
    return {"conv": {name: (size, dims.W - 1) for name, size in sizes.items()}, **scan}


def part_of(whole: Tensor, name: str, layer: LayerSpec, rank: int, size: int) -> Tensor:
    """One rank's part of a segment, by the families' rules and not by the plan's numbers."""
    dims = layer.dims
    if name == "hidden":
        return whole
    if name in ("B", "C") and isinstance(dims, ScanDims):
        heads = dims.H // size
        first, last = rank * heads, (rank + 1) * heads - 1
        groups = sorted({head // (dims.H // dims.G) for head in range(first, last + 1)})
        return torch.cat([whole[g * dims.N : (g + 1) * dims.N] for g in groups])
    return whole.tensor_split(size)[rank]


def fill(pool: Pool, model: ModelSpec, whole: Whole, slot: int, start: int) -> None:
    """Put a rank's part of the whole state into one slot, in the pool's own layout."""
    layers = {layer.index: layer for layer in model.stateful_layers()}
    for spec in pool.states:
        shard = pool.shard
        part = torch.cat(
            [
                part_of(values, name, layers[spec.layer], shard.rank, shard.size)
                for name, values in whole[spec.layer, spec.name].items()
            ]
        )
        held = pool.tensors(spec.layer)[spec.name][slot]
        match spec.layout:
            case "ring":
                taps = part.shape[1]
                for age in range(1, taps + 1):
                    held[(start - age) % (taps + 1)] = part[:, taps - age]
            case "WC":
                held.copy_(part.T)
            case "KV":
                held.copy_(part.movedim(1, 2))
            case _:
                held.copy_(part)


def slot_bits(pool: Pool, slot: int) -> list[Tensor]:
    """Every byte of a slot."""
    return [
        pool.tensors(spec.layer)[spec.name][slot].clone().view(torch.uint8) for spec in pool.states
    ]
