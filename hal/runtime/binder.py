"""Bind a layer's weights to the providers' operations and the pool's tensors, once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch

from hal.errors import HalError
from hal.model.spec import CcaDims, DeltaDims, ScanDims, ShortConvDims
from hal.runtime.cca_layer import CcaLayer
from hal.runtime.layers import BoundConv, Current, DeltaLayer, Draft, ShortConvLayer
from hal.runtime.params import CcaParams, DeltaParams, LayerParams, ScanParams, ShortConvParams
from hal.runtime.scan_layer import ScanLayer
from hal.sharding import shard
from hal_registry import interface_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from hal.interfaces import Conv, ConvState, DeltaRule, Provider, Scan
    from hal.model.spec import Dims
    from hal.runtime.pool import Pool
    from hal.selection import Selection

Layer = DeltaLayer | ShortConvLayer | ScanLayer | CcaLayer


@dataclass(frozen=True, slots=True)
class Binder:
    """What layers of one backend share: the selection, its providers, the pool and the step."""

    selection: Selection
    providers: Mapping[str, Provider]
    pool: Pool
    current: Current
    max_batch: int

    def layer(self, layer_id: int, params: LayerParams) -> Layer:
        """Check the weights against the model's dims and bind them."""
        dims = self._dims(layer_id)
        if isinstance(dims, DeltaDims) and isinstance(params, DeltaParams):
            return self._delta(layer_id, dims, params)
        if isinstance(dims, ShortConvDims) and isinstance(params, ShortConvParams):
            return self._short_conv(layer_id, dims, params)
        if isinstance(dims, ScanDims) and isinstance(params, ScanParams):
            return self._scan(layer_id, dims, params)
        if isinstance(dims, CcaDims) and isinstance(params, CcaParams):
            return self._cca(layer_id, dims, params)
        raise TypeError(f"layer {layer_id} is {type(dims).__name__}, got {type(params).__name__}")

    def sidecar(self) -> ConvState | None:
        """The conv-state sidecar with the pool's tensors, where a layer kind needs it."""
        if "conv_state.step" not in self.selection.choices:
            return None
        sidecar = cast("ConvState", self._interface("conv_state.step"))
        layers = {spec.layer for spec in self.selection.states}
        sidecar.attach({layer: tuple(self.pool.tensors(layer).values()) for layer in layers})
        return sidecar

    def _dims(self, layer_id: int) -> Dims:
        layers = {layer.index: layer for layer in self.selection.model.stateful_layers()}
        layer = layers.get(layer_id)
        if layer is None or layer.dims is None:
            raise ValueError(f"layer {layer_id} keeps no state; layers {sorted(layers)} do")
        return shard(layer.dims, self.selection.options.tp.size)

    def _delta(self, layer_id: int, dims: DeltaDims, params: DeltaParams) -> DeltaLayer:
        offers = [
            self.selection.choices[op].candidate.manifest.offers[op].gates
            for op in ("delta_rule.prefill", "delta_rule.decode", "delta_rule.verify")
            if op in self.selection.choices
        ]
        return DeltaLayer(
            self.current,
            dims,
            params,
            self._conv(layer_id, params.conv_weight, params.conv_bias, dims.W, "silu"),
            cast("DeltaRule", self._interface("delta_rule.prefill")),
            cast("DeltaRule", self._interface("delta_rule.decode")),
            self.pool.tensors(layer_id)["recurrent"],
            fuses_gate=all(dims.gate.value in gates for gates in offers),
            verify=cast("DeltaRule | None", self._verifier("delta_rule")),
            draft=self._draft(layer_id, "delta_rule"),
        )

    def _short_conv(
        self, layer_id: int, dims: ShortConvDims, params: ShortConvParams
    ) -> ShortConvLayer:
        conv = self._conv(layer_id, params.weight, params.bias, dims.W, None)
        sidecar = cast("ConvState", self._interface("conv_state.step"))
        return ShortConvLayer(self.current, layer_id, dims, conv, sidecar)

    def _scan(self, layer_id: int, dims: ScanDims, params: ScanParams) -> ScanLayer:
        _check_rates(layer_id, dims, params)
        conv = None
        if dims.W:
            if params.conv_weight is None:
                raise ValueError(f"layer {layer_id}: conv weight is missing, width is {dims.W}")
            conv = self._conv(layer_id, params.conv_weight, params.conv_bias, dims.W, "silu")
        return ScanLayer(
            self.current,
            dims,
            replace(params, D=_float(params.D), dt_bias=_float(params.dt_bias)),
            conv,
            cast("Scan", self._interface("scan.prefill")),
            cast("Scan", self._interface("scan.decode")),
            self.pool.tensors(layer_id)["scan"],
            -params.A_log.float().exp(),
            cast("Scan | None", self._verifier("scan")),
            self._draft(layer_id, "scan"),
        )

    def _cca(self, layer_id: int, dims: CcaDims, params: CcaParams) -> CcaLayer:
        channels = (dims.channels,)
        for name, tensor, shape in (
            ("depthwise weight", params.depthwise_weight, (*channels, dims.time0)),
            ("depthwise bias", params.depthwise_bias, channels),
            ("grouped weight", params.grouped_weight, (*channels, dims.D, dims.time1)),
            ("grouped bias", params.grouped_bias, channels),
        ):
            if tensor is not None:
                _check_shape(layer_id, name, tensor, shape)
        sidecar = cast("ConvState", self._interface("conv_state.step"))
        layout = self.pool.spec(layer_id, "conv").layout
        return CcaLayer(self.current, layer_id, dims, params, sidecar, layout)

    def _conv(
        self,
        layer_id: int,
        weight: Tensor,
        bias: Tensor | None,
        width: int,
        activation: str | None,
    ) -> BoundConv:
        channels = sum(size for _, size, _ in self.pool.spec(layer_id, "conv").segments)
        _check_shape(layer_id, "conv weight", weight, (channels, width))
        if bias is not None:
            _check_shape(layer_id, "conv bias", bias, (channels,))
        provider = self.providers[self.selection.choices["conv.prefill"].provider]
        laid_out = provider.prepare({"conv_weight": weight, "conv_bias": bias})
        prepared = laid_out["conv_weight"]
        if prepared is None:
            raise HalError(f"layer {layer_id}: the provider's prepare lost conv_weight")
        return BoundConv(
            cast("Conv", self._interface("conv.prefill")),
            cast("Conv", self._interface("conv.decode")),
            prepared,
            laid_out["conv_bias"],
            self.pool.tensors(layer_id)["conv"],
            activation,
            cast("Conv | None", self._verifier("conv")),
            self._draft(layer_id, "conv"),
        )

    def _verifier(self, interface: str) -> object | None:
        """Who verifies, where speculation was selected."""
        operation = f"{interface}.verify"
        return self._interface(operation) if operation in self.selection.choices else None

    def _draft(self, layer_id: int, interface: str) -> Draft | None:
        """The scratch of one operation of one layer, just as its provider asks for it."""
        speculative = self.selection.options.speculative
        if speculative is None:
            return None
        provider = self.providers[self.selection.choices[f"{interface}.verify"].provider]
        tensors = self.pool.tensors(layer_id)
        shapes = {name: tuple(tensor.shape[1:]) for name, tensor in tensors.items()}
        wanted = provider.scratch_spec(interface, shapes, self.max_batch, speculative.width)
        device = next(iter(tensors.values())).device
        return Draft(
            tuple(
                torch.empty(each.shape, dtype=getattr(torch, each.dtype), device=device)
                for each in wanted
            )
        )

    def _interface(self, operation: str) -> object:
        """The provider's object that serves an operation."""
        provider = self.providers[self.selection.choices[operation].provider]
        by_name: Mapping[str, object] = {
            "conv": provider.conv,
            "conv_state": provider.conv_state,
            "delta_rule": provider.delta_rule,
            "scan": provider.scan,
        }
        return by_name[interface_of(operation)]


def _float(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()


def _check_rates(layer_id: int, dims: ScanDims, params: ScanParams) -> None:
    """Mamba-1 has a rate for each channel and state, the others one a head."""
    by_channel = dims.dt_rank is not None
    count = dims.I if by_channel else dims.H
    _check_shape(layer_id, "A_log", params.A_log, (count, dims.N) if by_channel else (count,))
    for name, tensor in (("D", params.D), ("dt_bias", params.dt_bias)):
        if tensor is not None:
            _check_shape(layer_id, name, tensor, (count,))


def _check_shape(layer_id: int, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"layer {layer_id}: {name} is {list(tensor.shape)}, expected {list(shape)}"
        )
