"""Run host launchers with no GPU: kernels are compiled for a target instead of launched.

A Triton wheel carries ptxas, lld and the AMD bitcode, so one CPU machine reaches every arch. Inside
`capture` each `kernel[grid](...)` compiles with the specialisation of its real arguments and is
recorded with what it would use, and nothing runs. What this cannot say: whether the numbers are
right, and how fast they come. Not for a process with TRITON_INTERPRET set.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from support.sass import machine_code, waits_first

_KIB = 1024
SHARED_LIMIT = {
    "cuda:80": 163 * _KIB,
    "cuda:86": 99 * _KIB,
    "cuda:89": 99 * _KIB,
    "cuda:90": 227 * _KIB,
    "cuda:100": 227 * _KIB,
    "cuda:120": 99 * _KIB,
    "hip:gfx90a": 64 * _KIB,
    "hip:gfx942": 64 * _KIB,
    "hip:gfx950": 160 * _KIB,
    "hip:gfx1100": 64 * _KIB,
    "hip:gfx1151": 64 * _KIB,
    "hip:gfx1201": 64 * _KIB,
}
"""Bytes of shared memory or LDS that a block may use, by vendor specification."""


_AHEAD = re.compile(r"\b(ld|st|atom|red|cp)\.(?!param)|@!?%p|\b(bra|call|ret)\b")
"""What may not be ahead of a wait: memory, and whatever could lead around it."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """One launch that did not happen: name, grid, and bytes or registers that it would use."""

    name: str
    grid: tuple[int, ...]
    target: str
    shared: int
    spills: int
    kernel: Any

    @property
    def problems(self) -> list[str]:
        """Why it could not be launched, or should not be."""
        limit, found = SHARED_LIMIT[self.target], []
        if self.shared > limit:
            found.append(f"{self.name} needs {self.shared} bytes, {self.target} has {limit}")
        if self.spills:
            found.append(f"{self.name} spills {self.spills} on {self.target}")
        if self.early != self.waits:
            found.append(f"{self.name} on {self.target}: early is {self.early}, waits {self.waits}")
        return found

    @property
    def early(self) -> bool:
        """Whether it may start before the kernel ahead of it has ended."""
        return bool(getattr(self.kernel.metadata, "launch_pdl", False))

    @property
    def waits(self) -> bool:
        """Whether each of its threads waits for that end before it touches memory."""
        before, wait, _ = self.assembly.partition("griddepcontrol.wait")
        return bool(wait) and not _AHEAD.search(before)

    @property
    def machine_waits(self) -> bool:
        """The same of what the assembler made, which may move what does not depend on a wait."""
        return waits_first(machine_code(self.kernel.asm["cubin"]))

    @property
    def assembly(self) -> str:
        """PTX or AMDGCN text."""
        text: str = self.kernel.asm["ptx" if "ptx" in self.kernel.asm else "amdgcn"]
        return text


def parse_target(name: str) -> GPUTarget:
    """`cuda:90` or `hip:gfx942` as a GPUTarget; a wave has 64 lanes on gfx9, else 32."""
    backend, _, arch = name.partition(":")
    if backend == "cuda":
        return GPUTarget("cuda", int(arch), 32)
    return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)


class FakeDriver:
    """The least that Triton asks of a driver before it compiles; it cannot launch."""

    launcher_cls = object

    def __init__(self, target: GPUTarget, device: int) -> None:
        self.target, self.device = target, device

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return self.target

    def get_current_device(self) -> int:
        """A number of its own for each capture: kernels cache what they compiled by it."""
        return self.device

    def get_current_stream(self, device: int | None = None) -> int:
        """Any stream will do."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where the launcher's tensors are."""
        return torch.device("cpu")


_numbers = itertools.count(1000)  # clear of real device numbers


@contextlib.contextmanager
def capture(target: str) -> Iterator[list[Compiled]]:
    """Compile for `target` every kernel that is launched inside, and give them in order."""
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: compile in another process")
    found: list[Compiled] = []
    run, previous = JITFunction.run, driver._active

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        spills = _spills(kernel, log.getvalue())
        shared = int(kernel.metadata.shared)
        found.append(Compiled(self.fn.__name__, tuple(grid), target, shared, spills, kernel))
        return kernel

    driver.set_active(FakeDriver(parse_target(target), next(_numbers)))
    JITFunction.run = compile_only
    try:
        with triton.knobs.nvidia.scope(), triton.knobs.compilation.scope():
            triton.knobs.nvidia.dump_ptxas_log = True  # the only place that names spill bytes
            if target.startswith("cuda"):
                triton.knobs.compilation.always_compile = True  # a cached kernel prints no log
            yield found
    finally:
        JITFunction.run = run
        driver._active = previous


def compile_all(target: str, *calls: Callable[[], object]) -> list[Compiled]:
    """What the calls would launch on a target."""
    with capture(target) as found:
        for call in calls:
            call()
    return found


def _spills(kernel: Any, log: str) -> int:
    """What does not fit: bytes on CUDA, vector registers and bytes of scratch on AMD.

    A kernel that is launched twice logs once. AMD's scalar registers go to lanes of vector ones.
    """
    if "ptx" in kernel.asm:
        return sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log))
    names = r"\.(?:vgpr_spill_count|private_segment_fixed_size):\s+(\d+)"
    counts = re.findall(names, kernel.asm["amdgcn"])
    return sum(int(n) for n in counts)
