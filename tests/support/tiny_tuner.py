"""A tuner over little shapes that other processes can import."""

from collections.abc import Mapping

from hal.bench.shapes import CARD, Shape, gdn
from hal_cuda.plugin import OFFERS
from hal_cuda.tables import table
from hal_triton.kernels.math import silu
from hal_triton.provider import TritonProvider
from hal_triton.tune.classes import Class
from hal_triton.tune.tuner import TritonTuner
from hal_triton.tuning import UNBOUNDED, Config, Tuning
from support import triton_interpreter

NAME = "delta_rule.decode"
TILES = (Config({"BV": 8}), Config({"BV": 16}))
SHAPE = Shape(NAME, "B2", gdn(1, 16), (1, 1), CARD)
GUARD = Shape(NAME, "guard", gdn(1, 16), (1,), CARD)


def build(device: str, options: Mapping[str, object]) -> TritonProvider:
    """The kernels on the CPU, where an interpreter runs them, in another process too."""
    triton_interpreter.apply(fp32_dot="tf32")
    return TritonProvider("cpu", options)


TUNER = TritonTuner(
    "cuda.triton",
    "support.tiny_tuner:TUNER",
    OFFERS,
    lambda device: "sm_90",
    lambda arch: Tuning(table(arch), silu, silu),
    build,
    (Class(NAME, 8, SHAPE), Class(NAME, UNBOUNDED, SHAPE, guards=(GUARD,))),
    {NAME: TILES},
)
