"""The conformance kit in the interpreter, with the tables of each kind of AMD arch."""

from hal.testing import ProviderSuite
from support import rocm


class TestMatrixCores(ProviderSuite):
    provider = "rocm.triton"
    registry = rocm.registry("gfx942")
    stand_in = "cpu"


class TestWaveMatrix(ProviderSuite):
    """What is configured or multiplied in another way than with matrix cores."""

    provider = "rocm.triton"
    registry = rocm.registry(
        "gfx1100",
        "delta_rule.prefill",
        "delta_rule.decode_fused",
        "scan.prefill",
        "scan.verify",
        "scan.commit",
    )
    stand_in = "cpu"
