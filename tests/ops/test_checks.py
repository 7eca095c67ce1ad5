"""Bad arguments are refused before anything is written, with the operation and both sizes."""

from typing import Any

import pytest
import torch

from hal.model.spec import GateKind
from hal_cpu.provider import TorchProvider
from support.ops import (
    Call,
    Case,
    Delta,
    changed_outside,
    conv_case,
    delta_case,
    i32,
    make_rows,
)

PROVIDER = TorchProvider("cpu", {})
PACKED = make_rows([(3, "fork"), (1, "fresh"), (4, "continue")])
TOKENS = make_rows([(1, "fork"), (1, "fresh"), (1, "continue")])
zeros = torch.zeros


def refuse(case: Case, call: Call, error: type[Exception], text: str, **args: Any) -> None:
    """The call raises exactly this text and leaves state and result as they were."""
    state = case.args["state"] if "state" not in args else args["state"]
    before = state.clone()
    out = args.pop("out", None)
    with pytest.raises(error) as caught:
        call(**{**case.args, **args}, **case.options, out=out)
    assert str(caught.value) == text
    assert torch.equal(state.nan_to_num(), before.nan_to_num())


CONV: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"weight": zeros(20, 4)}, ValueError, "{}: x has 24 channels, weight has 20"),
    ({"weight": zeros(24)}, ValueError, "{}: weight is [24], expected 2 dimensions"),
    (
        {"weight": zeros(24, 5)},
        ValueError,
        "{}: state holds 3 inputs, width 4 weight expected W-1 = 3, got weight width 5",
    ),
    ({"bias": zeros(23)}, ValueError, "{}: bias is [23], weight has 24 channels"),
    (
        {"weight": zeros(24, 4, dtype=torch.int32)},
        TypeError,
        "{}: weight is int32, expected bfloat16, float16, float32",
    ),
    ({"state": zeros(9, 3, 24)}, ValueError, "{}: x has 24 channels, state has 3"),
    ({"state": zeros(9, 72)}, ValueError, "{}: state is [9, 72], expected 3 dimensions"),
    (
        {"state": zeros(12, 24, 3, dtype=torch.bfloat16)},
        TypeError,
        "{}: state is bfloat16, x is float32: expected x's dtype or float32",
    ),
    ({"src": i32(1, 2)}, ValueError, "{}: 2 rows in src, 3 in dst"),
    ({"start": i32(1, 2, 3, 4)}, ValueError, "{}: 3 rows in src, 4 in start"),
    ({"src": torch.tensor([1, 2, 3])}, TypeError, "{}: src is int64, expected int32"),
    ({"dst": i32(1, 2, 3).view(3, 1)}, ValueError, "{}: dst is [3, 1], expected 1 dimensions"),
    ({"src": i32(1, 2, 11)}, ValueError, "{}: slot 11 in src, pool has slots 1..10"),
    ({"dst": i32(1, 99, -1)}, ValueError, "{}: slot 99 in dst, pool has slots 1..10"),
]


@pytest.mark.parametrize(("args", "error", "text"), CONV, ids=[row[2] for row in CONV])
@pytest.mark.parametrize("decode", [False, True])
def test_a_bad_convolution_is_refused(
    decode: bool, args: dict[str, Any], error: type[Exception], text: str
) -> None:
    case = conv_case(TOKENS if decode else PACKED, decode=decode)
    call = PROVIDER.conv.decode if decode else PROVIDER.conv.prefill
    refuse(case, call, error, text.format(case.operation), **args)


def test_an_unknown_activation_is_refused() -> None:
    case = conv_case(PACKED, activation="gelu")
    text = "conv.prefill: activation is 'gelu', expected 'silu' or None"
    refuse(case, PROVIDER.conv.prefill, ValueError, text)


