"""Every form of the kernel compiles for sm_90a without spills, and reads what the host fills."""

from collections.abc import Iterator
from ctypes import sizeof
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from itertools import product

import pytest

from hal_cuda.hopper import nvrtc
from hal_cuda.hopper.arguments import CHANNEL_RECORD, CHUNK, HALF, RECORD, Arguments
from hal_cuda.hopper.cut import CHANNELS_RESIDENT, RESIDENT, SLICES
from hal_cuda.hopper.nvrtc import CompileError, Compiler, Program
from hal_cuda.hopper.variant import (
    CHANNEL,
    COMMON,
    JOIN,
    PREFILL,
    PREPARE,
    PREPARE_CHANNELS,
    READY,
    SAFE,
    Form,
    Variant,
)
from support.sass import machine_code, waits_first

VERBOSE = "--ptxas-options=--verbose"
OTHER = [
    Variant(n, *map(bool, flags), prepared=prepared)
    for n, prepared in ((2, False), (1, False), (1, True))
    for flags in product((0, 1), (0, 1), (0, 1), (0, 1), (1, 0))
    if flags[1] or not any(flags[2:4])  # raw gates are wide where the model's are, seldom
]
CHANNELS = [
    Variant(1, ready=kind == READY, wide_a=wide, wide_b=wide, l2=l2, prepared=True, channel=kind)
    for kind in (READY, CHANNEL, SAFE)
    for wide, l2 in product((False, True), (True, False))
]
FORMS = tuple(dict.fromkeys(f for v in (*COMMON, *OTHER[::3], *CHANNELS) for f in v.forms()))


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    try:
        return nvrtc.compiler()
    except (CompileError, OSError) as missing:
        pytest.skip(f"no NVRTC: {missing}")


def options(form: Form) -> Iterator[str]:
    yield from (*nvrtc.OPTIONS, VERBOSE)
    yield from (f"--define-macro={name}={value}" for name, value in form.defines)


def compiled(compiler: Compiler, form: Form, *claims: str) -> tuple[bytes, str]:
    return compiler(checked(form.source(), *claims), tuple(options(form)))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_no_form_spills(compiler: Compiler, form: Form) -> None:
    cubin, log = compiled(compiler, form)
    assert cubin[:4] == b"\x7fELF"
    assert "0 bytes spill stores, 0 bytes spill loads" in log
    assert log.count("spill stores") == 1
    assert "warning" not in log.lower() and "serialized" not in log


CHAINS = tuple(dict.fromkeys(f for v in COMMON if v.prepared for f in v.forms()))


@pytest.mark.parametrize("form", CHAINS, ids=str)
def test_what_starts_early_waits_before_it_touches_memory(compiler: Compiler, form: Form) -> None:
    if find_spec("triton") is None:
        pytest.skip("no disassembler")
    cubin, _ = compiled(compiler, form)
    assert waits_first(machine_code(cubin))


def checked(program: Program, *claims: str) -> Program:
    """The source with claims that the compiler holds it to."""
    text = "\n".join(f'static_assert({claim}, "as the host fills it");' for claim in claims)
    return Program(program.name, f"{program.text}\n{text}\n", program.headers)


def offset(name: str) -> str:
    """Where a field of the arguments is, in words that NVRTC takes without any header."""
    return f"((u64)__INTADDR__((&((Args*)0)->{name})))"


@cache
def layout() -> tuple[str, ...]:
    """Where the host puts every field."""
    fields = [str(name) for name, _ in Arguments._fields_ if name != "tail"]
    return tuple(
        f"{offset(name)} == {getattr(Arguments, name).offset} && "
        f"sizeof(Args::{name}) == {getattr(Arguments, name).size}"
        for name in fields
    )


CUT = [*Variant(1, prepared=True).forms(), Variant(1, prepared=True, channel=SAFE).prepare()]


@pytest.mark.parametrize("form", CUT, ids=lambda form: form.name)
def test_a_kernel_reads_its_arguments_where_the_host_puts_them(
    compiler: Compiler, form: Form
) -> None:
    size = f"sizeof(Args) == {sizeof(Arguments)}"
    tiles = f"BT == {CHUNK} && TILE == {CHUNK * HALF * 2} && alignof(Map) == 64"
    kept = f"RECORD == {RECORD} && CHANNEL_RECORD == {CHANNEL_RECORD}"
    kinds = f"READY_GATE == {READY} && CHANNEL_GATE == {CHANNEL} && SAFE_GATE == {SAFE}"
    compiled(compiler, form, size, tiles, kept, kinds, *layout())


def test_a_field_that_moved_would_be_seen(compiler: Compiler) -> None:
    with pytest.raises(CompileError, match="as the host fills it"):
        compiled(compiler, COMMON[0].walk(), f"{offset('HV')} == 0")


def test_a_copy_moves_what_the_kernel_waits_for(compiler: Compiler) -> None:
    for variant in (Variant(1), Variant(2), Variant(1, prepared=True)):
        moved = (2 + 2 + variant.consumers) * CHUNK * HALF * 2
        compiled(compiler, variant.walk(), f"LOAD == {moved}")


def test_blocks_are_as_many_as_the_host_launches(compiler: Compiler) -> None:
    variant = Variant(1, prepared=True)
    compiled(compiler, variant.join(), f"128 / ROWS == {SLICES}")
    prepared = replace(variant, channel=SAFE)
    for form, count in ((variant, RESIDENT), (prepared, CHANNELS_RESIDENT)):
        fits = f"OFF_BAR + 1088 <= 233472 / {count} - 1024"
        _, log = compiled(compiler, form.prepare(), fits)
        used = int(log.split("Used ")[1].split(" registers")[0])
        assert used * 256 * count <= 65536


def test_a_block_has_the_threads_of_its_roles(compiler: Compiler) -> None:
    for variant in (Variant(1), Variant(2)):
        registers = dict(variant.walk().defines)
        groups = registers["NCONS"] + registers["NSOLVE"] + 1
        taken = (
            registers["NCONS"] * registers["CONS_REGS"]
            + registers["NSOLVE"] * registers["SOLVE_REGS"]
            + registers["PREP_REGS"]
        )
        assert taken * 128 <= 65536
        _, log = compiled(compiler, variant.walk())
        used = int(log.split("Used ")[1].split(" registers")[0])
        assert taken <= used * groups


@pytest.mark.parametrize("name", [PREFILL, PREPARE, PREPARE_CHANNELS, JOIN])
def test_the_sources_include_nothing_of_the_host(name: str) -> None:
    program = Form(name).source()
    texts = [program.text, *program.headers.values()]
    included = [line for text in texts for line in text.splitlines() if "#include" in line]
    assert '#include "chunk.cuh"' in included
    assert set(included) <= {f'#include "{header}"' for header in program.headers}
