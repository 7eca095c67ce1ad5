"""The provider of Ascend NPUs: an adapter over functions of sgl-kernel-npu."""

from collections.abc import Mapping, Sequence
from typing import Final

from torch import Tensor

from hal.interfaces import Scratch
from hal_npu.conv import AscendConv
from hal_npu.delta_rule import AscendDeltaRule
from hal_npu.environment import switched
from hal_npu.scratch import scratch_of
from hal_npu.vendor import Vendor

LAYOUTS: Final = {"conv": ("CW", "WC"), "recurrent": ("VK", "KV")}
"""Layouts by state, the default first."""


class AscendProvider:
    """Serves conv and delta rule; scans and conv-state sidecars have no vendor function.

    `options["layouts"]` maps a state name to its layout; "conv" defaults to "CW", "recurrent" to
    "VK". `options["vendor"]` is a `Vendor` in place of the installed one. Tensors say where they
    are: nothing is ever moved to a device.
    """

    def __init__(self, device: str, options: Mapping[str, object]) -> None:
        if device.partition(":")[0] != "npu":
            raise ValueError(f"npu.ascend: device is {device!r}, expected 'npu' or 'npu:N'")
        if on := list(switched()):
            raise ValueError("npu.ascend: " + "; ".join(map(str, on)))
        layouts = options.get("layouts", {})
        if not isinstance(layouts, Mapping):
            raise TypeError(f"npu.ascend: layouts is {type(layouts).__name__}, expected a mapping")
        vendor = options.get("vendor")
        if not isinstance(vendor, Vendor):
            vendor = Vendor.installed()
        chosen = {name: _layout(layouts, name) for name in LAYOUTS}
        self._layouts = chosen
        self.conv = AscendConv(vendor.conv_prefill, vendor.conv_steps, vendor.move, chosen["conv"])
        self.delta_rule = AscendDeltaRule(
            vendor.chunk, vendor.update, vendor.steps, vendor.move, chosen["recurrent"]
        )
        self.scan = None
        self.conv_state = None

    def prepare(self, params: Mapping[str, Tensor | None]) -> Mapping[str, Tensor | None]:
        """Lay conv weights and biases out dense in float32, which keeps their values.

        They keep their `[C, W]` shape, so that a prepared and a raw weight are called alike.
        """
        return {
            name: value.float().contiguous() if value is not None and "conv" in name else value
            for name, value in params.items()
        }

    def scratch_spec(
        self, interface: str, shapes: Mapping[str, Sequence[int]], max_batch: int, width: int
    ) -> Sequence[Scratch]:
        """The state after each of `width` steps of `max_batch` rows, in float32."""
        return scratch_of(interface, shapes, self._layouts, max_batch, width)

    def warmup(self) -> None:
        """Do nothing: kernels compile when a bound layer first launches them."""


def _layout(layouts: Mapping[str, object], name: str) -> str:
    offered = LAYOUTS[name]
    layout = layouts.get(name, offered[0])
    if layout not in offered:
        expected = " or ".join(offered)
        raise ValueError(f"npu.ascend: layout of {name} is {layout!r}, expected {expected}")
    return str(layout)
