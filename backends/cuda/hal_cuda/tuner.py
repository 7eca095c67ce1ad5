"""What `hal tune` sweeps of `cuda.triton`."""

from typing import Final

from hal.tuner import Tuner
from hal_cuda.candidates import CANDIDATES
from hal_cuda.plugin import MANIFEST
from hal_cuda.provider import TritonProvider, arch_of, tuning
from hal_triton.tune.tuner import TritonTuner

TUNER: Final[Tuner] = TritonTuner(
    MANIFEST.name,
    f"{__name__}:TUNER",
    MANIFEST.offers,
    arch_of,
    tuning,
    TritonProvider,
    candidates=CANDIDATES,
)
