"""The forms of the kernels: what each is compiled with, and where it is kept once it is loaded."""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Final

import torch

from hal_cuda.hopper.driver import Kernel, driver
from hal_cuda.hopper.nvrtc import Program, compiled

_FOLDER: Final = Path(__file__).parent
_REGISTERS: Final[Mapping[int, Mapping[str, int]]] = {
    2: {"NSOLVE": 1, "CONS_REGS": 176, "PREP_REGS": 80, "SOLVE_REGS": 80},
    1: {"NSOLVE": 1, "CONS_REGS": 208, "PREP_REGS": 104, "SOLVE_REGS": 96},
}
"""By consuming groups: the groups that solve, and the registers of a thread of each role."""

_LOADING: Final[Mapping[int, Mapping[str, int]]] = {
    2: {"CONS_REGS": 232, "LOAD_REGS": 40},
    1: {},
}
"""The same where chunks are prepared, so that a group has nothing to do but load."""

PREFILL: Final = "gdn_prefill"
PREPARE: Final = "gdn_prepare"
PREPARE_CHANNELS: Final = "kda_prepare"
JOIN: Final = "gdn_join"
"""Names of the kernels, which are those of their sources too."""

READY, CHANNEL, SAFE = 1, 2, 3
"""Kinds of gate of a channel, as chunk.cuh numbers them; 0 is one decay a head, ready or not."""

SHARED: Final = "{}_shared"
"""The int of a kernel's module that says how much shared memory a block takes."""


@dataclass(frozen=True, slots=True)
class Form:
    """A kernel and the definitions that it is compiled with."""

    name: str
    defines: tuple[tuple[str, int], ...] = ()

    def source(self) -> Program:
        """The kernel's source and headers."""
        return Program.read(_FOLDER / f"{self.name}.cu")


@dataclass(frozen=True, slots=True)
class Variant:
    """What a prefill is compiled for.

    With 2 `consumers` a block walks a whole head, with 1 half of one. `prepared`, chunks are
    prepared by a kernel of their own, all at once.
    """

    consumers: int
    track: bool = False
    ready: bool = False
    wide_a: bool = False
    wide_b: bool = False
    l2: bool = True
    prepared: bool = False
    channel: int = 0

    def walk(self) -> Form:
        """The kernel that holds the states."""
        roles = (_LOADING if self.prepared else _REGISTERS)[self.consumers]
        own = {"PREPARED": int(self.prepared), "NCONS": self.consumers, "TRACK": int(self.track)}
        return Form(PREFILL, (*own.items(), *roles.items(), *self._inputs()))

    def prepare(self) -> Form:
        """The kernel that prepares chunks."""
        return Form(PREPARE_CHANNELS if self.channel else PREPARE, self._inputs())

    def join(self) -> Form:
        """The kernel that makes the states between parts; it reads no input."""
        return Form(JOIN, Variant(1)._inputs())

    def forms(self) -> tuple[Form, ...]:
        """Every kernel that a prefill may launch."""
        if not self.prepared:
            return (self.walk(),)
        return self.walk(), self.prepare(), self.join()

    def programs(self, rows: int, heads: int) -> int:
        """Blocks of the one launch: those of every row, and those that clear the pads."""
        return (rows + 1) * heads * (2 // self.consumers)

    def _inputs(self) -> tuple[tuple[str, int], ...]:
        return (
            ("GATE_READY", int(self.ready)),
            *(("A_F32", int(self.wide_a)), ("B_F32", int(self.wide_b)), ("USE_L2", int(self.l2))),
            *(("CHANNEL", int(self.channel > 0)), ("GATE", self.channel)),
        )


COMMON: Final = tuple(
    Variant(n, track, prepared=prepared, channel=channel)
    for n, prepared, channel in (
        *((2, False, 0), (1, False, 0), (1, True, 0)),
        *((n, True, gate) for gate in (CHANNEL, SAFE) for n in (2, 1)),
    )
    for track in (False, True)
)
"""What layers of models need: raw gates in bfloat16, unit queries and keys."""


class Kernels:
    """Loaded forms by device; what is loaded stays."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[Form, int], Kernel] = {}
        self._lock = Lock()

    def get(self, form: Form, index: int) -> Kernel:
        """A form on a device; the first call compiles and loads it, which capture does not allow.

        Raises `CompileError` or `DriverError` where that fails.
        """
        kernel = self._loaded.get((form, index))
        return kernel or self._load(form, index)

    def warm(self, variants: Iterable[Variant], index: int) -> None:
        """Compile all forms side by side and load them."""
        forms = tuple(dict.fromkeys(form for variant in variants for form in variant.forms()))
        with ThreadPoolExecutor(len(forms)) as pool:
            list(pool.map(_cubin, forms))
        for form in forms:
            self.get(form, index)

    def _load(self, form: Form, index: int) -> Kernel:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"cuda.hopper: {form} is not loaded yet and a graph is being captured: call "
                f"warmup() or run the operation once before"
            )
        with self._lock:
            if (form, index) not in self._loaded:
                kernel = driver().load(_cubin(form), form.name, SHARED.format(form.name), index)
                self._loaded[form, index] = kernel
        return self._loaded[form, index]


def _cubin(form: Form) -> bytes:
    return compiled(form.source(), dict(form.defines))


KERNELS: Final = Kernels()
"""Of this process: every provider and layer shares them."""
