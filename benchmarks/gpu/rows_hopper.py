"""What is timed of `cuda.hopper`: whole prefills, with `cuda.triton` in the place of the floor.

The floor of these rows is the rival: both run in turn, on inputs of the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import rows as lines
import rows_kda

from hal_cuda.hopper.provider import HopperProvider
from hal_cuda.provider import TritonProvider

Call = Callable[[], object]
SHAPES: Sequence[tuple[str, Sequence[int], tuple[int, int], bool, str]] = (
    ("HV32 16x2048", [2048] * 16, (16, 32), False, "540 / 400"),
    ("HV32 mix", lines.MIX, (16, 32), False, "375 / 260"),
    ("HV32 1x8192 on the device", [8192], (16, 32), True, "265 / 180"),
    ("HV32 1x8192 eager", [8192], (16, 32), False, "300 / 210"),
    ("HV8 1x8192 on the device", [8192], (4, 8), True, "125 / 90"),
    ("HV32 2x2048", [2048] * 2, (16, 32), True, ""),
    ("HV32 3x2048", [2048] * 3, (16, 32), True, ""),
    ("HV32 4x2048", [2048] * 4, (16, 32), True, ""),
    ("HV48 1x8192", [8192], (16, 48), True, ""),
)
"""Names, lengths, heads, whether a replayed graph is timed, must and aim in microseconds."""


def prefill(ops: TritonProvider, lengths: Sequence[int], heads: tuple[int, int]) -> list[Call]:
    """The whole operation by the kernel in CUDA C++, in the form that the tuning names."""
    return lines.prefill(HopperProvider(lines.DEVICE, {"tuning": ops.tuning}), lengths, *heads)


def rival(lengths: Sequence[int], heads: tuple[int, int]) -> list[Call]:
    """The same by the shared kernels as shipped."""
    return lines.prefill(lines.provider(), lengths, *heads)


CHANNELS: Sequence[tuple[str, Sequence[int], bool, str]] = (
    ("16x2048", [2048] * 16, False, "1300 / 700"),
    ("1x8192 on the device", [8192], True, "500 / 300"),
    ("1x8192 eager", [8192], False, ""),
    ("mix", lines.MIX, False, ""),
)
"""The same of Kimi Delta Attention, 32 heads."""


def channels(ops: TritonProvider, lengths: Sequence[int]) -> list[Call]:
    """The whole operation where every channel decays, by the kernels in CUDA C++."""
    return rows_kda.prefill(HopperProvider(lines.DEVICE, {"tuning": ops.tuning}), lengths)


def slow(lengths: Sequence[int]) -> list[Call]:
    """The same by the shared kernels as shipped."""
    return rows_kda.prefill(lines.provider(), lengths)


def rows() -> list[lines.Row]:
    """Every line, those with a goal first."""
    kda = [
        lines.Row(f"hopper KDA prefill {name} (floor: cuda.triton)", partial(channels,
            lengths=lengths), floor=partial(slow, lengths),
            graph=graph, goal=goal)
        for name, lengths, graph, goal in CHANNELS
    ]  # fmt: skip
    return kda + [
        lines.Row(f"hopper prefill {name} (floor: cuda.triton)", partial(prefill, lengths=lengths,
            heads=heads), floor=partial(rival, lengths, heads), graph=graph, goal=goal)
        for name, lengths, heads, graph, goal in SHAPES
    ]  # fmt: skip
