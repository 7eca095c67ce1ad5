"""The Triton provider on AMD GPUs."""

from collections.abc import Mapping
from typing import Final

from hal_registry import Presence
from hal_rocm.arches import ARCHES
from hal_rocm.probe import presence
from hal_rocm.tables import table
from hal_triton import provider as shared
from hal_triton.kernels.math import silu
from hal_triton.table_file import given
from hal_triton.tuning import Tuning

TIGHTEST: Final = "gfx1100"
"""The arch whose table is taken where there is no device, as in Triton's interpreter."""


class TritonProvider(shared.TritonProvider):
    """The shared kernels with the tables of the device's arch.

    Float32 products are never left to the compiler's choice, which is truncating on gfx942.
    """

    def __init__(self, device: str, options: Mapping[str, object]) -> None:
        if device.partition(":")[0] != "rocm":
            raise ValueError(f"rocm.triton: device is {device!r}, expected 'rocm' or 'rocm:N'")
        if "tuning" not in options:
            options = {**options, "tuning": tuning(arch_of(device))}
        super().__init__(device, options)


def arch_of(device: str) -> str:
    """The arch of a device such as "rocm:0", or `TIGHTEST` where there is none."""
    index = device.partition(":")[2]
    found = presence(int(index) if index else None)
    return (found.arch if isinstance(found, Presence) else "") or TIGHTEST


def tuning(arch: str) -> Tuning:
    """What an arch is tuned with: the shipped table, under a file that the environment names.

    RDNA multiplies 16-bit operands alone: there the chunk solve takes three bfloat16 products. In a
    verify those fit no registers on Triton 3.6, so that what is float32 there is vector code.
    """
    entries = given(table(arch), arch)
    if ARCHES[arch].unit == "mfma":
        return Tuning(entries, silu, silu, "ieee")
    return Tuning(entries, silu, silu, "bf16x3", drafts=("ieee", "ieee"))
