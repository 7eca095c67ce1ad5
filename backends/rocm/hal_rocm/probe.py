"""Look for AMD devices by what torch was built for and by their arch, without ever raising.

Capability numbers are never asked for: an MI200 has those of an NVIDIA H100. Triton is looked for
as a module, since ROCm's builds of it come from distributions of several names.
"""

import importlib
import re
from functools import partial
from typing import Final

from hal_registry import Code, Failure, Presence, Reason, attempt
from hal_triton.table_file import notes

NEEDED: Final = (3, 6)
"""The oldest Triton that the kernels are compiled with."""

NAMELESS: Final = "without a name"
"""The arch of a device that does not say which it is: one that no manifest has."""


def presence(index: int | None) -> Presence | Reason:
    """How many devices torch reaches, and the arch of the one asked for, such as "gfx942"."""
    found = attempt(partial(_found, index or 0))
    if isinstance(found, Failure):  # a broken driver or torch is a device that is not there
        return Presence(0, detail=found.text[:200])
    return (_triton() if found.arch else None) or found


def _found(index: int) -> Presence:
    """What torch says, which is imported here."""
    from torch import cuda, version

    if not version.hip:
        built = "without ROCm" if version.cuda is None else f"for CUDA {version.cuda}"
        return Presence(0, detail=f"torch was built {built}")
    count = cuda.device_count() if cuda.is_available() else 0
    detail = f"torch for ROCm {version.hip}"
    if index >= count:
        return Presence(count, detail=f"{detail} sees {count} devices")
    name: str = cuda.get_device_properties(index).gcnArchName  # features follow behind a colon
    return Presence(count, name.partition(":")[0].strip() or NAMELESS, detail, notes())


def _triton() -> Reason | None:
    """Why the kernels cannot be compiled here, if they cannot."""
    needed, fix = "triton>=3.6", "install the Triton that belongs to your torch for ROCm"
    module = attempt(partial(importlib.import_module, "triton"))
    if isinstance(module, Failure):
        gone = isinstance(module.error, ModuleNotFoundError) and module.error.name == "triton"
        seen, text = ("not installed", "") if gone else ("an error", module.text[:200])
        return Reason(Code.LIBRARY_MISSING, "triton", needed, seen, text, fix)
    version = attempt(lambda: str(module.__version__))
    numbers = re.match(r"(\d+)(?:\.(\d+))?", "" if isinstance(version, Failure) else version)
    if numbers and tuple(int(n or 0) for n in numbers.groups()) >= NEEDED:
        return None
    seen = "no version" if isinstance(version, Failure) else f"version {version!r}"
    return Reason(Code.LIBRARY_VERSION, "triton", needed, seen, fix=fix)
