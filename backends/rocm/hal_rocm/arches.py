"""The arches that the provider is built for, and what a workgroup may take of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

_KIB: Final = 1024
_THREADS: Final = 1024
"""Most threads of a workgroup, on every arch."""


@dataclass(frozen=True, slots=True)
class Arch:
    """Threads of a wave, bytes of LDS of a workgroup, and the kind of matrix instructions.

    `wmma` takes operands of 16 bits alone; `mfma` takes float32 too.
    """

    wave: int
    lds: int
    unit: Literal["mfma", "wmma"]

    @property
    def warps(self) -> int:
        """Most waves of a workgroup."""
        return _THREADS // self.wave


_CDNA: Final = Arch(64, 64 * _KIB, "mfma")
_RDNA: Final = Arch(32, 64 * _KIB, "wmma")

ARCHES: Final[Mapping[str, Arch]] = {
    "gfx90a": _CDNA,
    "gfx942": _CDNA,
    "gfx950": Arch(64, 160 * _KIB, "mfma"),
    "gfx1100": _RDNA,
    "gfx1151": _RDNA,
    "gfx1201": _RDNA,
}
"""By whole name: gfx1250 is no relative of gfx1201."""
