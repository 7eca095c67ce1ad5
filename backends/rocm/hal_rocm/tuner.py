"""What `hal tune` sweeps of `rocm.triton`."""

from typing import Final

from hal.tuner import Tuner
from hal_rocm.plugin import MANIFEST
from hal_rocm.provider import TritonProvider, arch_of, tuning
from hal_triton.tune.candidates import CANDIDATES
from hal_triton.tune.tuner import TritonTuner

STAGES: Final = 2
"""Most stages that are tried: with more the compiler ends the whole process."""

TUNER: Final[Tuner] = TritonTuner(
    MANIFEST.name,
    f"{__name__}:TUNER",
    MANIFEST.offers,
    arch_of,
    tuning,
    TritonProvider,
    candidates={
        name: [config for config in configs if config.stages <= STAGES]
        for name, configs in CANDIDATES.items()
    },
)
