"""The patched interpreter computes as torch does, and the guard sees what a GPU lets pass."""

from typing import Any

import pytest
import torch

from interpreted.kernels import probes
from support import triton_interpreter
from support.triton_guard import MemoryFault, guarded, watch

N = 32
RAMP = torch.arange(N, dtype=torch.float32)
X, Y = ((RAMP * 0.37 - 5).sin() * 3).bfloat16(), ((RAMP * 1.21 + 2).cos() * 2).bfloat16()
WHOLE = torch.arange(N, dtype=torch.int32) * 37 - 500
SUM = X.float().sum().bfloat16().expand(N)
WANT = {
    "add": X + Y,
    "mul": X * Y,
    "neg": -X,
    "abs": X.abs(),
    "where": torch.where(X > Y, X, Y),
    "maximum": torch.maximum(X, Y),
    "int to bf16": WHOLE.bfloat16(),
    "constant": torch.full((N,), 1.7).bfloat16(),
    "load other": torch.where(torch.arange(N) < 3, X, torch.tensor(0.3).bfloat16()),
    "cumsum": X.float().cumsum(0).bfloat16(),
    "bf16 to fp16": X.half().bfloat16(),
    "bf16 to int": (X * 8).int().float().bfloat16(),
    "sum in fp32": SUM,
    "sum in bf16": SUM,
    "max": X.max().expand(N),
}


@pytest.fixture(autouse=True)
def tf32_is_emulated_again() -> Any:
    yield
    triton_interpreter.apply(fp32_dot="tf32")


@pytest.mark.parametrize("name", WANT)
def test_bfloat16_operations_round_as_torch_does(name: str) -> None:
    out, less = torch.zeros(15, N, dtype=torch.bfloat16), torch.zeros(N, dtype=torch.int32)
    probes.elementwise[(1,)](X, Y, WHOLE, out, less, N=N)
    assert torch.equal(out[list(WANT).index(name)], WANT[name])
    assert torch.equal(less, (X < Y).int())


def dot_error(dtype: torch.dtype, precision: str) -> float:
    grid = torch.arange(N * N, dtype=torch.float32).reshape(N, N)
    a, b = ((grid * f).sin().mul(1e3).frac().to(dtype) for f in (12.9, 78.2))
    got = torch.zeros(N, N)
    probes.dot[(1,)](a, b, got, N=N, P=precision)
    want = a.double() @ b.double()
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_are_exact_to_float32(dtype: torch.dtype) -> None:
    assert dot_error(dtype, "ieee") < 1e-6


@pytest.mark.parametrize(
    ("precision", "least", "most"),
    [("bf16x3", 1e-7, 1e-4), ("bf16x6", 0, 1e-6), ("tf32", 1e-4, 1e-3)],
)
def test_split_and_narrow_products_err_as_on_a_device(
    precision: str, least: float, most: float
) -> None:
    assert least <= dot_error(torch.float32, precision) < most


def test_a_forgotten_precision_of_a_float32_product_is_refused() -> None:
    triton_interpreter.apply(fp32_dot="forbid")
    with pytest.raises(Exception, match="ieee"):
        dot_error(torch.float32, "tf32")


@pytest.mark.parametrize("flag", [0, 1])
def test_a_mask_from_a_scalar_comparison_holds(flag: int) -> None:
    marks = torch.zeros(2, 8, dtype=torch.int32)
    probes.scalar_mask[(1,)](torch.tensor([flag], dtype=torch.int32), marks, B=8)
    assert marks.sum(1).tolist() == [4 * flag, 4 * (1 - flag)]


def test_loops_take_bounds_at_run_time() -> None:
    total = torch.zeros(1)
    probes.loop[(1,)](X, total, N)
    assert torch.allclose(total, X.float().sum())


def slots(*ids: int) -> torch.Tensor:
    return guarded(torch.tensor(ids, dtype=torch.int32))


def caught(kernel: Any, grid: tuple[int], *args: Any, **constants: Any) -> str:
    """What the guard says of a launch; nothing for a sound one."""
    try:
        with watch():
            kernel[grid](*args, **constants)
    except MemoryFault as fault:
        return str(fault)
    return ""


def test_bounds_of_a_block_are_watched() -> None:
    x, o = guarded(torch.arange(100.0)), guarded(torch.zeros(100))
    assert not caught(probes.copy, (2,), x, o, 100, 64, B=64, MASK=True)
    assert "load outside" in caught(probes.copy, (2,), x, o, 100, 64, B=64, MASK=False)
    assert "two programs" in caught(probes.copy, (2,), x, o, 100, 63, B=64, MASK=True)


def test_holes_of_a_strided_view_are_outside() -> None:
    wide = guarded(torch.arange(64.0).reshape(4, 16)[:, :8])
    out = guarded(torch.zeros(4, 8))
    assert not caught(probes.rows, (4,), wide, out, 16, N=8)
    assert "load outside" in caught(probes.rows, (4,), wide, out, 8, N=8)


@pytest.mark.parametrize(
    ("src", "dst", "fault"),
    [
        ((1, 3), (1, 3), ""),
        ((-1, 3), (1, 4), ""),
        ((1, 2), (3, 3), "two programs"),
        ((1, 2), (2, 3), "read by another"),
        ((5, 1), (1, 2), "outside"),
    ],
)
def test_slots_are_watched(src: tuple[int, ...], dst: tuple[int, ...], fault: str) -> None:
    state = guarded(torch.ones(5, 16))
    found = caught(probes.decay, (2,), state, slots(*src), slots(*dst), N=16)
    assert fault in found
    assert bool(found) == bool(fault)


def test_offsets_that_wrap_are_faults() -> None:
    state = guarded(torch.ones(5, 16))
    assert "overflow" in caught(probes.far, (1,), state, slots(4096), 1 << 20, WIDE=False)
    assert "outside" in caught(probes.far, (1,), state, slots(4096), 1 << 20, WIDE=True)


def test_atomics_are_checked_for_bounds() -> None:
    counter = guarded(torch.zeros(8, dtype=torch.int32))
    assert not caught(probes.count, (3,), counter, B=8)
    assert "atomic outside" in caught(probes.count, (3,), counter, B=16)