DELTA: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": zeros(8, 3, 16), "k": zeros(8, 3, 16)}, ValueError,
     "{}: 4 value heads are not a multiple of 3 key heads"),
    ({"q": zeros(8, 2, 12), "k": zeros(8, 2, 12)}, ValueError,
     "{}: state is VK [.., 24, 16], q has K = 12: expected [.., V, 12]"),
    ({"v": zeros(8, 4, 20)}, ValueError,
     "{}: state is VK [.., 24, 16], v has V = 20: expected [.., 20, K]"),
    ({"k": zeros(8, 2, 12)}, ValueError, "{}: k is [8, 2, 12], q is [8, 2, 16]"),
    ({"v": zeros(7, 4, 24)}, ValueError, "{}: q has 8 tokens, v has 7"),
    ({"v": zeros(8, 4, 24).bfloat16()}, TypeError, "{}: v is bfloat16, q is float32"),
    ({"q": zeros(8, 32)}, ValueError, "{}: q is [8, 32], expected 3 dimensions"),
    ({"b": zeros(8, 2)}, ValueError, "{}: b is [8, 2], expected [8, 4]"),
    ({"a": zeros(8, 2)}, ValueError, "{}: scalar gate needs a [8, 4], got [8, 2]"),
    ({"a": zeros(8, 4, 16)}, ValueError, "{}: scalar gate needs a [8, 4], got [8, 4, 16]"),
    ({"a": zeros(8, 4).double()}, TypeError,
     "{}: a is float64, expected bfloat16, float16, float32"),
    ({"state": zeros(12, 4, 24, 16).bfloat16()}, TypeError,
     "{}: state is bfloat16, expected float32"),
    ({"state": zeros(12, 2, 24, 16)}, ValueError,
     "{}: state is [12, 2, 24, 16], v has 4 heads: expected [slots, 4, V, K]"),
    ({"state": zeros(12, 4, 384)}, ValueError,
     "{}: state is [12, 4, 384], v has 4 heads: expected [slots, 4, V, K]"),
    ({"src": i32(1, 2)}, ValueError, "{}: 2 rows in src, 3 in dst"),
    ({"dst": i32(1, 2, 11)}, ValueError, "{}: slot 11 in dst, pool has slots 1..10"),
]  # fmt: skip


@pytest.mark.parametrize(("args", "error", "text"), DELTA, ids=[row[2] for row in DELTA])
def test_a_bad_prefill_is_refused(args: dict[str, Any], error: type[Exception], text: str) -> None:
    case = delta_case(PACKED)
    refuse(case, PROVIDER.delta_rule.prefill, error, text.format(case.operation), **args)


@pytest.mark.parametrize(("args", "error", "text"), DELTA, ids=[row[2] for row in DELTA])
def test_a_bad_decode_is_refused_like_a_prefill(
    args: dict[str, Any], error: type[Exception], text: str
) -> None:
    case = delta_case(make_rows([(1, "fork")] * 8), decode=True)
    if "src" in args or "dst" in args:
        args, text = {"src": i32(1)}, "{}: 1 rows in src, 8 in dst"
    refuse(case, PROVIDER.delta_rule.decode, error, text.format(case.operation), **args)


@pytest.mark.parametrize("kind", [GateKind.CHANNEL, GateKind.SAFE])
def test_a_channel_gate_without_channels_is_refused(kind: GateKind) -> None:
    case = delta_case(PACKED, Delta(gate=kind))
    text = f"delta_rule.prefill: {kind} gate needs a [8, 4, 16], got [8, 4]"
    refuse(case, PROVIDER.delta_rule.prefill, ValueError, text, a=zeros(8, 4))


def test_ready_gates_of_another_head_count_are_refused() -> None:
    case = delta_case(PACKED, Delta(gate=None))
    text = "delta_rule.prefill: ready g is [8, 2], expected [8, 4] or [8, 4, 16]"
    refuse(case, PROVIDER.delta_rule.prefill, ValueError, text, a=zeros(8, 2))


def test_gate_parameters_of_another_shape_are_refused() -> None:
    case, other = delta_case(PACKED), delta_case(PACKED, Delta(HV=2))
    text = "delta_rule.prefill: A_log is [2], expected [4]"
    refuse(case, PROVIDER.delta_rule.prefill, ValueError, text, gate=other.args["gate"])


def test_heads_before_tokens_are_refused() -> None:
    case = delta_case(PACKED)
    turned = {name: case.args[name].transpose(0, 1) for name in ("q", "k", "v")}
    text = "delta_rule.prefill: q has 2 tokens, v has 4"
    refuse(case, PROVIDER.delta_rule.prefill, ValueError, text, **turned)


