"""What `hal tune` sweeps of `cuda.hopper`: how a head is walked, and who prepares its chunks."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from hal.bench.shapes import CARD, LONG, Shape, gdn, kda
from hal.tuner import Tuner
from hal_cuda.hopper.plugin import MANIFEST
from hal_cuda.hopper.prefill import CHANNEL_TABLE, TABLE
from hal_cuda.hopper.provider import HopperProvider
from hal_cuda.provider import arch_of, tuning
from hal_triton.tune.classes import FEW, Class
from hal_triton.tune.tuner import TritonTuner
from hal_triton.tuning import UNBOUNDED, Config

HALVES: Final = 66
"""Rows times value heads of which two halves each find a processor of their own."""


def _classes(name: str, operation: str, dims: Mapping[str, Any], *guards: Shape) -> Iterator[Class]:
    """One long prompt, and many."""
    for limit, label in ((HALVES, "1x8192"), (UNBOUNDED, "16x2048")):
        yield Class(name, limit, Shape(operation, label, dims, LONG[label], CARD), guards=guards)


CLASSES: Final = (
    *_classes(TABLE, "delta_rule.prefill_fused", gdn(16)),
    *_classes(
        CHANNEL_TABLE,
        "delta_rule.prefill",
        kda(32),
        Shape("delta_rule.prefill", "guard 1", kda(32, "safe"), FEW, CARD),
    ),
)
"""By the names of the table; both gates of channels read the one entry."""

_WALKS: Final = (Config({"CONSUMERS": 1}), Config({"CONSUMERS": 2}))

TUNER: Final[Tuner] = TritonTuner(
    MANIFEST.name,
    f"{__name__}:TUNER",
    MANIFEST.offers,
    arch_of,
    tuning,
    HopperProvider,
    CLASSES,
    {
        TABLE: (*_WALKS, Config({"CONSUMERS": 1, "PREPARED": 1})),
        CHANNEL_TABLE: _WALKS,
    },
)
