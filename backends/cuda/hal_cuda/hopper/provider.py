"""The provider `cuda.hopper`: prefill of the gated delta rule in CUDA C++."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hal.interfaces import Conv, ConvState, DeltaRule, Scan, Scratch
from hal_cuda.hopper.prefill import HopperPrefill
from hal_cuda.hopper.variant import COMMON, KERNELS
from hal_cuda.provider import arch_of, tuning
from hal_triton.delta_rule.launcher import TritonDeltaRule
from hal_triton.tuning import Tuning

LAYOUT = "VK"
"""The one layout of the recurrent state."""


class HopperDeltaRule(TritonDeltaRule):
    """The shared delta rule with `prefill` and `prefill_fused` by the kernel in CUDA C++.

    Calls that the kernel does not take, such as float32 or a state with gaps between its rows, run
    the shared kernels.
    """

    def __init__(self, tuned: Tuning) -> None:
        super().__init__(tuned, LAYOUT)
        self._prefill = HopperPrefill(tuned, LAYOUT)


class HopperProvider:
    """Serves prefill on sm_90; every other interface is None."""

    conv: Conv | None = None
    scan: Scan | None = None
    conv_state: ConvState | None = None

    def __init__(self, device: str, options: Mapping[str, object]) -> None:
        if torch.device(device).type != "cuda":
            raise ValueError(f"cuda.hopper: device is {device!r}, expected 'cuda' or 'cuda:N'")
        layouts, given = options.get("layouts", {}), options.get("tuning")
        if not isinstance(layouts, Mapping):
            raise TypeError(f"cuda.hopper: layouts is {type(layouts).__name__}, expected a mapping")
        if (layout := layouts.get("recurrent", LAYOUT)) != LAYOUT:
            raise ValueError(f"cuda.hopper: layout of recurrent is {layout!r}, expected {LAYOUT}")
        self.device = device
        self.tuning = given if isinstance(given, Tuning) else tuning(arch_of(device))
        self.delta_rule: DeltaRule | None = HopperDeltaRule(self.tuning)

    def prepare(self, params: Mapping[str, Tensor | None]) -> Mapping[str, Tensor | None]:
        """Leave the weights as they are."""
        return params

    def scratch_spec(
        self, interface: str, shapes: Mapping[str, Sequence[int]], max_batch: int, width: int
    ) -> Sequence[Scratch]:
        """Nothing: no verify is offered."""
        return ()

    def warmup(self) -> None:
        """Compile and load the forms of the kernel that bound layers launch.

        Takes seconds where the user's cache does not hold them yet.
        """
        index: int | None = torch.device(self.device).index
        KERNELS.warm(COMMON, torch.cuda.current_device() if index is None else index)
