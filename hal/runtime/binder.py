"""Bind a layer's weights to the providers' operations and the pool's tensors, once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, cast

import torch

from hal.errors import ProviderError
from hal.model.spec import CcaDims, DeltaDims, ScanDims, ShortConvDims
from hal.runtime.batch import Mode
from hal.runtime.bound_conv import BoundConv
from hal.runtime.cca import Cca, CcaWeights
from hal.runtime.cca_layer import CcaLayer
from hal.runtime.layers import DeltaLayer, ShortConvLayer
from hal.runtime.operators import OperatorConv, OperatorDelta, Operators, operators
from hal.runtime.param_checks import check_cca, check_delta, check_placed, check_scan, check_weight
from hal.runtime.params import (
    CcaParams,
    DeltaParams,
    LayerParams,
    ScanParams,
    ShortConvParams,
    detach,
    in_float32,
)
from hal.runtime.ranks import mean_of_norm
from hal.runtime.scan_layer import ScanLayer
from hal.runtime.seam import Current, Draft
from hal.sharding import shard
from hal_registry import interface_of

if TYPE_CHECKING:
    from torch import Tensor

    from hal.interfaces import Conv, ConvState, DeltaRule, Provider, Scan
    from hal.model.spec import Dims
    from hal.runtime.pool import Pool
    from hal.runtime.ranks import Ranks
    from hal.selection import Selection

_FUSED: Final = {
    "delta_rule.decode_fused": (Mode.DECODE,),
    "delta_rule.prefill_fused": (Mode.EXTEND, Mode.MIXED, Mode.DRAFT_EXTEND),
}
"""The modes whose whole layer an optional operation serves."""

Layer = DeltaLayer | ShortConvLayer | ScanLayer | CcaLayer


@dataclass(frozen=True, slots=True)
class Binder:
    """What layers of one backend share: the selection, its providers, the pool and the step."""

    selection: Selection
    providers: Mapping[str, Provider]
    pool: Pool
    current: Current
    max_batch: int
    ranks: Ranks | None = None

    def layer(self, layer_id: int, params: LayerParams) -> Layer:
        """Check the weights against the model's dims and bind them."""
        dims = self._dims(layer_id)
        if isinstance(params, LayerParams):  # what is none of them is refused by name below
            held = next(iter(self.pool.tensors(layer_id).values()))
            check_placed(layer_id, params, held.device)
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
        return shard(self._whole(layer_id), self.selection.options.tp.size)

    def _whole(self, layer_id: int) -> Dims:
        layers = {layer.index: layer for layer in self.selection.model.stateful_layers()}
        layer = layers.get(layer_id)
        if layer is None or layer.dims is None:
            raise ValueError(f"layer {layer_id} keeps no state; layers {sorted(layers)} do")
        return layer.dims

    def _delta(self, layer_id: int, dims: DeltaDims, params: DeltaParams) -> DeltaLayer:
        check_delta(layer_id, dims, params, self.selection.options.ready_gates)
        offers = [
            self.selection.choices[op].candidate.manifest.offers[op].gates
            for op in ("delta_rule.prefill", "delta_rule.decode", "delta_rule.verify")
            if op in self.selection.choices
        ]
        return DeltaLayer(
            self.current,
            dims,
            params.detached(),
            self._conv(layer_id, params.conv_weight, params.conv_bias, dims.W, "silu"),
            cast("DeltaRule", self._interface("delta_rule.prefill")),
            cast("DeltaRule", self._interface("delta_rule.decode")),
            self.pool.tensors(layer_id)["recurrent"],
            fuses_gate=all(dims.gate.value in gates for gates in offers),
            verify=cast("DeltaRule | None", self._verifier("delta_rule")),
            draft=self._draft(layer_id, "delta_rule"),
            compiled=OperatorDelta(self._operators("delta_rule")),
            fused=self._fused(),
        )

    def _short_conv(
        self, layer_id: int, dims: ShortConvDims, params: ShortConvParams
    ) -> ShortConvLayer:
        conv = self._conv(layer_id, params.weight, params.bias, dims.W, None)
        sidecar = cast("ConvState", self._interface("conv_state.step"))
        return ShortConvLayer(self.current, layer_id, dims, conv, sidecar)

    def _scan(self, layer_id: int, dims: ScanDims, params: ScanParams) -> ScanLayer:
        check_scan(layer_id, dims, params)
        conv = None
        if dims.W and params.conv_weight is not None:
            conv = self._conv(layer_id, params.conv_weight, params.conv_bias, dims.W, "silu")
        return ScanLayer(
            self.current,
            dims,
            replace(params, D=in_float32(params.D), dt_bias=in_float32(params.dt_bias)),
            conv,
            cast("Scan", self._interface("scan.prefill")),
            cast("Scan", self._interface("scan.decode")),
            self.pool.tensors(layer_id)["scan"],
            -params.A_log.detach().float().exp(),
            self._dtype(),
            cast("Scan | None", self._verifier("scan")),
            self._draft(layer_id, "scan"),
            over_ranks=self._mean(layer_id, params),
        )

    def _mean(self, layer_id: int, params: ScanParams) -> Callable[[Tensor], Tensor] | None:
        """The mean over the ranks that the groups of a layer's norm are cut by."""
        if params.norm_weight is None:
            return None
        size = self.selection.options.tp.size
        return mean_of_norm(layer_id, self._whole(layer_id), size, self.ranks)

    def _cca(self, layer_id: int, dims: CcaDims, params: CcaParams) -> CcaLayer:
        check_cca(layer_id, dims, params)
        weights = self._cca_weights(layer_id, dims, params)
        held, layout = self.pool.tensors(layer_id), self.pool.spec(layer_id, "conv").layout

        def over(operation: str) -> Cca:
            conv = cast("Conv", self._interface(operation))
            return Cca(conv, weights, held["conv"], held["hidden"], layout)

        prefill = over("conv.prefill")
        windows = (prefill.window, prefill.hidden_window())
        draft, hidden_draft = (self._draft(layer_id, "conv", {"conv": each}) for each in windows)
        return CcaLayer(
            self.current,
            layer_id,
            dims,
            cast("ConvState", self._interface("conv_state.step")),
            prefill,
            over("conv.decode"),
            over("conv.verify") if draft is not None else None,
            draft,
            hidden_draft,
        )

    def _cca_weights(self, layer_id: int, dims: CcaDims, params: CcaParams) -> CcaWeights:
        """The composition's weights, those of its convolutions as their provider lays them out."""
        weights = CcaWeights.of(
            params.depthwise_weight,
            params.depthwise_bias,
            params.grouped_weight,
            params.grouped_bias,
            dims.hidden,
        )
        stages = [
            self._prepared(layer_id, shifted, weights.depthwise_bias) for shifted in weights.shifted
        ]
        return replace(
            weights,
            shifted=tuple(weight for weight, _ in stages),
            depthwise_bias=stages[0][1],
            delay=self._prepared(layer_id, weights.delay, None)[0],
        )

    def _conv(
        self,
        layer_id: int,
        weight: Tensor,
        bias: Tensor | None,
        width: int,
        activation: str | None,
    ) -> BoundConv:
        channels = sum(size for _, size, _ in self.pool.spec(layer_id, "conv").segments)
        check_weight(layer_id, "conv weight", weight, (channels, width))
        check_weight(layer_id, "conv bias", bias, (channels,))
        return BoundConv(
            cast("Conv", self._interface("conv.prefill")),
            cast("Conv", self._interface("conv.decode")),
            *self._prepared(layer_id, weight, bias),
            self.pool.tensors(layer_id)["conv"],
            activation,
            self._dtype(),
            cast("Conv | None", self._verifier("conv")),
            self._draft(layer_id, "conv"),
            OperatorConv(self._operators("conv")),
        )

    def _prepared(
        self, layer_id: int, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """A convolution's weight and bias as the provider lays them out."""
        provider = self.providers[self.selection.choices["conv.prefill"].provider]
        given = {"conv_weight": weight.detach(), "conv_bias": detach(bias)}
        laid_out = provider.prepare(given)
        returned: object = laid_out
        if not isinstance(returned, Mapping) or laid_out.keys() != given.keys():
            raise ProviderError(
                f"layer {layer_id}: prepare gave {laid_out!r}, expected {sorted(given)}"
            )
        prepared = laid_out["conv_weight"]
        if prepared is None:
            raise ProviderError(f"layer {layer_id}: prepare lost conv_weight")
        return prepared, laid_out["conv_bias"]

    def _dtype(self) -> torch.dtype:
        """The activation dtype that the selection was made for."""
        found: torch.dtype = getattr(torch, self.selection.dtype)
        return found

    def _fused(self) -> dict[Mode, DeltaRule]:
        """Fused operations by mode; one that holds the conv has to be of who laid out its weights.

        A prefill's takes what the conv gave, whoever ran it.
        """
        choices = self.selection.choices
        conv = {choices[f"conv.{verb}"].provider for verb in ("prefill", "decode")}
        served: dict[Mode, DeltaRule] = {}
        for operation, modes in _FUSED.items():
            outside = operation == "delta_rule.prefill_fused"
            if operation in choices and (outside or conv == {choices[operation].provider}):
                rule = cast("DeltaRule", self._interface(operation))
                served |= dict.fromkeys(modes, rule)
        return served

    def _operators(self, interface: str) -> dict[str, Operators]:
        """The registered operators of prefill and decode, whose providers may differ."""
        found = {}
        for verb in ("prefill", "decode"):
            name = self.selection.choices[f"{interface}.{verb}"].provider
            place = str(self.pool.device)
            found[verb] = operators(name, place, self.selection.layouts, self.providers[name])
        return found

    def _verifier(self, interface: str) -> object | None:
        """Who verifies, where speculation was selected."""
        operation = f"{interface}.verify"
        return self._interface(operation) if operation in self.selection.choices else None

    def _draft(
        self, layer_id: int, interface: str, states: Mapping[str, Tensor] | None = None
    ) -> Draft | None:
        """The scratch of one operation, just as its provider asks for it.

        It is of the layer's states, or of the given ones where an operation runs on each of them.
        """
        speculative = self.selection.options.speculative
        if speculative is None:
            return None
        provider = self.providers[self.selection.choices[f"{interface}.verify"].provider]
        tensors = self.pool.tensors(layer_id) if states is None else states
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
        served: object = getattr(provider, interface_of(operation))
        return served
