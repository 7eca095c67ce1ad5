"""Every launch of the provider compiles for every arch, within shared memory and without spills."""

from collections.abc import Callable, Iterator

import pytest
import torch

from hal_cuda.kernels.math import silu_tanh
from hal_cuda.tables import table
from hal_triton.kernels.math import silu
from hal_triton.provider import TritonProvider
from hal_triton.tuning import DEFAULT, Tuning
from support.ops import Call, Case, Delta, conv_case, delta_case, i32, make_rows
from support.triton_aot import Compiled, compile_all
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
