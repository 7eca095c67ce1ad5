"""The convolution kernels equal the float64 oracle over layouts, widths, dtypes and lengths."""

import pytest
import torch

from support.ops import Call, conv_case, i32, make_rows
from support.triton_cases import on_ring, short_conv_case
from support.triton_ops import provider, watched

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TOKENS = make_rows(
    [(1, "continue"), (1, "fresh"), (1, "pad"), (1, "fork"), (1, "stateless"), (1, "pad")], seed=5
)
PACKED = make_rows(
    [
        (0, "continue"),
        (1, "fork"),
        (2, "continue"),
        (17, "fresh"),
        (16, "continue"),
        (1, "continue"),
        (3, "stateless"),
        (0, "fork"),
        (33, "fork"),
        (15, "score"),
    ],
    seed=1,
    pads=20,
)


def calls(layout: str) -> tuple[Call, Call]:
    """prefill and decode, taking windows in the layout's own order, a ring's as "WC"."""
    conv = provider(conv=layout).conv
    prefill, decode = watched(conv.prefill), watched(conv.decode)
    return (on_ring(prefill, PACKED), on_ring(decode, TOKENS)) if layout == "ring" else (
        prefill, decode
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["ring", "CW", "WC"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_layout_and_dtype_equals_the_oracle(layout: str, dtype: torch.dtype) -> None:
    prefill, decode = calls(layout)
    shown = "WC" if layout == "ring" else layout
    conv_case(PACKED, layout=shown, dtype=dtype).check(prefill)
    conv_case(TOKENS, layout=shown, dtype=dtype, decode=True).check(decode)


@pytest.mark.parametrize("width", [2, 3, 5, 7, 8])
@pytest.mark.parametrize("layout", ["ring", "CW"])
def test_every_width_equals_the_oracle(layout: str, width: int) -> None:
    prefill, decode = calls(layout)
    shown = "WC" if layout == "ring" else layout
    kwargs = {"width": width, "bias": bool(width % 2), "activation": "silu" if width < 4 else None}
    conv_case(PACKED, layout=shown, **kwargs).check(prefill)
    conv_case(TOKENS, layout=shown, decode=True, **kwargs).check(decode)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [3, 7])
def test_a_short_convolution_gates_before_and_after(dtype: torch.dtype, width: int) -> None:
    ops = provider().short_conv
    case = conv_case(PACKED, layout="WC", dtype=dtype, width=width, channels=16)
    short_conv_case(case).check(on_ring(watched(ops.prefill), PACKED))
    case = conv_case(TOKENS, layout="WC", dtype=dtype, width=width, channels=16, decode=True)
    short_conv_case(case).check(on_ring(watched(ops.decode), TOKENS))


@pytest.mark.parametrize("channels", [1, 16, 33])
def test_any_channel_count_is_right(channels: int) -> None:
    prefill, decode = calls("WC")
    conv_case(PACKED, layout="WC", channels=channels).check(prefill)
    conv_case(TOKENS, layout="WC", channels=channels, decode=True).check(decode)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float32_window_beside_narrow_inputs_is_exact(dtype: torch.dtype) -> None:
    prefill, decode = calls("CW")
    conv_case(PACKED, dtype=dtype, state_dtype=torch.float32).check(prefill)
    conv_case(TOKENS, dtype=dtype, state_dtype=torch.float32, decode=True).check(decode)


@pytest.mark.parametrize("layout", ["ring", "CW", "WC"])
def test_track_stores_the_window_at_any_count(layout: str) -> None:
    rows = make_rows([(20, "continue"), (1, "fresh"), (9, "stateless"), (0, "continue")], spare=12)
    unused = [s for s in range(1, rows.slots) if s not in {*rows.src, *rows.dst}]
    points = [(0, 1), (0, 2), (0, 16), (0, 20), (1, 1), (2, 9), (2, 2)]
    flat = [n for i, (row, count) in enumerate(points) for n in (row, count, unused[i])]
    track = i32(*flat, 0, 5, -1, 99, 99, -7).view(-1, 3)
    prefill = watched(provider(conv=layout).conv.prefill)
    case = conv_case(rows, layout="WC" if layout == "ring" else layout, track=track)
    case.check(on_ring(prefill, rows) if layout == "ring" else prefill)


def test_strided_inputs_pools_and_results_are_taken_as_they_are() -> None:
    prefill, decode = calls("CW")
    for case, call in (
        (conv_case(PACKED, gap=3), prefill),
        (conv_case(TOKENS, gap=3, decode=True), decode),
    ):
        case.check(call)
        want, _ = case.run(call)
        wide = torch.full((*want.shape[:-1], 2 * want.shape[-1]), float("nan"))
        got, _ = case.run(call, out=wide[..., ::2])
        assert torch.equal(got, want)
        assert wide[..., 1::2].isnan().all()


def test_strided_indices_are_taken_as_they_are() -> None:
    prefill, decode = calls("CW")
    conv_case(PACKED, strided=True).check(prefill)
    conv_case(TOKENS, strided=True, decode=True).check(decode)


def test_prepared_weights_give_the_same_bits() -> None:
    ops = provider(conv="CW")
    case = conv_case(PACKED)
    ready = ops.prepare({"conv_weight": case.args["weight"]})["conv_weight"]
    assert ready is not None
    assert ready.shape == case.args["weight"].shape
    assert ready.stride() == (1, ready.shape[0])
    plain, laid_out = (c.run(ops.conv.prefill)[0] for c in (case, case.replace(weight=ready)))
    assert torch.equal(plain, laid_out)


@pytest.mark.parametrize("kinds", [[], [(0, "continue"), (0, "fresh")]])
@pytest.mark.parametrize("pads", [0, 3])
def test_batches_without_tokens_give_zero_pads(kinds: list[tuple[int, str]], pads: int) -> None:
    rows = make_rows(kinds, pads=pads)
    got, _ = conv_case(rows).run(provider(conv="CW").conv.prefill)
    assert torch.equal(got, torch.zeros_like(got))
