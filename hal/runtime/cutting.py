"""A rank's part of a layer's weights, cut from those of the whole model.

An engine that loads sharded weights needs none of this. One that has them whole gets of
every tensor just the part that `hal.sharding` plans: convolutions segment by segment, never as one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, overload

import torch

from hal.model.spec import CcaDims, DeltaDims, ScanDims, ShortConvDims
from hal.runtime.params import CcaParams, DeltaParams, ScanParams, ShortConvParams
from hal.sharding import offset

if TYPE_CHECKING:
    from torch import Tensor

    from hal.options import Shard
    from hal.runtime.params import LayerParams
    from hal.selection import Selection

_PARAMS: Final[dict[type, type]] = {
    CcaDims: CcaParams,
    DeltaDims: DeltaParams,
    ScanDims: ScanParams,
    ShortConvDims: ShortConvParams,
}
"""The weights of a layer by its dims."""

Sizes = tuple[tuple[int, int], ...]
"""Of each segment the rank's own size and the whole model's."""


@overload
def cut_params(selection: Selection, layer_id: int, params: DeltaParams) -> DeltaParams: ...


@overload
def cut_params(selection: Selection, layer_id: int, params: ScanParams) -> ScanParams: ...


@overload
def cut_params(selection: Selection, layer_id: int, params: ShortConvParams) -> ShortConvParams: ...


@overload
def cut_params(selection: Selection, layer_id: int, params: CcaParams) -> CcaParams: ...


def cut_params(selection: Selection, layer_id: int, params: LayerParams) -> LayerParams:
    """The weights of one layer for the rank that the selection was made for, copied."""
    return _Cutter(selection, layer_id).cut(params)


class _Cutter:
    """One layer's segments on one rank."""

    def __init__(self, selection: Selection, layer_id: int) -> None:
        self._shard: Shard = selection.options.tp
        self._layer = layer_id
        states = {spec.name: spec for spec in selection.states if spec.layer == layer_id}
        if not states:
            kept = sorted({spec.layer for spec in selection.states})
            raise ValueError(f"layer {layer_id} keeps no state; layers {kept} do")
        layers = {layer.index: layer for layer in selection.model.stateful_layers()}
        self._wanted = _PARAMS[type(layers[layer_id].dims)]
        self._sizes: dict[str, Sizes] = {
            name: tuple((own, whole) for _, own, whole in spec.sizes)
            for name, spec in states.items()
        }

    def cut(self, params: LayerParams) -> LayerParams:
        """Each tensor by the rule of its axis; a norm over the value dim is on every rank."""
        if not isinstance(params, self._wanted):
            wanted, given = self._wanted.__name__, type(params).__name__
            raise TypeError(
                f"layer {self._layer}: got {given}, expected {wanted} of the whole model"
            )
        if isinstance(params, DeltaParams):
            return self._delta(params)
        if isinstance(params, ScanParams):
            return self._scan(params)
        if isinstance(params, ShortConvParams):
            return ShortConvParams(self._conv(params.weight), self._maybe(params.bias))
        return CcaParams(
            self._conv(params.depthwise_weight),
            self._maybe(params.depthwise_bias),
            self._conv(params.grouped_weight),
            self._maybe(params.grouped_bias),
        )

    def _delta(self, params: DeltaParams) -> DeltaParams:
        gate = params.gate
        if gate is not None:
            heads = self._sizes["recurrent"]
            rates, shifts = self._parts(gate.A_log, heads), self._parts(gate.dt_bias, heads)
            gate = replace(gate, A_log=rates, dt_bias=shifts)
        weight, bias = self._conv(params.conv_weight), self._maybe(params.conv_bias)
        return replace(params, conv_weight=weight, conv_bias=bias, gate=gate)

    def _scan(self, params: ScanParams) -> ScanParams:
        """Rates by head or channel, as the state; the norm by the channels of x."""
        rates, norm = self._sizes["scan"], params.norm_weight
        if "conv" not in self._sizes and (norm is not None or params.conv_weight is not None):
            raise ValueError(
                f"layer {self._layer}: got a conv or norm weight, the layer is a scan alone"
            )
        return replace(
            params,
            conv_weight=self._maybe(params.conv_weight),
            conv_bias=self._maybe(params.conv_bias),
            A_log=self._parts(params.A_log, rates),
            D=None if params.D is None else self._parts(params.D, rates),
            dt_bias=None if params.dt_bias is None else self._parts(params.dt_bias, rates),
            norm_weight=None if norm is None else self._parts(norm, self._sizes["conv"][:1]),
        )

    def _maybe(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else self._conv(tensor)

    def _conv(self, tensor: Tensor) -> Tensor:
        """The rank's channels of a convolution, axis 0."""
        return self._parts(tensor, self._sizes["conv"])

    def _parts(self, tensor: Tensor, sizes: Sizes) -> Tensor:
        """Axis 0, the rank's share of every segment."""
        expected = sum(whole for _, whole in sizes)
        if tensor.shape[0] != expected:
            raise ValueError(
                f"layer {self._layer}: a weight is {list(tensor.shape)}, "
                f"expected {expected} of the whole model along its first axis"
            )
        segments = tensor.split_with_sizes([whole for _, whole in sizes])
        parts = [
            segment.narrow(0, offset(own, whole, self._shard), own)
            for segment, (own, whole) in zip(segments, sizes, strict=True)
        ]
        return torch.cat(parts)
