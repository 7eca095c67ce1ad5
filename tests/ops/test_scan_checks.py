"""A scan whose arguments do not fit is refused before anything is written, with both sizes."""

from typing import Any

import pytest
import torch

from hal.testing.case import Case
from hal.testing.rows import changed_outside, clone_view, i32, make_rows
from hal.testing.scan_cases import Scan, scan_case
from hal_cpu.provider import TorchProvider

SCAN = TorchProvider("cpu", {}).scan
PACKED = make_rows([(3, "fork"), (1, "fresh"), (4, "continue")])
TOKENS = make_rows([(1, "fork")] * 8)
zeros = torch.zeros


def refuse(case: Case, error: type[Exception], text: str, **args: Any) -> None:
    """The call raises exactly this text and leaves the state as it was."""
    call = SCAN.decode if case.decode else SCAN.prefill
    held = {**case.args, "state": clone_view(case.args["state"]), **args}
    before = clone_view(held["state"])
    with pytest.raises(error) as caught:
        call(**held, **case.options)
    assert str(caught.value) == text.format(case.operation)
    assert changed_outside(before, held["state"], set()) == 0


MAMBA2: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": zeros(8, 4, 6)}, ValueError,
     "{}: state is [SLOTS, 4, 8, 16], expected [SLOTS, 4, 6, 16]"),
    ({"x": zeros(8)}, ValueError, "{}: x is [8], expected 2 dimensions"),
    ({"x": zeros(8, 4, 8).double()}, TypeError,
     "{}: x is float64, expected bfloat16, float16, float32"),
    ({"dt": zeros(8, 2)}, ValueError, "{}: dt is [8, 2], expected [8, 4]"),
    ({"dt": zeros(7, 4)}, ValueError, "{}: dt is [7, 4], expected [8, 4]"),
    ({"A": zeros(2)}, ValueError, "{}: A is [2], expected [4]"),
    ({"A": zeros(4, 16)}, ValueError, "{}: A is [4, 16], expected [4]"),
    ({"D": zeros(4, 8)}, ValueError, "{}: D is [4, 8], expected [4]"),
    ({"dt_bias": zeros(8)}, ValueError, "{}: dt_bias is [8], expected [4]"),
    ({"z": zeros(8, 32)}, ValueError, "{}: z is [8, 32], expected [8, 4, 8]"),
    ({"z": zeros(8, 4, 8).bfloat16()}, TypeError, "{}: z is bfloat16, x is float32"),
    ({"B": zeros(8, 3, 16), "C": zeros(8, 3, 16)}, ValueError,
     "{}: 4 heads are not a multiple of 3 groups"),
    ({"B": zeros(8, 2, 12)}, ValueError, "{}: B is [8, 2, 12], C is [8, 2, 16]"),
    ({"C": zeros(7, 2, 16)}, ValueError, "{}: x has 8 tokens, C has 7"),
    ({"B": zeros(8, 2, 16).half()}, TypeError, "{}: B is float16, x is float32"),
    ({"B": zeros(8, 32)}, ValueError, "{}: B is [8, 32], expected 3 dimensions"),
    ({"state": zeros(9, 4, 8, 16).bfloat16()}, TypeError,
     "{}: state is bfloat16, expected float32"),
    ({"state": zeros(9, 4, 16, 8)}, ValueError,
     "{}: state is [9, 4, 16, 8], expected [9, 4, 8, 16]"),
    ({"state": zeros(9, 32, 16)}, ValueError,
     "{}: state is [9, 32, 16], expected [9, 4, 8, 16]"),
    ({"out": zeros(8, 4, 8).half()}, TypeError,
     "{}: out is [8, 4, 8] float16, expected [8, 4, 8] float32"),
    ({"src": i32(1, 2)}, ValueError, "{}: 2 rows in src, ROWS in dst"),
]  # fmt: skip


@pytest.mark.parametrize(("args", "error", "text"), MAMBA2, ids=[row[2] for row in MAMBA2])
@pytest.mark.parametrize("decode", [False, True])
def test_a_bad_scan_is_refused(
    decode: bool, args: dict[str, Any], error: type[Exception], text: str
) -> None:
    case = scan_case(TOKENS if decode else PACKED, decode=decode)
    text = text.replace("SLOTS", str(case.args["state"].shape[0]))
    refuse(case, error, text.replace("ROWS", str(len(case.rows.src))), **args)


MAMBA1: list[tuple[dict[str, Any], str]] = [
    ({"A": zeros(32)}, "{}: A is [32], expected [32, 16]"),
    ({"dt": zeros(8, 4)}, "{}: dt is [8, 4], expected [8, 32]"),
    (
        {"B": zeros(8, 3, 16), "C": zeros(8, 3, 16)},
        "{}: 32 channels are not a multiple of 3 groups",
    ),
    ({"state": zeros(9, 4, 8, 16)}, "{}: state is [9, 4, 8, 16], expected [9, 32, 16]"),
]


@pytest.mark.parametrize(("args", "text"), MAMBA1, ids=[row[1] for row in MAMBA1])
def test_a_bad_mamba1_scan_is_refused(args: dict[str, Any], text: str) -> None:
    refuse(scan_case(PACKED, Scan(kind="mamba1")), ValueError, text, **args)


def test_a_limit_that_nothing_meets_is_refused() -> None:
    case = scan_case(PACKED, Scan(dt_limit=(0.5, 0.1)))
    refuse(case, ValueError, "{}: dt_limit is (0.5, 0.1), expected (least, most)")


BOUNDS: list[tuple[tuple[int, ...], str]] = [
    ((0, 3, 4, 8, 8), "{}: query_start_loc has 5 entries, src has 3 rows (expected 4)"),
    ((0, 3, 4, 70), "{}: query_start_loc ends at 70, x has 8 tokens"),
    ((1, 3, 4, 8), "{}: query_start_loc starts at 1, expected 0"),
    ((0, 5, 4, 8), "{}: query_start_loc decreases in row 1, from 5 to 4"),
]


@pytest.mark.parametrize(("bounds", "text"), BOUNDS)
def test_bad_row_bounds_are_refused(bounds: tuple[int, ...], text: str) -> None:
    refuse(scan_case(PACKED), ValueError, text, query_start_loc=i32(*bounds))


def test_slots_past_the_pool_and_bad_track_points_are_refused() -> None:
    case = scan_case(PACKED)
    refuse(case, ValueError, "{}: slot 99 in dst, pool has slots 1..10", dst=i32(1, 99, -1))
    point = i32(2, 5, 4).view(1, 3)
    text = "{}: track point (row 2, count 5), row 2 has 4 tokens"
    refuse(case, ValueError, text, track=point)


@pytest.mark.parametrize("tokens", [2, 9])
def test_tokens_and_rows_of_a_decode_never_broadcast(tokens: int) -> None:
    case = scan_case(TOKENS, decode=True)
    cut = {n: zeros(tokens, *t.shape[1:]) for n, t in case.tokens.items()}
    refuse(case, ValueError, f"{{}}: {tokens} tokens, 8 rows in src", **cut)
