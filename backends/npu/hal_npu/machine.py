"""Look for an Ascend device in an order that harms no process: every step may be the last.

torch-npu without its libraries makes `import torch` raise, and a second import raises too. So
libraries are loaded first, by name, and nothing is imported before they are there.
"""

import ctypes
import importlib
import re
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from hal_registry import Code, Failure, Presence, Reason, attempt

LIBRARIES: Final = ("libascendcl.so", "libhccl.so", "libascend_hal.so")
"""Shared libraries of CANN and of the driver that torch-npu links."""

SOCS: Final = (
    (range(200, 206), "ascend310p"),
    (range(220, 226), "ascend910b"),
    (range(250, 256), "ascend910_93"),
    (range(260, 261), "ascend950"),
)
"""Numbers of `get_soc_version` and the arch that they stand for."""

EXTENSION: Final = "triton.language.extra.cann.extension"
"""A module of triton-ascend that the vendor's kernels import, and plain triton has not."""


def absent() -> Iterator[Reason]:
    """What keeps this process from using an NPU, the first finding first; imports torch last."""
    if find_spec("torch_npu") is None:
        yield Reason(
            Code.LIBRARY_MISSING, "torch-npu", "the module torch_npu", "none", fix=_INSTALL
        )
        return
    missing = {name: found for name in LIBRARIES if (found := _unloadable(name))}
    for name, text in missing.items():
        yield Reason(Code.LIBRARY_MISSING, name, "CANN", "no such library", text, _CANN)
    if not missing:
        yield from _second_accelerator()


_INSTALL: Final = "pip install torch-npu for your torch, and CANN for it"
_CANN: Final = "install CANN and source its set_env.sh before starting the process"


def _unloadable(name: str) -> str:
    found = attempt(lambda: ctypes.CDLL(name))
    return found.text[:200] if isinstance(found, Failure) else ""


def _second_accelerator() -> Iterator[Reason]:
    """torch-npu refuses to stand beside a CUDA torch that sees a GPU, from within its import."""
    seen = attempt(_cuda_devices)
    if not isinstance(seen, Failure) and seen:
        yield Reason(
            Code.DEVICE_ABSENT,
            "npu",
            "a process without CUDA",
            f"torch for CUDA, which sees {seen} device{'s' if seen > 1 else ''}",
            "torch-npu refuses a second accelerator in one process",
            "install torch without CUDA, or hide the GPUs with CUDA_VISIBLE_DEVICES=''",
        )


def _cuda_devices() -> int:
    """How many GPUs torch would see, asked without importing it where it is not imported yet."""
    if torch := sys.modules.get("torch"):
        return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0
    spec = find_spec("torch")
    places = [] if spec is None else spec.submodule_search_locations or []
    text = "".join((Path(place) / "version.py").read_text() for place in places)
    if re.search(r"^cuda\b.*= *['\"]", text, re.MULTILINE) is None:
        return 0
    driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def device(index: int) -> Presence | Reason:
    """The device, once `absent` has found nothing; torch and torch-npu are imported here."""
    imported = attempt(partial(importlib.import_module, "torch_npu"))
    if isinstance(imported, Failure):
        text = imported.text[:200]
        return Reason(Code.LIBRARY_MISSING, "torch-npu", "an import", "an error", text, _INSTALL)
    found = attempt(lambda: _count(index, imported))
    if isinstance(found, Failure):
        return Presence(0, detail=found.text[:200])
    return found


def _count(index: int, torch_npu: ModuleType) -> Presence:
    npu: Any = importlib.import_module("torch").npu
    count = int(npu.device_count()) if npu.is_available() else 0
    if index >= count:
        return Presence(count, detail=f"torch-npu sees {count} devices")
    number = int(torch_npu.npu.get_soc_version())
    return Presence(count, soc(number), f"{npu.get_device_name(index)}, SoC {number}")


def soc(number: int) -> str:
    """The arch of a SoC number, or a name that no manifest has."""
    return next((name for numbers, name in SOCS if number in numbers), f"soc_{number}")


def unimportable() -> Iterator[Reason]:
    """The vendor's package and the compiler that its kernels need, tried in this order."""
    for name, module in (("sgl-kernel-npu", "sgl_kernel_npu"), ("triton-ascend", EXTENSION)):
        found = attempt(partial(importlib.import_module, module))
        if isinstance(found, Failure):
            text, fix = found.text[:200], f"install a build of {name} for this CANN and torch-npu"
            yield Reason(Code.LIBRARY_MISSING, name, f"the module {module}", "an error", text, fix)
            return
