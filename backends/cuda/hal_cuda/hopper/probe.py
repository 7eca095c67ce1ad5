"""Look for a Hopper device and for the compiler that its kernels need."""

from hal_cuda import probe
from hal_cuda.hopper import nvrtc
from hal_registry import Code, Presence, Reason

ARCH = "sm_90"
"""The arch whose kernels these are."""


def presence(index: int | None) -> Presence | Reason:
    """What the NVIDIA probe found; a reason where that is a Hopper device without NVRTC."""
    there = probe.presence(index)
    if there.count == 0 or there.arch != ARCH or nvrtc.found() is not None:
        return there
    return Reason(
        Code.LIBRARY_MISSING,
        subject="nvrtc",
        needed="libnvrtc of CUDA 12 or newer",
        offered="none beside torch, under CUDA_HOME or in /usr/local/cuda",
        fix="pip install nvidia-cuda-nvrtc, of the CUDA that torch was built for",
    )
