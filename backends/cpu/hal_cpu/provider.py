"""The provider of the embedded default: eager torch, nothing compiled, nothing tuned."""

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from hal.interfaces import Scratch
from hal_cpu.conv import TorchConv
from hal_cpu.conv_state import TorchConvState
from hal_cpu.delta_rule import TorchDeltaRule
from hal_cpu.scan import TorchScan
from hal_cpu.scratch import scratch_of

CONV_LAYOUTS: Final = ("CW", "WC")
"""Layouts of the conv state that `TorchConv` reads."""

RECURRENT_LAYOUTS: Final = ("VK", "KV")
"""Layouts of the recurrent state that `TorchDeltaRule` reads; both cost the same."""

LAYOUTS: Final = {"conv": CONV_LAYOUTS, "recurrent": RECURRENT_LAYOUTS, "scan": ("PN",)}
"""Layouts by state, the default first."""

_CONV_WEIGHTS: Final = frozenset({"conv_weight", "weight"})


class TorchProvider:
    """Serves the operations that its manifest offers, on CPU tensors.

    `options["layouts"]` maps a state name to its layout; "conv" defaults to "CW" and "recurrent" to
    "VK". Fused operations are not there, so they cannot be bound.
    """

    def __init__(self, device: str, options: Mapping[str, object]) -> None:
        if torch.device(device).type != "cpu":
            raise ValueError(f"cpu.torch: device is {device!r}, expected 'cpu'")
        layouts = options.get("layouts", {})
        if not isinstance(layouts, Mapping):
            raise TypeError(f"cpu.torch: layouts is {type(layouts).__name__}, expected a mapping")
        self._layouts = {name: _layout(layouts, name, offered) for name, offered in LAYOUTS.items()}
        self.conv = TorchConv(self._layouts["conv"])
        self.delta_rule = TorchDeltaRule(self._layouts["recurrent"])
        self.scan = TorchScan()
        self.conv_state = TorchConvState()

    def prepare(self, params: Mapping[str, Tensor | None]) -> Mapping[str, Tensor | None]:
        """Lay conv weights out tap by tap in float32, which keeps their values; the rest as is.

        They keep their `[C, W]` shape, so that a prepared and a raw weight are called alike.
        """
        return {
            name: _tap_major(value) if value is not None and name in _CONV_WEIGHTS else value
            for name, value in params.items()
        }

    def scratch_spec(
        self, interface: str, shapes: Mapping[str, Sequence[int]], max_batch: int, width: int
    ) -> Sequence[Scratch]:
        """Float32 tensors with room for `max_batch * width` tokens, and their parents."""
        return scratch_of(interface, shapes, self._layouts, max_batch, width)

    def warmup(self) -> None:
        """Do nothing: nothing compiles."""


def _layout(layouts: Mapping[str, object], name: str, offered: Sequence[str]) -> str:
    layout = layouts.get(name, offered[0])
    if layout not in offered:
        raise ValueError(
            f"cpu.torch: layout of {name} is {layout!r}, expected {' or '.join(offered)}"
        )
    return str(layout)


def _tap_major(weight: Tensor) -> Tensor:
    return weight.float().t().contiguous().t()