@pytest.mark.parametrize("tokens", [2, 5])
def test_tokens_and_rows_of_a_decode_never_broadcast(tokens: int) -> None:
    conv, delta = conv_case(TOKENS, decode=True), delta_case(TOKENS, decode=True)
    x = zeros(tokens, 24)
    text = f"conv.decode: {tokens} tokens, 3 rows in src"
    refuse(conv, PROVIDER.conv.decode, ValueError, text, x=x)
    cut = {n: torch.zeros(tokens, *delta.args[n].shape[1:]) for n in ("q", "k", "v", "a", "b")}
    text = f"delta_rule.decode: {tokens} tokens, 3 rows in src"
    refuse(delta, PROVIDER.delta_rule.decode, ValueError, text, **cut)


BOUNDS: list[tuple[tuple[int, ...], str, str]] = [
    ((0, 3, 4, 8, 8), "{}: query_start_loc has 5 entries, src has 3 rows (expected 4)", ""),
    ((0, 3, 4, 70), "{}: query_start_loc ends at 70, {} has 8 tokens", ""),
    ((1, 3, 4, 8), "{}: query_start_loc starts at 1, expected 0", ""),
    ((0, 5, 4, 8), "{}: query_start_loc decreases in row 1, from 5 to 4", ""),
]


@pytest.mark.parametrize(("bounds", "text", "_"), BOUNDS)
def test_bad_row_bounds_are_refused(bounds: tuple[int, ...], text: str, _: str) -> None:
    for case, call, of in (
        (conv_case(PACKED), PROVIDER.conv.prefill, "x"),
        (delta_case(PACKED), PROVIDER.delta_rule.prefill, "q"),
    ):
        message = text.format(case.operation, of)
        refuse(case, call, ValueError, message, query_start_loc=i32(*bounds))


POINTS: list[tuple[tuple[int, int, int], str]] = [
    ((2, 5, 4), "{}: track point (row 2, count 5), row 2 has 4 tokens"),
    ((0, 0, 4), "{}: track point (row 0, count 0), row 0 has 3 tokens"),
    ((3, 1, 4), "{}: track point of row 3, batch has 3 rows"),
    ((0, 1, 44), "{}: slot 44 in track, pool has slots 1..10"),
]


@pytest.mark.parametrize(("point", "text"), POINTS)
def test_bad_track_points_are_refused(point: tuple[int, int, int], text: str) -> None:
    for case, call in (
        (conv_case(PACKED), PROVIDER.conv.prefill),
        (delta_case(PACKED), PROVIDER.delta_rule.prefill),
    ):
        track = i32(*point).view(1, 3)
        refuse(case, call, ValueError, text.format(case.operation), track=track)


def test_track_points_of_another_shape_are_refused() -> None:
    case = conv_case(PACKED)
    text = "conv.prefill: track is [1, 2], expected [M, 3]"
    refuse(case, PROVIDER.conv.prefill, ValueError, text, track=i32(0, 1).view(1, 2))


def test_a_result_of_another_shape_or_dtype_is_refused() -> None:
    case, delta = conv_case(PACKED), delta_case(PACKED)
    text = "conv.prefill: out is [8, 24] bfloat16, expected [8, 24] float32"
    refuse(case, PROVIDER.conv.prefill, TypeError, text, out=zeros(8, 24).bfloat16())
    text = "conv.prefill: out is [7, 24] float32, expected [8, 24] float32"
    refuse(case, PROVIDER.conv.prefill, ValueError, text, out=zeros(7, 24))
    text = "delta_rule.prefill: out is [8, 96] float32, expected [8, 4, 24] float32"
    refuse(delta, PROVIDER.delta_rule.prefill, ValueError, text, out=zeros(8, 96))


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("held", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_and_decode_give_one_answer_about_a_window_dtype(
    dtype: torch.dtype, held: torch.dtype
) -> None:
    answers = []
    for decode in (False, True):
        case = conv_case(TOKENS, dtype=dtype, state_dtype=held, decode=decode)
        call = PROVIDER.conv.decode if decode else PROVIDER.conv.prefill
        before = case.args["state"].clone()
        try:
            case.check(call)
            answers.append("served")
        except TypeError:
            answers.append("refused")
            assert changed_outside(before, case.args["state"], set()) == 0
    assert answers == ["served" if held in (dtype, torch.float32) else "refused"] * 2
