"""Every operation on the device equals the float64 oracle, over the cases of every provider."""

from collections.abc import Callable, Iterator

import pytest
import torch

from support import device_checks as checks
from support.device_borders import border_checks
from support.ops import conv_case

pytestmark = pytest.mark.cuda
Part = Callable[[torch.dtype], Iterator[tuple[str, checks.Check]]]


def failures(part: Iterator[tuple[str, checks.Check]]) -> list[str]:
    """Every check that fails, so that one run names them all."""
    found = []
    for name, check in part:
        try:
            check()
        except AssertionError as fault:
            found.append(f"{name}: {fault}")
    return found


@pytest.mark.parametrize("dtype", checks.FLOATS)
@pytest.mark.parametrize(
    "part",
    [checks.conv_checks, checks.delta_checks, checks.fused_checks, border_checks],
    ids=lambda p: p.__name__,
)
def test_every_operation_equals_the_oracle(part: Part, dtype: torch.dtype) -> None:
    assert failures(part(dtype)) == []


@pytest.mark.parametrize("layout", ["CW", "WC"])
def test_strided_indices_are_taken_as_they_are(layout: str) -> None:
    ops = checks.provider(conv=layout).conv
    for rows, decode, call in (
        (checks.PACKED, False, ops.prefill),
        (checks.TOKENS, True, ops.decode),
    ):
        case = conv_case(rows, layout=layout, decode=decode, strided=True)
        case.check(checks.on_device(call))


def test_the_small_checks_of_the_sanitizer_exist() -> None:
    assert set(checks.SMALL) <= {name for name, _ in checks.all_checks()}
