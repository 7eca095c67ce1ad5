"""What each kind of layer is called with, as records that one `forward` by layer id can take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hal.runtime.cca_layer import CcaLayer
from hal.runtime.layers import DeltaLayer, ShortConvLayer
from hal.runtime.scan_layer import ScanLayer

if TYPE_CHECKING:
    from torch import Tensor

    from hal.runtime.binder import Layer


@dataclass(frozen=True, slots=True, eq=False)
class AttentionInputs:
    """Of a full-attention layer: q `[T, HQ, D]`, k `[T, HKV, D]`, v `[T, HKV, V]`."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DeltaInputs:
    """Of a delta-rule layer: mixed_qkv `[T, C]`, a, b, and z `[T, HV, V]` or None."""

    mixed_qkv: Tensor
    a: Tensor
    b: Tensor
    z: Tensor | None = None

    def run(self, layer: Layer) -> Tensor:
        """Call the layer."""
        if not isinstance(layer, DeltaLayer):
            raise _misfit(self, layer)
        return layer(self.mixed_qkv, self.a, self.b, self.z)


@dataclass(frozen=True, slots=True, eq=False)
class ScanInputs:
    """Of a Mamba-2 layer: mixed `[T, C]`, dt `[T, H]`, and z `[T, I]` or None."""

    mixed: Tensor
    dt: Tensor
    z: Tensor | None = None

    def run(self, layer: Layer) -> Tensor:
        """Call the layer."""
        if not isinstance(layer, ScanLayer):
            raise _misfit(self, layer)
        return layer.forward(self.mixed, self.dt, self.z)


@dataclass(frozen=True, slots=True, eq=False)
class ShortConvInputs:
    """Of a short-conv layer: B, C and x `[T, hidden]`."""

    B: Tensor
    C: Tensor
    x: Tensor

    def run(self, layer: Layer) -> Tensor:
        """Call the layer."""
        if not isinstance(layer, ShortConvLayer):
            raise _misfit(self, layer)
        return layer(self.B, self.C, self.x)


@dataclass(frozen=True, slots=True, eq=False)
class CcaInputs:
    """Of a CCA layer: r `[T, C]`, raw q beside raw k, and h `[T, hidden]`."""

    r: Tensor
    h: Tensor

    def run(self, layer: Layer) -> tuple[Tensor, Tensor]:
        """Call the layer."""
        if not isinstance(layer, CcaLayer):
            raise _misfit(self, layer)
        return layer(self.r, self.h)


LinearInputs = DeltaInputs | ScanInputs | ShortConvInputs | CcaInputs


def _misfit(inputs: LinearInputs, layer: Layer) -> TypeError:
    return TypeError(f"layer call: {type(inputs).__name__} for a {type(layer).__name__}")
