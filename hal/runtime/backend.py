"""The backend: a selection bound to providers, with its pool and the step that is running."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

import torch

from hal.binding import build
from hal.errors import HalError
from hal.model.spec import DeltaDims, ShortConvDims
from hal.runtime.batch import Batch, Limits, Mode, check
from hal.runtime.layers import BoundConv, Current, DeltaLayer, Layer, ShortConvLayer
from hal.runtime.params import DeltaParams, LayerParams, ShortConvParams
from hal.runtime.pool import Pool
from hal.runtime.step import make_step
from hal.sharding import shard

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from hal.interfaces import Conv, ConvState, DeltaRule, Provider
    from hal.model.spec import Dims
    from hal.selection import Selection

SERVED: Final = frozenset({Mode.DECODE, Mode.EXTEND, Mode.MIXED, Mode.IDLE})


class Backend:
    """One rank's linear layers on one device.

    `slots` allocatable slots (slot 0 comes on top), steps of at most `max_batch` rows and
    `max_tokens` packed tokens. Call `begin(batch)` once a step, then every bound layer.
    """

    def __init__(
        self,
        selection: Selection,
        slots: int,
        max_batch: int,
        max_tokens: int,
        *,
        device_index: int | None = None,
    ) -> None:
        if max_batch < 1 or max_tokens < 1:
            raise ValueError(
                f"backend: max_batch {max_batch}, max_tokens {max_tokens}: expected at least 1"
            )
        index = selection.device.index if device_index is None else device_index
        self.selection = selection
        name = selection.device.type
        self.device = torch.device(name if index is None else f"{name}:{index}")
        self.pool = Pool(selection.states, slots, self.device)
        self.limits = Limits(slots, max_batch, max_tokens, SERVED, _track(selection))
        self._providers = _build_providers(selection)
        self._current = Current()
        self._sidecar = self._attach_sidecar()

    def begin(self, batch: Batch) -> None:
        """Check the batch and make the step's metadata; ValueError leaves no step to run."""
        self._current.step = None
        check(batch, self.limits)
        step = make_step(batch, self.device)
        if self._sidecar is not None:
            self._sidecar.begin(step.src, step.dst, step.start, step.query_start_loc, step.max_len)
        self._current.step = step

    def layer(self, layer_id: int, params: LayerParams) -> Layer:
        """Bind a layer's weights, checked against the model's dims; the provider lays them out."""
        dims = self._dims(layer_id)
        if isinstance(dims, DeltaDims) and isinstance(params, DeltaParams):
            return self._delta(layer_id, dims, params)
        if isinstance(dims, ShortConvDims) and isinstance(params, ShortConvParams):
            return self._short_conv(layer_id, dims, params)
        raise TypeError(f"layer {layer_id} is {type(dims).__name__}, got {type(params).__name__}")

    def warmup(self) -> None:
        """Let the providers compile what the bound layers can launch."""
        for provider in self._providers.values():
            provider.warmup()

    def _dims(self, layer_id: int) -> Dims:
        layers = {layer.index: layer for layer in self.selection.model.stateful_layers()}
        layer = layers.get(layer_id)
        if layer is None or layer.dims is None:
            raise ValueError(f"layer {layer_id} keeps no state; layers {sorted(layers)} do")
        return shard(layer.dims, self.selection.options.tp.size)

    def _delta(self, layer_id: int, dims: DeltaDims, params: DeltaParams) -> DeltaLayer:
        channels = sum(size for _, size in dims.segments)
        conv = self._conv(
            layer_id, params.conv_weight, params.conv_bias, (channels, dims.W), "silu"
        )
        offers = [
            self.selection.choices[op].candidate.manifest.offers[op].gates
            for op in ("delta_rule.prefill", "delta_rule.decode")
        ]
        return DeltaLayer(
            self._current,
            dims,
            params,
            conv,
            cast("DeltaRule", self._interface("delta_rule.prefill")),
            cast("DeltaRule", self._interface("delta_rule.decode")),
            self.pool.tensors(layer_id)["recurrent"],
            fuses_gate=all(dims.gate.value in gates for gates in offers),
        )

    def _short_conv(
        self, layer_id: int, dims: ShortConvDims, params: ShortConvParams
    ) -> ShortConvLayer:
        conv = self._conv(layer_id, params.weight, params.bias, (dims.hidden, dims.W), None)
        if self._sidecar is None:
            raise HalError("conv_state was not selected for a model with short-conv layers")
        return ShortConvLayer(self._current, layer_id, dims, conv, self._sidecar)

    def _conv(
        self,
        layer_id: int,
        weight: Tensor,
        bias: Tensor | None,
        shape: tuple[int, int],
        activation: str | None,
    ) -> BoundConv:
        if tuple(weight.shape) != shape:
            raise ValueError(
                f"layer {layer_id}: conv weight is {list(weight.shape)}, expected {list(shape)}"
            )
        if bias is not None and tuple(bias.shape) != shape[:1]:
            raise ValueError(
                f"layer {layer_id}: conv bias is {list(bias.shape)}, expected {[shape[0]]}"
            )
        provider = self._providers[self.selection.choices["conv.prefill"].provider]
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
        )

    def _interface(self, operation: str) -> object:
        """The provider's object that serves an operation."""
        provider = self._providers[self.selection.choices[operation].provider]
        by_name: Mapping[str, object] = {
            "conv": provider.conv,
            "conv_state": provider.conv_state,
            "delta_rule": provider.delta_rule,
            "scan": provider.scan,
        }
        return by_name[operation.partition(".")[0]]

    def _attach_sidecar(self) -> ConvState | None:
        if "conv_state.step" not in self.selection.choices:
            return None
        sidecar = cast("ConvState", self._interface("conv_state.step"))
        layers = {spec.layer for spec in self.selection.states}
        sidecar.attach({layer: tuple(self.pool.tensors(layer).values()) for layer in layers})
        return sidecar


def _build_providers(selection: Selection) -> dict[str, Provider]:
    candidates = {choice.provider: choice.candidate for choice in selection.choices.values()}
    return {
        name: build(candidate, selection.device, selection.layouts)
        for name, candidate in candidates.items()
    }


def _track(selection: Selection) -> int | None:
    """The coarsest granularity among the chosen operations, None without prefix_cache."""
    if selection.options.prefix_cache is False:
        return None
    offers = (c.candidate.manifest.offers[op].track for op, c in selection.choices.items())
    return max((min(grids) for grids in offers if grids), default=None)
