"""The forms of the kernel: what each is compiled with, and where it is kept once it is loaded."""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Final

import torch

from hal_cuda.hopper.driver import Kernel, driver
from hal_cuda.hopper.nvrtc import Program, compiled

_SOURCE: Final = Path(__file__).with_name("gdn_prefill.cu")
_REGISTERS: Final[Mapping[int, Mapping[str, int]]] = {
    2: {"NSOLVE": 1, "CONS_REGS": 176, "PREP_REGS": 80, "SOLVE_REGS": 80},
    1: {"NSOLVE": 1, "CONS_REGS": 208, "PREP_REGS": 104, "SOLVE_REGS": 96},
}
"""By consuming groups: the groups that solve, and the registers of a thread of each role."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A form of the kernel. With 2 `consumers` a block walks a whole head, with 1 half of one."""

    consumers: int
    track: bool = False
    ready: bool = False
    wide_a: bool = False
    wide_b: bool = False
    l2: bool = True

    def defines(self) -> dict[str, int]:
        """What the source is compiled with."""
        return {
            **{"NCONS": self.consumers, **_REGISTERS[self.consumers]},
            **{"TRACK": int(self.track), "GATE_READY": int(self.ready)},
            **{"A_F32": int(self.wide_a), "B_F32": int(self.wide_b), "USE_L2": int(self.l2)},
        }

    def programs(self, rows: int, heads: int) -> int:
        """Blocks of a launch: those of every row, and those that clear the pads."""
        return (rows + 1) * heads * (2 // self.consumers)


COMMON: Final = tuple(Variant(n, track) for n in (2, 1) for track in (False, True))
"""Forms of the layers that models have: raw gates in bfloat16, unit queries and keys."""


def source() -> Program:
    """The kernel's source and headers."""
    return Program.read(_SOURCE)


class Kernels:
    """Loaded forms by device; what is loaded stays."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[Variant, int], Kernel] = {}
        self._lock = Lock()

    def get(self, variant: Variant, index: int) -> Kernel:
        """A form on a device; the first call compiles and loads it, which capture does not allow.

        Raises `CompileError` or `DriverError` where that fails.
        """
        kernel = self._loaded.get((variant, index))
        return kernel or self._load(variant, index)

    def warm(self, variants: Iterable[Variant], index: int) -> None:
        """Compile forms side by side and load them."""
        variants = tuple(variants)
        program = source()
        with ThreadPoolExecutor(len(variants)) as pool:
            list(pool.map(lambda variant: compiled(program, variant.defines()), variants))
        for variant in variants:
            self.get(variant, index)

    def _load(self, variant: Variant, index: int) -> Kernel:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"cuda.hopper: {variant} is not loaded yet and a graph is being captured: call "
                f"warmup() or run the operation once before"
            )
        with self._lock:
            if (variant, index) not in self._loaded:
                cubin = compiled(source(), variant.defines())
                kernel = driver().load(cubin, "gdn_prefill", "gdn_prefill_shared", index)
                self._loaded[variant, index] = kernel
        return self._loaded[variant, index]


KERNELS: Final = Kernels()
"""Of this process: every provider and layer shares them."""
