"""Every launch of the provider compiles for every arch, within shared memory and without spills."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

from hal.model.spec import GateKind
from hal.testing.scan_cases import Scan, scan_case
from hal.testing.verify_cases import VerifyCase, accept, tree
from hal_cuda.kernels.math import silu_tanh
from hal_cuda.plugin import FUSED_DIMS
from hal_cuda.tables import table
from hal_triton.kernels.math import silu
from hal_triton.provider import TritonProvider
from hal_triton.tuning import DEFAULT, Config, Tuning
from support.ops import Call, Case, Delta, conv_case, delta_case, i32, make_rows
from support.triton_aot import SHARED_LIMIT, Compiled, compile_all
from support.triton_cases import fused_case, on_ring, short_conv_case

ARCHES = ("80", "90", "100", "120")
ONE = make_rows([(1, "continue")])
MANY = make_rows([(1, "continue")] * 40)
LONG = make_rows([(70, "continue"), (3, "fresh")], spare=4)
HEAD = Delta(H=1, HV=2, K=128, V=128)
BF16 = torch.bfloat16


def provider(arch: str) -> TritonProvider:
    """The provider as CUDA ships it for an arch, on tensors that stay on the host."""
    tuning = Tuning(table(f"sm_{arch}"), silu, silu_tanh, "tf32")
    return TritonProvider("cpu", {"tuning": tuning})


def compiled(arch: str, *pairs: tuple[Case, Call]) -> list[Compiled]:
    def bind(case: Case, call: Call) -> Callable[[], object]:
        return lambda: case.run(call)

    return compile_all(f"cuda:{arch}", *(bind(*pair) for pair in pairs))


def assert_fit(kernels: list[Compiled]) -> None:
    assert kernels
    assert not [problem for kernel in kernels for problem in kernel.problems]


def dtypes(arch: str) -> Iterator[torch.dtype]:
    """All of them for one arch of each kind of matrix unit, else the one that is served."""
    yield from (BF16, torch.float16, torch.float32) if arch in ("80", "90") else (BF16,)


@pytest.mark.parametrize("arch", ARCHES)
def test_convolutions_fit(arch: str) -> None:
    ops = provider(arch)
    conv, short = ops.conv, ops.short_conv
    for dtype in dtypes(arch):
        for channels in (2048, 1000, 24):
            kwargs = {"layout": "WC", "channels": channels, "dtype": dtype}
            packed, token = conv_case(LONG, **kwargs), conv_case(ONE, decode=True, **kwargs)
            kernels = compiled(
                arch,
                (packed, on_ring(conv.prefill, LONG)),
                (token, on_ring(conv.decode, ONE)),
                (short_conv_case(packed), on_ring(short.prefill, LONG)),
                (short_conv_case(token), on_ring(short.decode, ONE)),
            )
            assert len(kernels) == 4
            assert_fit(kernels)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("dims", [HEAD, Delta(H=1, HV=1, K=256, V=256), Delta(K=64, V=96)])
def test_decode_fits(arch: str, dims: Delta) -> None:
    ops = provider(arch).delta_rule
    for dtype in dtypes(arch):
        pairs = [(delta_case(rows, dims, dtype=dtype, decode=True), ops.decode)
                 for rows in (ONE, MANY)]  # fmt: skip
        assert_fit(compiled(arch, *pairs))


@pytest.mark.parametrize("arch", ARCHES)
def test_a_step_starts_early_and_waits_where_the_arch_can(arch: str) -> None:
    ops = provider(arch)
    conv = conv_case(ONE, decode=True, layout="WC", channels=2048, dtype=BF16)
    delta = delta_case(ONE, HEAD, dtype=BF16, decode=True)
    kernels = compiled(arch, (conv, on_ring(ops.conv.decode, ONE)), (delta, ops.delta_rule.decode))
    assert [kernel.name for kernel in kernels] == ["conv_decode", "delta_decode"]
    assert {kernel.early for kernel in kernels} == {arch != "80"}
    assert_fit(kernels)


@pytest.mark.parametrize("dims", [HEAD, Delta(H=1, HV=1, K=256, V=256), Delta(K=96, V=192)])
def test_decode_fits_in_every_configuration_of_a_tuned_table(dims: Delta) -> None:
    for _, config in table("sm_90")["delta_rule.decode"]:
        tuning = Tuning(DEFAULT, silu, silu_tanh, overrides={"delta_rule.decode": config})
        ops = TritonProvider("cpu", {"tuning": tuning}).delta_rule
        case = delta_case(ONE, dims, dtype=BF16, decode=True)
        assert_fit(compiled("90", (case, ops.decode)))


@pytest.mark.parametrize("width", [2, 8])
def test_convolutions_of_the_widths_at_the_border_fit(width: int) -> None:
    ops = provider("90").conv
    for dtype in dtypes("90"):
        kwargs = {"layout": "WC", "channels": 512, "dtype": dtype, "width": width}
        packed, token = conv_case(LONG, **kwargs), conv_case(ONE, decode=True, **kwargs)
        pairs = (packed, on_ring(ops.prefill, LONG)), (token, on_ring(ops.decode, ONE))
        assert_fit(compiled("90", *pairs))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("norm", [False, True])
def test_fused_decode_fits(arch: str, norm: bool) -> None:
    ops = provider(arch).delta_rule
    for rows in (ONE, MANY):
        case = fused_case(rows, HEAD, dtype=BF16, norm=norm)
        assert_fit(compile_all(f"cuda:{arch}", lambda c=case: c.run(ops.decode_fused)))


@pytest.mark.parametrize("gate", [GateKind.SCALAR, GateKind.CHANNEL])
@pytest.mark.parametrize("dims", FUSED_DIMS, ids=str)
def test_fused_decode_fits_in_every_configuration_of_a_tuned_table(
    dims: tuple[int, int], gate: GateKind
) -> None:
    K, V = dims
    head = Delta(H=1, HV=1, K=K, V=V, gate=gate)
    for norm in (False, True):
        kind = ".channel" if gate is GateKind.CHANNEL else ".norm" if norm else ""
        name = f"delta_rule.decode_fused{kind}"
        for _, config in table("sm_90")[name]:
            tuning = Tuning(DEFAULT, silu, silu_tanh, overrides={name: config})
            ops = TritonProvider("cpu", {"tuning": tuning}).delta_rule
            for dtype in dtypes("90"):
                case = fused_case(ONE, head, dtype=dtype, norm=norm)
                assert_fit(compile_all("cuda:90", partial(case.run, ops.decode_fused)))


@pytest.mark.parametrize("gate", [GateKind.SCALAR, None])
@pytest.mark.parametrize("ratio", [2, 3])
def test_fused_decode_with_a_bias_fits_in_limited_registers(
    ratio: int, gate: GateKind | None
) -> None:
    head = Delta(H=1, HV=ratio, K=128, V=128, gate=gate)
    for norm in (False, True):
        name = "delta_rule.decode_fused.norm" if norm else "delta_rule.decode_fused"
        _, config = table("sm_90")[name][-1]
        assert config.registers
        tuning = Tuning(DEFAULT, silu, silu_tanh, overrides={name: config})
        ops = TritonProvider("cpu", {"tuning": tuning}).delta_rule
        for dtype in dtypes("90"):
            case = fused_case(ONE, head, dtype=dtype, norm=norm, bias=True)
            assert_fit(compile_all("cuda:90", partial(case.run, ops.decode_fused)))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(
    "dims", [HEAD, Delta(H=1, HV=1, K=256, V=256), Delta(K=64, V=96), Delta(K=96, V=192)]
)
@pytest.mark.parametrize("rows", [LONG, make_rows([(1, "fork")] * 40)], ids=["few", "many"])
def test_prefill_fits(arch: str, dims: Delta, rows: object) -> None:
    ops = provider(arch).delta_rule
    for dtype in dtypes(arch):
        kernels = compiled(arch, (delta_case(rows, dims, dtype=dtype), ops.prefill))
        names = ["delta_chunks", "delta_walk"]
        assert [k.name for k in kernels] == (
            ["delta_recurrent"] if dtype == torch.float32 else names
        )
        assert_fit(kernels)


@pytest.mark.parametrize("arch", ARCHES)
def test_prefill_fits_where_every_channel_decays(arch: str) -> None:
    ops, dims = provider(arch).delta_rule, replace(HEAD, H=2, gate=GateKind.CHANNEL)
    for dtype in (BF16, torch.float16) if arch == "90" else (BF16,):
        chunks, walk = compiled(arch, (delta_case(LONG, dims, dtype=dtype), ops.prefill))
        assert (chunks.name, walk.name) == ("channel_chunks", "channel_walk")
        assert chunks.shared <= SHARED_LIMIT[chunks.target]
        units = ("wgmma.mma_async", "tcgen05.mma", "mma.sync")
        assert any(unit in chunks.assembly for unit in units)
        assert_fit([walk])


@pytest.mark.parametrize("arch", ["80", "90"])
def test_the_walk_of_decaying_channels_fits_for_many_rows(arch: str) -> None:
    dims = replace(HEAD, H=2, gate=GateKind.CHANNEL)
    case = delta_case(make_rows([(1, "fork")] * 40), dims, dtype=BF16)
    _, walk = compiled(arch, (case, provider(arch).delta_rule.prefill))
    assert_fit([walk])


def drafts(arch: str, case: Case, *, branches: bool) -> list[Compiled]:
    """What verify and commit of a case launch."""
    ours, rows = provider(arch), case.rows
    made = VerifyCase.of(case, tree(rows) if branches else None, accept(rows))
    ops = getattr(ours, made.interface)
    return compile_all(f"cuda:{arch}", lambda: made.run(ops, ours.scratch_spec))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("tokens", [4, 16])
@pytest.mark.parametrize("dims", [HEAD, Delta(H=1, HV=1, K=256, V=256)], ids=["head", "wide"])
def test_verify_and_commit_fit(arch: str, dims: Delta, tokens: int) -> None:
    rows = make_rows([(tokens, "fork")])
    for gate in (GateKind.SCALAR, GateKind.CHANNEL):
        every = dims is HEAD and gate is GateKind.SCALAR
        for dtype in dtypes(arch) if every else (BF16,):
            case = delta_case(rows, replace(dims, gate=gate), dtype=dtype)
            kernels = drafts(arch, case, branches=dtype == BF16)
            assert [k.name for k in kernels] == ["delta_drafts", "delta_verify", "delta_commit"]
            assert_fit(kernels)


@pytest.mark.parametrize("arch", ARCHES)
def test_verify_and_commit_of_the_convolution_fit(arch: str) -> None:
    for width, channels in ((4, 2048), (8, 24)):
        kwargs = {"width": width, "channels": channels, "dtype": BF16}
        case = conv_case(make_rows([(4, "fork")]), layout="ring", **kwargs)
        kernels = drafts(arch, case, branches=width == 8)
        assert [k.name for k in kernels] == ["conv_verify", "conv_commit"]
        assert_fit(kernels)


@pytest.mark.parametrize("arch", ["80", "90"])
def test_verify_reads_whole_lines_and_multiplies_on_matrix_units(arch: str) -> None:
    case = delta_case(make_rows([(4, "fork")]), HEAD, dtype=BF16)
    verify = next(k for k in drafts(arch, case, branches=False) if k.name == "delta_verify")
    assert "ld.global.v4.b32" in verify.assembly
    assert not re.search(r"ld\.global\.[bu]16", verify.assembly)
    assert "mma.sync" in verify.assembly or "wgmma" in verify.assembly


@pytest.mark.parametrize("arch", ARCHES)
def test_tracked_prefill_fits(arch: str) -> None:
    case = delta_case(LONG, HEAD, dtype=BF16, track=i32(0, 64, 7).view(1, 3))
    assert_fit(compiled(arch, (case, provider(arch).delta_rule.prefill)))


@pytest.mark.parametrize("arch", ["90", "100", "120"])
def test_products_run_on_matrix_units(arch: str) -> None:
    case = delta_case(LONG, HEAD, dtype=BF16)
    for kernel in compiled(arch, (case, provider(arch).delta_rule.prefill)):
        units = ("wgmma.mma_async", "tcgen05.mma", "mma.sync")
        assert any(unit in kernel.assembly for unit in units)


def test_a_row_count_that_changes_compiles_nothing_new() -> None:
    ops = provider("90")
    signatures = []
    for lengths in ((70, 3), (1, 1)):
        rows = make_rows([(n, "continue") for n in lengths])
        case = conv_case(rows, layout="WC", channels=64, dtype=BF16)
        kernels = compiled("90", (case, on_ring(ops.conv.prefill, rows)))
        signatures.append(dict(kernels[0].kernel.src.signature))
    assert signatures[0] == signatures[1]


SCANS = (
    Scan(H=16, P=64, N=128, G=1),
    Scan(H=2, P=64, N=256, G=1, z=True),
    Scan(kind="lightning", H=2, P=128, N=128),
    Scan(kind="mamba1", H=4, P=64, N=16, G=1, z=True),
)
"""Mamba-2 as it is served mostly and with wide states, lightning, Mamba-1."""


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("dims", SCANS, ids=lambda dims: f"{dims.kind}-N{dims.N}")
def test_scans_fit(arch: str, dims: Scan) -> None:
    ops = provider(arch).scan
    for dtype in dtypes(arch):
        kernels = compiled(
            arch,
            (scan_case(ONE, dims, dtype=dtype, decode=True), ops.decode),
            (scan_case(LONG, dims, dtype=dtype), ops.prefill),
        )
        names = ["scan_recurrent"] if dims.kind == "mamba1" else ["scan_prepare", "scan_walk"]
        assert [kernel.name for kernel in kernels] == ["scan_decode", *names]
        assert_fit(kernels)


@pytest.mark.parametrize("arch", ["80", "90"])
@pytest.mark.parametrize("dims", (SCANS[0], SCANS[3]), ids=lambda dims: dims.kind)
def test_drafts_of_a_scan_fit(arch: str, dims: Scan) -> None:
    served = provider(arch)
    verify = VerifyCase.of(scan_case(LONG, dims, dtype=BF16), tree(LONG), accept(LONG))
    kernels = compile_all(f"cuda:{arch}", lambda: verify.run(served.scan, served.scratch_spec))
    assert len(kernels) == 2
    assert_fit(kernels)


@pytest.mark.parametrize("segment", [0, 64])
def test_a_tracked_scan_in_segments_fits_and_runs_on_matrix_units(segment: int) -> None:
    config = table("sm_90")["scan.walk"][0][1]
    cut = Config({**config.blocks, "SEG": segment}, config.warps, config.stages)
    tuning = Tuning(table("sm_90"), silu, silu_tanh, "tf32", {"scan.walk": cut})
    ops = TritonProvider("cpu", {"tuning": tuning}).scan
    case = scan_case(LONG, SCANS[0], dtype=BF16, track=i32(0, 64, 7).view(1, 3))
    kernels = compiled("90", (case, ops.prefill))
    assert len(kernels) == 2 + (segment > 0)
    assert_fit(kernels)
    for kernel in kernels:  # a chunk of 32 tokens is too small for what needs 64 rows
        unit = "mma.sync" if kernel.name == "scan_prepare" else "wgmma.mma_async"
        assert unit in kernel.assembly
