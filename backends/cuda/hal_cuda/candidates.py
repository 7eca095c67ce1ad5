"""What `hal tune` tries on NVIDIA beside what it tries on any device."""

from collections.abc import Mapping, Sequence
from typing import Final

from hal_triton.tune.candidates import CANDIDATES as ANYWHERE
from hal_triton.tuning import Config

_STEPS: Final = (
    "delta_rule.decode",
    "delta_rule.decode_fused",
    "delta_rule.decode_fused.norm",
    "delta_rule.decode_fused.channel",
)
_LIMITED: Final = [
    Config({"BV": tile}, warps=1, registers=registers)
    for tile, registers in ((8, 64), (8, 80), (16, 112), (16, 128), (32, 208), (32, 232))
]

CANDIDATES: Final[Mapping[str, Sequence[Config]]] = {
    **ANYWHERE,
    **{name: [*ANYWHERE[name], *_LIMITED] for name in _STEPS},
}
"""Candidates by the name of a table; steps also with fewer registers a thread."""
