"""One file per group of families; `FAMILIES` maps a text model_type to how it is read."""

from collections.abc import Mapping
from typing import Final

from hal.model.build import Family
from hal.model.families import (
    bamba,
    kimi,
    lfm,
    mamba,
    minimax,
    nemotron,
    qwen,
    unserved,
    zamba,
    zaya,
)

GROUPS: Final = (bamba, kimi, lfm, mamba, minimax, nemotron, qwen, unserved, zamba, zaya)

FAMILIES: Final[Mapping[str, Family]] = {
    model_type: family for group in GROUPS for model_type, family in group.FAMILIES.items()
}
