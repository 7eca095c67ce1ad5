"""Every kernel of the AMD provider, compiled for an arch in every configuration of its table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from unittest import mock

import torch
from torch import Tensor
from triton.backends.amd.compiler import HIPBackend

from hal.model.spec import GateKind
from hal.runtime.checks import dtype_name
from hal.testing import case as cases
from hal.testing import verify_cases
from hal.testing.rows import clone_view
from hal.testing.scan_cases import Scan, scan_case
from hal.testing.verify_cases import VerifyCase, accept, tree
from hal_rocm.arches import ARCHES
from hal_rocm.provider import TritonProvider, tuning
from hal_rocm.tables import table
from hal_triton.tuning import Config, Tuning
from support.ops import Case, Delta, Rows, conv_case, delta_case, make_rows
from support.triton_aot import Compiled, compile_all
from support.triton_cases import fused_case, on_ring, short_conv_case

Run = Callable[[], object]
Launches = Callable[[TritonProvider, torch.dtype], Iterator[Run]]

ONE = make_rows([(1, "continue")])
LONG = make_rows([(70, "continue"), (3, "fresh")], spare=4)
HEAD = Delta(H=1, HV=2, K=128, V=128)
UNEVEN = Delta(H=1, HV=1, K=96, V=192)
SCANS = (
    Scan(H=16, P=64, N=128, G=1),
    Scan(H=2, P=64, N=256, G=1, z=True),
    Scan(kind="mamba1", H=4, P=64, N=16, G=1, z=True),
)


def convolutions(ours: TritonProvider, dtype: torch.dtype) -> Iterator[Run]:
    """Plain and gated, packed and token by token."""
    conv, short = ours.conv, ours.short_conv
    for channels in (2048, 1000):
        packed = conv_case(LONG, layout="WC", channels=channels, dtype=dtype)
        token = conv_case(ONE, layout="WC", channels=channels, dtype=dtype, decode=True)
        yield partial(packed.run, on_ring(conv.prefill, LONG))
        yield partial(token.run, on_ring(conv.decode, ONE))
        yield partial(short_conv_case(packed).run, on_ring(short.prefill, LONG))
        yield partial(short_conv_case(token).run, on_ring(short.decode, ONE))


def delta_steps(ours: TritonProvider, dtype: torch.dtype) -> Iterator[Run]:
    """Decode, and fused decode with and without its norm."""
    ops = ours.delta_rule
    for gate in (GateKind.SCALAR, GateKind.CHANNEL):
        dims = replace(HEAD, gate=gate)
        yield partial(delta_case(ONE, dims, dtype=dtype, decode=True).run, ops.decode)
        for norm in (False, True):
            yield partial(fused_case(ONE, dims, dtype=dtype, norm=norm).run, ops.decode_fused)


def delta_prefill(ours: TritonProvider, dtype: torch.dtype) -> Iterator[Run]:
    """Chunks and walk, or the recurrent form."""
    for dims in (HEAD, UNEVEN) if dtype == torch.bfloat16 else (HEAD,):
        yield partial(delta_case(LONG, dims, dtype=dtype).run, ours.delta_rule.prefill)


def channel_prefill(ours: TritonProvider, dtype: torch.dtype) -> Iterator[Run]:
    """Chunks and walk where every channel decays by itself; float32 has none."""
    if dtype != torch.float32:
        dims = replace(HEAD, gate=GateKind.CHANNEL)
        yield partial(delta_case(LONG, dims, dtype=dtype).run, ours.delta_rule.prefill)


def _drafts(ours: TritonProvider, case: Case, rows: Rows) -> Run:
    made = VerifyCase.of(case, tree(rows), accept(rows))
    return partial(made.run, getattr(ours, made.interface), ours.scratch_spec)


def drafts(ours: TritonProvider, dtype: torch.dtype) -> Iterator[Run]:
    """Verify and commit of convolution and delta rule, few drafts a row."""
    yield from _delta_drafts(ours, dtype, 4)
    rows = make_rows([(4, "fork")])
    yield _drafts(ours, conv_case(rows, layout="ring", channels=2048, dtype=dtype), rows)


def long_drafts(ours: TritonProvider, dtype: torch.dtype) -> Iterator[Run]:
    """Verify and commit of the delta rule, as many drafts a row as there may be."""
    yield from _delta_drafts(ours, dtype, 16)


def _delta_drafts(ours: TritonProvider, dtype: torch.dtype, tokens: int) -> Iterator[Run]:
    rows = make_rows([(tokens, "fork")])
    for gate in (GateKind.SCALAR, GateKind.CHANNEL):
        yield _drafts(ours, delta_case(rows, replace(HEAD, gate=gate), dtype=dtype), rows)


def scans(ours: TritonProvider, dtype: torch.dtype) -> Iterator[Run]:
    """Decode, verify and commit of every form, and the prefill token by token."""
    for dims in SCANS:
        yield partial(scan_case(ONE, dims, dtype=dtype, decode=True).run, ours.scan.decode)
        if dims.kind == "mamba1":
            yield partial(scan_case(LONG, dims, dtype=dtype).run, ours.scan.prefill)
        yield _drafts(ours, scan_case(LONG, dims, dtype=dtype), LONG)


def scan_prefill(ours: TritonProvider, dtype: torch.dtype) -> Iterator[Run]:
    """The prefill in chunks."""
    for dims in SCANS[:2]:
        yield partial(scan_case(LONG, dims, dtype=dtype).run, ours.scan.prefill)


PARTS: Mapping[str, tuple[Launches, str]] = {
    "convolutions": (convolutions, r"(short_)?conv\.(prefill|decode).*"),
    "delta steps": (delta_steps, r"delta_rule\.decode.*|norm"),
    "delta prefill": (delta_prefill, r"delta_rule\.(chunks|walk|recurrent).*"),
    "channel prefill": (channel_prefill, r"delta_rule\.channel_.*"),
    "drafts": (
        drafts,
        r"conv\.(verify|commit)|delta_rule\.(drafts|commit|verify(\.\w+)?(?<!long))",
    ),
    "long drafts": (long_drafts, r"delta_rule\.verify.*\.long"),
    "scans": (scans, r"scan\.(decode|recurrent|verify|commit).*"),
    "scan prefill": (scan_prefill, r"scan\.(prepare|walk).*"),
}
"""What launches what, and the names of the table that it has to reach."""

NARROW: Mapping[str, set[str]] = {
    "delta prefill": {"delta_chunks", "delta_walk"},
    "channel prefill": {"channel_chunks", "channel_walk"},
    "drafts": {"delta_verify"},
    "long drafts": {"delta_verify"},
    "scan prefill": {"scan_prepare", "scan_walk"},
}
"""Kernels with products of 16-bit operands in some form, by part."""

_NARROW = re.compile(r"tt\.dot [^\n]*(?:xf16>|xbf16>|bf16x[36])")
_INSTRUCTION = re.compile(r"v_(?:mfma|wmma|smfmac)_\w+")


class Noted(Tuning):
    """A tuning that gives a name's n-th configuration whatever the work, and keeps what it gave."""

    __slots__ = ("given", "nth")
    given: set[tuple[str, str]]
    nth: int

    @classmethod
    def of(cls, arch: str, nth: int) -> Noted:
        """The tuning of an arch; a shorter list of configurations gives its last."""
        shipped = tuning(arch)
        made = cls(
            shipped.table, shipped.silu, shipped.fast_silu, shipped.solve, drafts=shipped.drafts
        )
        object.__setattr__(made, "nth", nth)
        object.__setattr__(made, "given", set())
        return made

    def pick(self, operation: str, work: float) -> Config:
        """The configuration."""
        held = self.table[operation]
        config = held[min(self.nth, len(held) - 1)][1]
        self.given.add((operation, repr(config)))
        return config


