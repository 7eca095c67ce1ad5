"""Child processes on a machine with an NPU, or with parts of one."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hal_npu.machine import LIBRARIES
from npu.fakes import FAKE
from support.registry import run_python

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def some_library() -> Path:
    """A shared library that this process has loaded, to copy under another name."""
    paths = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines())
    return next(Path(path) for path in paths if path.startswith("/") and "libc.so" in path)


def cann(place: Path, names: Sequence[str] = LIBRARIES) -> Path:
    """A folder with shared libraries of CANN's names."""
    folder = place / "cann"
    folder.mkdir(exist_ok=True)
    for name in names:
        shutil.copy(some_library(), folder / name)
    return folder


def path_with(*packages: Path) -> str:
    """The path of a child: these packages, then what this process was given."""
    return os.pathsep.join(filter(None, (*map(str, packages), os.environ.get("PYTHONPATH"))))


def on_machine(code: str, libraries: Path | None, *packages: Path, **environment: str) -> str:
    """What code prints where these packages and libraries are; a failure shows its traceback."""
    path = path_with(*(packages or (FAKE,)))
    given = {"PYTHONPATH": path, "LD_LIBRARY_PATH": str(libraries or ""), **NO_GPU, **environment}
    ran: subprocess.CompletedProcess[str] = run_python(code, **given)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
