"""Look for AMD devices by what torch was built for and by their arch, without ever raising.

Capability numbers are never asked for: an MI200 has those of an NVIDIA H100. Triton is looked for
as a module, since ROCm's builds of it come from distributions of several names.
"""

from importlib.util import find_spec
from typing import Final

from hal_registry import Code, Presence, Reason

NEEDED: Final = (3, 6)
"""The oldest Triton that the kernels are compiled with."""


def presence(index: int | None) -> Presence | Reason:
    """How many devices torch reaches, and the arch of the one asked for, such as "gfx942"."""
    try:
        found = _found(index or 0)
        return (_triton() if found.arch else None) or found
    except Exception as error:  # a broken driver or torch is a device that is not there
        return Presence(0, detail=f"{type(error).__name__}: {error}"[:200])


def _found(index: int) -> Presence:
    """What torch says, which is imported here."""
    from torch import cuda, version

    if version.hip is None:
        built = "without ROCm" if version.cuda is None else f"for CUDA {version.cuda}"
        return Presence(0, detail=f"torch was built {built}")
    count = cuda.device_count() if cuda.is_available() else 0
    detail = f"torch for ROCm {version.hip}"
    if index >= count:
        return Presence(count, detail=f"{detail} sees {count} devices")
    name: str = cuda.get_device_properties(index).gcnArchName  # features follow behind a colon
    return Presence(count, name.partition(":")[0], detail)


def _triton() -> Reason | None:
    """Why the kernels cannot be compiled here, if they cannot."""
    needed, fix = "triton>=3.6", "install the Triton that belongs to your torch for ROCm"
    if find_spec("triton") is None:
        return Reason(Code.LIBRARY_MISSING, "triton", needed, "not installed", fix=fix)
    import triton

    version = str(triton.__version__)
    major, minor = map(int, version.split(".")[:2])
    if (major, minor) >= NEEDED:
        return None
    return Reason(Code.LIBRARY_VERSION, "triton", needed, f"version {version}", fix=fix)