@dataclass(frozen=True, slots=True)
class Built:
    """A compiled kernel, the dtype of its activations, and the arch."""

    kernel: Compiled
    dtype: str
    arch: str

    @property
    def instructions(self) -> frozenset[str]:
        """The matrix instructions in it."""
        return frozenset(_INSTRUCTION.findall(self.kernel.assembly))

    @property
    def is_narrow(self) -> bool:
        """Whether it has products of 16-bit operands, which matrix units take on every arch."""
        return bool(_NARROW.search(self.kernel.kernel.asm["ttir"].replace("BF16", "bf16")))

    @property
    def threads(self) -> int:
        """Threads of a workgroup."""
        return int(self.kernel.kernel.metadata.num_warps) * ARCHES[self.arch].wave


def dtypes(arch: str, part: str) -> tuple[torch.dtype, ...]:
    """The dtypes that a part is offered in on an arch."""
    large = part in ("channel prefill", "scan prefill", "long drafts")
    if ARCHES[arch].unit == "mfma" or not large:
        return torch.bfloat16, torch.float16, torch.float32
    return (torch.bfloat16,) if part == "scan prefill" else ()


def parts(arch: str) -> list[str]:
    """The parts that an arch is offered."""
    return [part for part in PARTS if dtypes(arch, part)]


