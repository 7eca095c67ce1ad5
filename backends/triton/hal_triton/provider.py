"""The provider that CUDA and ROCm share; they differ in tables and in a device function or two."""

from collections.abc import Mapping, Sequence
from typing import Final

from torch import Tensor

from hal.interfaces import Scratch
from hal_triton.conv.launcher import TritonConv
from hal_triton.conv_state import TritonConvState
from hal_triton.delta_rule.launcher import TritonDeltaRule
from hal_triton.kernels.math import silu
from hal_triton.scan.launcher import TritonScan
from hal_triton.scan.verify import scratch_of as scan_scratch
from hal_triton.scratch import scratch_of
from hal_triton.short_conv.launcher import TritonShortConv
from hal_triton.tuning import DEFAULT, Tuning

CONV_LAYOUTS: Final = ("ring", "CW", "WC")
"""Layouts of the conv state; fused decode takes the first alone."""

RECURRENT_LAYOUTS: Final = ("VK", "KV")
"""Layouts of the recurrent state; the first is the one that kernels read in whole lines."""

SCAN_LAYOUTS: Final = ("PN",)
"""The layout of a scan's state."""

_CONV_WEIGHTS: Final = frozenset({"conv_weight", "weight"})


class TritonProvider:
    """Serves conv, delta rule, scan, short conv and the sidecar on any device that Triton reaches.

    `options["layouts"]` maps a state name to its layout; "conv" defaults to "ring" and "recurrent"
    to "VK". `options["tuning"]` is a vendor's `Tuning`.
    """

    def __init__(self, device: str, options: Mapping[str, object]) -> None:
        layouts, tuning = options.get("layouts", {}), options.get("tuning")
        if not isinstance(layouts, Mapping):
            raise TypeError(f"triton: layouts is {type(layouts).__name__}, expected a mapping")
        if not isinstance(tuning, Tuning):
            tuning = Tuning(DEFAULT, silu, silu)
        conv = _layout(layouts, "conv", CONV_LAYOUTS)
        recurrent = _layout(layouts, "recurrent", RECURRENT_LAYOUTS)
        _layout(layouts, "scan", SCAN_LAYOUTS)
        self._layouts = {"conv": conv, "recurrent": recurrent}
        self.device = device
        self.tuning = tuning
        self.conv = TritonConv(tuning, conv)
        self.short_conv = TritonShortConv(tuning, conv)
        self.delta_rule = TritonDeltaRule(tuning, recurrent)
        self.scan = TritonScan(tuning)
        self.conv_state = TritonConvState()

    def prepare(self, params: Mapping[str, Tensor | None]) -> Mapping[str, Tensor | None]:
        """Lay conv weights out tap by tap, so that channels are dense; the rest as is.

        They keep their dtype and their `[C, W]` shape: a prepared and a raw weight are called
        alike.
        """
        return {
            name: value.t().contiguous().t()
            if value is not None and name in _CONV_WEIGHTS
            else value
            for name, value in params.items()
        }

    def scratch_spec(
        self, interface: str, shapes: Mapping[str, Sequence[int]], max_batch: int, width: int
    ) -> Sequence[Scratch]:
        """Float32 tensors with room for `max_batch * width` tokens, and their parents."""
        if interface == "scan":
            return scan_scratch(shapes["scan"], max_batch, width)
        return scratch_of(interface, shapes, self._layouts, max_batch, width)

    def warmup(self) -> None:
        """Do nothing: kernels compile when a bound layer first launches them."""


def _layout(layouts: Mapping[str, object], name: str, offered: Sequence[str]) -> str:
    layout = layouts.get(name, offered[0])
    if layout not in offered:
        expected = " or ".join(offered)
        raise ValueError(f"triton: layout of {name} is {layout!r}, expected {expected}")
    return str(layout)
