"""What `hal tune` sweeps of `cuda.hopper`: how many groups of a block solve."""

from typing import Final

from hal.bench.shapes import CARD, LONG, Shape, gdn
from hal.tuner import Tuner
from hal_cuda.hopper.plugin import MANIFEST
from hal_cuda.hopper.prefill import TABLE
from hal_cuda.hopper.provider import HopperProvider
from hal_cuda.provider import arch_of, tuning
from hal_triton.tune.classes import Class
from hal_triton.tune.tuner import TritonTuner
from hal_triton.tuning import UNBOUNDED, Config

OPERATION: Final = "delta_rule.prefill_fused"
CLASSES: Final = (
    Class(TABLE, 66, Shape(OPERATION, "1x8192", gdn(16), LONG["1x8192"], CARD)),
    Class(TABLE, UNBOUNDED, Shape(OPERATION, "16x2048", gdn(16), LONG["16x2048"], CARD)),
)

TUNER: Final[Tuner] = TritonTuner(
    MANIFEST.name,
    f"{__name__}:TUNER",
    MANIFEST.offers,
    arch_of,
    tuning,
    HopperProvider,
    CLASSES,
    {
        TABLE: (
            Config({"CONSUMERS": 1}),
            Config({"CONSUMERS": 2}),
            Config({"CONSUMERS": 1, "PREPARED": 1}),
        )
    },
)