def shipped(arch: str, part: str) -> frozenset[tuple[str, str]]:
    """The configurations of a part in the table of an arch, in the dtypes that it is offered in."""
    pattern, served = PARTS[part][1], {dtype_name(dtype) for dtype in dtypes(arch, part)}
    return frozenset(
        (name, repr(config))
        for name, held in table(arch).items()
        for _, config in held
        if re.fullmatch(pattern, name) and not _is_left_out(name, arch, served)
    )


def _is_left_out(name: str, arch: str, served: set[str]) -> bool:
    """Whether a name is of another dtype, for cut operands, or for keys wider than any offered."""
    others = {"float16", "float32"} - served
    wide = name.startswith("delta_rule.") and name.endswith(".wide")
    cut = ".cut" in name and tuning(arch).drafts[0] == "ieee"
    return wide or cut or bool(others & set(name.split(".")))


@dataclass(frozen=True, slots=True)
class Part:
    """A part compiled for an arch in all configurations and dtypes, and the names it took."""

    arch: str
    name: str
    built: list[Built]
    taken: frozenset[tuple[str, str]]


def build(arch: str, part: str) -> Part:
    """Compile a part."""
    built: list[Built] = []
    taken: set[tuple[str, str]] = set()
    for nth in range(max(len(held) for held in table(arch).values())):
        noted = Noted.of(arch, nth)
        ours = TritonProvider("rocm", {"tuning": noted})
        for dtype in dtypes(arch, part):
            kernels = compile_all(f"hip:{arch}", *PARTS[part][0](ours, dtype))
            built += [Built(kernel, dtype_name(dtype), arch) for kernel in kernels]
        taken |= noted.given
    return Part(arch, part, built, frozenset(taken))


def build_far(arch: str, part: str) -> list[Built]:
    """Compile a part in the first dtype that is served, its states beyond 32 bits of address."""
    built: list[Built] = []
    for nth in range(max(len(held) for held in table(arch).values())):
        ours = TritonProvider("rocm", {"tuning": Noted.of(arch, nth)})
        dtype = dtypes(arch, part)[0]
        with _far_states():
            kernels = compile_all(f"hip:{arch}", *PARTS[part][0](ours, dtype))
        built += [Built(kernel, dtype_name(dtype), arch) for kernel in kernels]
    return built


@contextmanager
def _far_states() -> Iterator[None]:
    """States as large as pools are: a kernel of more than 2 GiB takes its addresses in 64 bits."""
    kept: dict[int, Tensor] = {}

    def cloned(view: Tensor) -> Tensor:
        made = clone_view(view)
        return kept.setdefault(made.untyped_storage().data_ptr(), made)

    def within(arg: Tensor) -> bool:
        return arg.untyped_storage().data_ptr() not in kept

    with (
        mock.patch.object(cases, "clone_view", cloned),
        mock.patch.object(verify_cases, "clone_view", cloned),
        mock.patch.object(HIPBackend, "is_within_2gb", staticmethod(within)),
    ):
        yield


def facts(part: Part) -> dict[str, dict[str, object]]:
    """Of each kernel the most LDS and threads that it takes, and its matrix instructions.

    A kernel of two parts is two: long drafts are told apart.
    """
    by_kernel: dict[str, list[Built]] = {}
    for each in part.built:
        name = each.kernel.name + ", long" * (part.name == "long drafts")
        by_kernel.setdefault(name, []).append(each)
    return {
        name: {
            "lds": max(each.kernel.shared for each in found),
            "threads": max(each.threads for each in found),
            "instructions": sorted({each for b in found for each in b.instructions}),
        }
        for name, found in sorted(by_kernel.items())
    }
