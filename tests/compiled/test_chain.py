"""A kernel starts before the one ahead of it has ended if and only if it waits for that end."""

import ast
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import hal_triton
from hal_cuda.kernels.math import silu_tanh
from hal_cuda.tables import table
from hal_rocm.provider import TritonProvider as RocmProvider
from hal_rocm.provider import tuning
from hal_triton.delta_rule.kernels.decode import delta_decode
from hal_triton.kernels.math import silu
from hal_triton.launch import CHAINED, Launch
from hal_triton.provider import TritonProvider
from hal_triton.tuning import Tuning
from support import rocm_gate as steps
from support.sass import waits_first
from support.triton_aot import Compiled, FakeDriver, compile_all

BACKENDS = Path(hal_triton.__file__).parents[2]
CHAINING = ("90", "100", "120")
PLAIN = ("cuda:89", "hip:gfx942")


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every Triton function of every distribution, with its file."""
    for path in sorted(BACKENDS.glob("*/hal_*/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any(map(is_jit, node.decorator_list)):
                yield path.name, node


def is_jit(mark: ast.expr) -> bool:
    """Whether a decorator is `triton.jit`, with or without arguments."""
    return ast.unparse(mark).partition("(")[0] == "triton.jit"


def body(node: ast.FunctionDef) -> list[str]:
    """The statements without the docstring."""
    texts = [ast.unparse(each) for each in node.body]
    return texts[1:] if ast.get_docstring(node) is not None else texts


KERNELS = [(file, node) for file, node in functions() if node.name != "chain"]
WAITING = {node.name for _, node in KERNELS if CHAINED in {each.arg for each in node.args.args}}


@pytest.mark.parametrize(("file", "node"), KERNELS, ids=lambda each: getattr(each, "name", each))
def test_what_may_start_early_waits_first_and_nothing_else_waits(
    file: str, node: ast.FunctionDef
) -> None:
    """The launcher goes by the name of the constant, so a kernel with it has to wait, once."""
    waits = [text for text in body(node) if "chain(" in text or "gdc_" in text]
    assert waits == ([f"chain({CHAINED})"] if node.name in WAITING else [])
    assert body(node)[: len(waits)] == waits


def provider(target: str) -> TritonProvider:
    """The provider as the vendor of a target ships it, on tensors that stay on the host."""
    vendor, _, arch = target.partition(":")
    if vendor == "hip":
        return RocmProvider("rocm", {"tuning": tuning(arch)})
    shipped = Tuning(table(f"sm_{arch}"), silu, silu_tanh, "tf32")
    return TritonProvider("cpu", {"tuning": shipped})


def launched(target: str) -> list[Compiled]:
    """What all steps launch on a target."""
    ours, parts = provider(target), (steps.convolutions, steps.delta_steps, steps.drafts)
    every = (run for part in (*parts, steps.scans) for run in part(ours, torch.bfloat16))
    return compile_all(target, *every)


def names(kernels: Iterable[Compiled]) -> set[str]:
    return {kernel.name for kernel in kernels}


@pytest.mark.parametrize("arch", CHAINING)
def test_every_step_starts_early_and_waits_in_assembly_and_in_machine_code(arch: str) -> None:
    kernels = launched(f"cuda:{arch}")
    assert names(each for each in kernels if each.early) == WAITING
    assert not names(each for each in kernels if each.waits is not each.early)
    once = {each.name: each for each in kernels}.values()
    assert names(each for each in once if each.machine_waits) == WAITING


@pytest.mark.parametrize("target", PLAIN)
def test_nothing_starts_early_or_waits_where_the_device_cannot(target: str) -> None:
    kernels = launched(target)
    assert names(kernels) >= WAITING
    assert not names(each for each in kernels if each.early)
    assert not names(each for each in kernels if "griddepcontrol" in each.assembly)


PTX = {
    "ld.param.u64 %rd1, [k_param_0];\ngriddepcontrol.wait;\nld.global.b32 %r1, [%rd1];": True,
    "ld.global.b32 %r1, [%rd1];\ngriddepcontrol.wait;": False,
    "st.global.b32 [%rd1], %r1;\ngriddepcontrol.wait;": False,
    "@%p1 bra $L__BB0_2;\ngriddepcontrol.wait;": False,
    "@!%p1 griddepcontrol.wait;": False,
    "ret;\ngriddepcontrol.wait;": False,
    "griddepcontrol.launch_dependents;": False,
}


@pytest.mark.parametrize("text", PTX)
def test_a_wait_counts_where_nothing_is_ahead_and_nothing_leads_around_it(text: str) -> None:
    kernel = SimpleNamespace(asm={"ptx": text}, metadata=SimpleNamespace(launch_pdl=True))
    found = Compiled("k", (1,), "cuda:90", 0, 0, kernel)
    assert (found.waits, bool(found.problems)) == (PTX[text], not PTX[text])


WAIT = "/*0040*/ ACQBULK ;"
SASS = {
    f"LDC.64 R4, c[0x0][0x250] ;\n@P0 IMAD R1, R2, R3, R4 ;\n{WAIT}\nLDG.E R4, [R4] ;": True,
    f"LDG.E R4, desc[UR8][R4.64] ;\n{WAIT}": False,
    f"STG.E [R4.64], R4 ;\n{WAIT}": False,
    f"@!P0 BRA `(.L_x_0) ;\n{WAIT}": False,
    f"@P1 EXIT ;\n{WAIT}": False,
    f"@P1 {WAIT}": False,
    f"UTMALDG.4D [UR4], [UR6] ;\n{WAIT}": False,
    "LDG.E R4, [R4] ;": False,
}


@pytest.mark.parametrize("code", SASS)
def test_a_wait_of_machine_code_counts_where_nothing_leads_around_it(code: str) -> None:
    assert waits_first(code) == SASS[code]


class Machine(FakeDriver):
    """Cards of different arches in one machine; Triton compiles for the current one."""

    def __init__(self, *targets: GPUTarget) -> None:
        super().__init__(targets[0], 0)
        self.targets = targets

    def get_current_target(self) -> GPUTarget:
        return self.targets[self.device]

    @contextmanager
    def current(self, index: int) -> Iterator[None]:
        """Stands in for `torch.cuda.device`."""
        before, self.device = self.device, index
        yield
        self.device = before


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(GPUTarget("cuda", 90, 32), GPUTarget("cuda", 80, 32))
    monkeypatch.setattr(torch.cuda, "device", made.current)
    monkeypatch.setattr(triton.runtime.driver, "_active", made)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    return made


def launch_on(index: int) -> Launch:
    """A launch of a kernel that may wait, as it is planned for a card."""
    names = delta_decode.arg_names
    constants = {name: 1 for name in names[-4:-1]}
    return Launch(delta_decode, 1, (), constants, {"num_warps": 1}, torch.device("cuda", index))


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize(("index", "can"), [(0, True), (1, False)])
def test_the_card_of_the_tensors_decides_whether_a_launch_is_early(
    machine: Machine, index: int, can: bool, current: int
) -> None:
    """Not the current one: the other card's compiler knows no wait, or nothing comes early."""
    machine.device = current
    made = launch_on(index)
    assert made._tail[-1] is can
    assert made._options.get("launch_pdl", False) is can
    assert machine.device == current


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0"])
def test_an_unknown_triton_launches_on_the_card_of_the_tensors(
    machine: Machine, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    seen: list[tuple[int, bool, bool]] = []

    def run(self: Any, *args: Any, **options: Any) -> None:
        seen.append((machine.device, options.get("launch_pdl", False), options[CHAINED]))

    monkeypatch.setattr(JITFunction, "run", run)
    for index in (0, 1):
        launch_on(index)(torch.zeros(1))
    assert seen == [(0, True, True), (1, False, False)]
