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
    Class(TABLE, 99, Shape(OPERATION, "2x2048", gdn(16), (2048,) * 2, CARD)),
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
    {TABLE: tuple(Config({"CONSUMERS": count}) for count in (1, 2))},
)
