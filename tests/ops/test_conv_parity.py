"""The CPU convolution equals the float64 oracle over widths, dtypes, layouts and lengths."""

import pytest
import torch

from hal_cpu.conv import BLOCK_ELEMENTS
from hal_cpu.provider import TorchProvider
from support.ops import Call, conv_case, make_rows

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = range(2, 9)
KINDS = ("fresh", "continue", "fork", "stateless", "score")


def prefill(layout: str = "CW") -> Call:
    return TorchProvider("cpu", {"layouts": {"conv": layout}}).conv.prefill


def decode(layout: str = "CW") -> Call:
    return TorchProvider("cpu", {"layouts": {"conv": layout}}).conv.decode


def mixed(width: int) -> list[tuple[int, str]]:
    """Every kind of row at lengths from none to beyond the window."""
    lengths = (0, 1, 2, width - 1, width, 13)
    return [(n, KINDS[(i + j) % 5]) for i, n in enumerate(lengths) for j in (0, 2)]


ROWS = make_rows(
    [(1, "continue"), (1, "fresh"), (1, "pad"), (1, "fork"), (1, "stateless"), (1, "pad")], seed=5
)


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_bias_and_activation_equals_the_oracle(
    width: int, bias: bool, activation: str | None
) -> None:
    rows = make_rows(mixed(width), seed=width, pads=2)
    kwargs = {"width": width, "bias": bias, "activation": activation}
    conv_case(rows, **kwargs).check(prefill())
    conv_case(ROWS, decode=True, **kwargs).check(decode())


@pytest.mark.parametrize("layout", ["CW", "WC"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_layout_and_dtype_equals_the_oracle(layout: str, dtype: torch.dtype) -> None:
    rows = make_rows(mixed(4), seed=1, pads=2)
    conv_case(rows, layout=layout, dtype=dtype).check(prefill(layout))
    conv_case(ROWS, layout=layout, dtype=dtype, decode=True).check(decode(layout))


@pytest.mark.parametrize("length", [1, 2, 8, 249])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_float32_window_beside_any_activation_is_exact(dtype: torch.dtype, length: int) -> None:
    rows = make_rows([(length, "fork")])
    conv_case(rows, dtype=dtype, state_dtype=torch.float32).check(prefill())
    conv_case(ROWS, dtype=dtype, state_dtype=torch.float32, decode=True).check(decode())


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_window_holds_the_very_inputs(dtype: torch.dtype) -> None:
    rows = make_rows([(2, "fork"), (9, "fresh"), (1, "continue")], seed=2)
    case = conv_case(rows, dtype=dtype)
    _, state = case.run(prefill())
    _, want = case.expect()
    live = list(rows.dst)
    assert torch.equal(state[live].double(), want[live])


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_row_shorter_than_the_window_shifts_it_into_dst_only(length: int) -> None:
    rows = make_rows([(length, "fork")], seed=7)
    case = conv_case(rows, width=4)
    _, state = case.run(prefill())
    src, dst = rows.src[0], rows.dst[0]
    old, x = case.args["state"][src], case.args["x"]
    assert torch.equal(state[src], old)
    assert torch.equal(state[dst], torch.cat((old, x[:length].T), 1)[:, -3:])


@pytest.mark.parametrize("channels", [1, 5, 64, 100, 1000])
def test_any_channel_count_is_right(channels: int) -> None:
    conv_case(make_rows(mixed(4)), channels=channels).check(prefill())
    conv_case(ROWS, channels=channels, decode=True).check(decode())


def test_rows_longer_than_a_block_are_right() -> None:
    channels, width = 512, 4
    block = BLOCK_ELEMENTS // channels
    rows = make_rows([(block - 1, "fork"), (block + 1, "fresh"), (2 * block, "continue")])
    conv_case(rows, channels=channels, width=width).check(prefill())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_another_dtype_and_prepared_ones_are_used_alike(dtype: torch.dtype) -> None:
    provider = TorchProvider("cpu", {})
    case = conv_case(make_rows(mixed(4)), dtype=dtype)
    case.replace(weight=case.args["weight"].float(), bias=case.args["bias"].float()).check(
        provider.conv.prefill
    )
    ready = provider.prepare({"conv_weight": case.args["weight"]})["conv_weight"]
    assert ready is not None
    assert ready.shape == case.args["weight"].shape
    plain, _ = case.run(provider.conv.prefill)
    laid_out, _ = case.replace(weight=ready).run(provider.conv.prefill)
    assert torch.equal(plain, laid_out)


@pytest.mark.parametrize("layout", ["CW", "WC"])
def test_track_stores_the_window_at_any_count(layout: str) -> None:
    rows = make_rows([(7, "fork"), (1, "fresh"), (9, "stateless"), (0, "continue")], spare=12)
    unused = [s for s in range(1, rows.slots) if s not in {*rows.src, *rows.dst}]
    points = [(0, 1), (0, 2), (0, 3), (0, 7), (1, 1), (2, 9), (2, 4)]
    track = [[row, count, unused[i]] for i, (row, count) in enumerate(points)]
    track = torch.tensor([*track, [0, 5, -1], [99, 99, -7]], dtype=torch.int32)
    conv_case(rows, layout=layout, track=track).check(prefill(layout))
