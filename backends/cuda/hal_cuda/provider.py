"""The Triton provider on NVIDIA GPUs."""

from collections.abc import Mapping

import torch

from hal_cuda.kernels.math import silu_tanh
from hal_cuda.tables import table
from hal_triton import provider as shared
from hal_triton.kernels.math import silu
from hal_triton.table_file import given
from hal_triton.tuning import Tuning


class TritonProvider(shared.TritonProvider):
    """The shared kernels with the tables of the device's arch.

    They take the hardware's tanh in bfloat16 results, and TF32 in the chunk solve of 16-bit
    activations.
    """

    def __init__(self, device: str, options: Mapping[str, object]) -> None:
        if torch.device(device).type != "cuda":
            raise ValueError(f"cuda.triton: device is {device!r}, expected 'cuda' or 'cuda:N'")
        super().__init__(device, {"tuning": tuning(arch_of(device)), **options})


def arch_of(device: str) -> str:
    """The arch name of a device, such as "sm_90"."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def tuning(arch: str) -> Tuning:
    """What an arch is tuned with: the shipped table, under a file that the environment names."""
    return Tuning(given(table(arch), arch), silu, silu_tanh, solve="tf32")
