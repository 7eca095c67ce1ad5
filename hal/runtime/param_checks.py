"""Weights against a model's dims, checked once at bind; every message shows both sizes."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from hal.model.spec import GateKind
from hal.runtime.params import named_tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hal.model.spec import CcaDims, DeltaDims, ScanDims
    from hal.runtime.params import CcaParams, DeltaParams, LayerParams, ScanParams


def check_weight(layer_id: int, name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
    """Refuse a weight of another shape and an integer one; None is absent."""
    if tensor is None:
        return
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"layer {layer_id}: {name} is {list(tensor.shape)}, expected {list(shape)}"
        )
    if not tensor.is_floating_point():
        raise TypeError(f"layer {layer_id}: {name} is {tensor.dtype}, expected a float dtype")


def check_placed(layer_id: int, params: LayerParams, place: torch.device) -> None:
    """Refuse a weight that is not where the layer's states are, as one of the meta device."""
    for name, tensor in named_tensors(params):
        if tensor.device != place:
            raise ValueError(
                f"layer {layer_id}: {name} is on {tensor.device}, expected {place}; "
                f"move the layer there before it is bound"
            )


def check_delta(layer_id: int, dims: DeltaDims, params: DeltaParams, ready_gates: bool) -> None:
    """The gate is of the model's kind and shape, and so is the output norm."""
    check_weight(layer_id, "norm_weight", params.norm_weight, (dims.V,))
    _check_eps(layer_id, params.norm_eps)
    gate = params.gate
    if gate is None:
        if not ready_gates:
            raise ValueError(
                f"layer {layer_id}: gate is None, expected a {dims.gate} gate; "
                f"a caller that makes log decay and beta itself selects with ready_gates"
            )
        return
    if gate.kind is not dims.gate:
        raise ValueError(f"layer {layer_id}: got a {gate.kind} gate, the model has {dims.gate}")
    bias = (dims.HV,) if dims.gate is GateKind.SCALAR else (dims.HV, dims.K)
    check_weight(layer_id, "A_log", gate.A_log, (dims.HV,))
    check_weight(layer_id, "dt_bias", gate.dt_bias, bias)


def check_scan(layer_id: int, dims: ScanDims, params: ScanParams) -> None:
    """Rates, skip and dt bias have the shapes of the kind: by head, or by channel for Mamba-1."""
    by_channel = dims.dt_rank is not None
    count = dims.I if by_channel else dims.H
    check_weight(layer_id, "A_log", params.A_log, (count, dims.N) if by_channel else (count,))
    for name, tensor in (("D", params.D), ("dt_bias", params.dt_bias)):
        check_weight(layer_id, name, tensor, (count,))
    check_weight(layer_id, "norm_weight", params.norm_weight, (dims.I,))
    _check_eps(layer_id, params.norm_eps)
    if params.norm_weight is not None and dims.norm_groups is None:
        raise ValueError(
            f"layer {layer_id}: norm_weight is {list(params.norm_weight.shape)}, but the model has "
            f"no norm after the scan, so that its groups are unknown; bind without it"
        )
    if dims.W and params.conv_weight is None:
        raise ValueError(f"layer {layer_id}: conv weight is missing, width is {dims.W}")


def check_cca(layer_id: int, dims: CcaDims, params: CcaParams) -> None:
    """Both convolutions have the model's channels, groups and widths."""
    channels = (dims.channels,)
    for name, tensor, shape in (
        ("depthwise weight", params.depthwise_weight, (*channels, dims.time0)),
        ("depthwise bias", params.depthwise_bias, channels),
        ("grouped weight", params.grouped_weight, (*channels, dims.D, dims.time1)),
        ("grouped bias", params.grouped_bias, channels),
    ):
        check_weight(layer_id, name, tensor, shape)


def _check_eps(layer_id: int, eps: float) -> None:
    if not (isfinite(eps) and eps >= 0):
        raise ValueError(f"layer {layer_id}: norm_eps is {eps}, expected a finite number >= 0")
