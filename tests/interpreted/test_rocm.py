"""The conformance kit in the interpreter, with the tables of each kind of AMD arch."""

from hal.testing import ProviderSuite
from support import rocm


class TestMatrixCores(ProviderSuite):
    provider = "rocm.triton"
    registry = rocm.registry("gfx942")
    stand_in = "cpu"


class TestWaveMatrix(ProviderSuite):
    provider = "rocm.triton"
    registry = rocm.registry("gfx1100")
    stand_in = "cpu"
