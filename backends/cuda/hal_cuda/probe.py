"""Look for NVIDIA devices without ever raising."""

from hal_registry import Presence
from hal_triton.table_file import notes


def presence(index: int | None) -> Presence:
    """How many devices torch reaches, and the arch of the one asked for, such as "sm_90"."""
    try:
        return _found(index or 0)
    except Exception as error:  # a broken driver or torch is a device that is not there
        return Presence(0, detail=f"{type(error).__name__}: {error}"[:200])


def _found(index: int) -> Presence:
    """What torch says, which is imported here."""
    from torch import cuda, version

    if version.hip:
        return Presence(0, detail=f"torch was built for ROCm {version.hip}")
    if version.cuda is None:
        return Presence(0, detail="torch was built without CUDA")
    count = cuda.device_count() if cuda.is_available() else 0
    if index >= count:
        return Presence(count, detail=f"torch for CUDA {version.cuda} sees {count} devices")
    major, minor = cuda.get_device_capability(index)
    return Presence(count, f"sm_{major}{minor}", f"torch for CUDA {version.cuda}", notes())
