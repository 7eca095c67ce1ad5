"""The conformance kit in the interpreter, with the tables of each kind of AMD arch.

`support.rocm_kit` says which of its tests run; all do where HAL_ROCM_KIT is "whole".
"""

from hal.testing import ProviderSuite
from support import rocm


class TestMatrixCores(ProviderSuite):
    provider = "rocm.triton"
    registry = rocm.registry("gfx942")
    stand_in = "cpu"


class TestWaveMatrix(ProviderSuite):
    """What is configured or multiplied in another way than with matrix cores."""

    provider = "rocm.triton"
    registry = rocm.registry("gfx1100", *rocm.apart("gfx1100", "gfx942"))
    stand_in = "cpu"
