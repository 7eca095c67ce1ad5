"""What a decode step costs on the host: the batch, `begin`, replay metadata, a layer's call.

A layer's group holds its call and the bare calls of the same provider on the same tensors. Before
each round of the one the other runs, so that both find the caches alike. The difference of their
medians is the layer's own cost; with operations that do nothing it is that of its code alone.
"""

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

import hal
from hal.interfaces import Gate
from hal.model.spec import DeltaDims, ShortConvDims
from hal.runtime.backend import Backend
from hal.runtime.batch import Batch, Mode
from hal.runtime.layers import DeltaLayer, ShortConvLayer
from hal.runtime.params import DeltaParams, ShortConvParams
from support.bound import GDN_CONFIG, LFM2_CONFIG

Run = Callable[[], object]
SIZES = (1, 8, 64)
ROUNDS = 2000
DELTA = GDN_CONFIG | {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def backend(config: dict[str, object]) -> Backend:
    selection = hal.select("cpu", config, dtype="float32", graphs=True)
    return selection.backend(slots=256, max_batch=64, max_tokens=4096)


def batch(rows: int) -> Batch:
    slots = list(range(1, rows + 1))
    return Batch(Mode.DECODE, [1] * rows, list(range(100, 100 + rows)), slots, slots)


def delta_layer() -> tuple[Backend, DeltaLayer]:
    made = backend(DELTA)
    spec = next(made.selection.model.stateful_layers())
    dims = cast("DeltaDims", spec.dims)
    channels = sum(size for _, size in dims.segments)
    gate = Gate(dims.gate, torch.rand(dims.HV), torch.randn(dims.HV), None, 1.0)
    params = DeltaParams(torch.randn(channels, dims.W), None, gate, None, 1e-6)
    return made, cast("DeltaLayer", made.layer(spec.index, params))


def delta(rows: int, idle: bool = False) -> tuple[Run, Run]:
    """A whole layer, and its provider's conv and recurrence by hand."""
    made, layer = delta_layer()
    if idle:
        layer.bound_conv.decode = cast("Any", Idle(torch.zeros(rows, sum(layer.sizes))))
        layer.decode = cast("Any", Idle(torch.zeros(rows, layer.dims.HV, layer.dims.V)))
    made.begin(batch(rows))
    step, dims, conv = layer.current.get(), layer.dims, layer.bound_conv
    mixed = torch.randn(rows, sum(layer.sizes))
    a, b = torch.randn(rows, dims.HV), torch.randn(rows, dims.HV)
    slots = (step.src, step.dst)

    def bare() -> object:
        taps = (conv.weight, conv.bias, conv.state, *slots, step.start)
        y = conv.decode.decode(mixed, *taps, activation="silu")
        q, k, v = y.split_with_sizes(layer.sizes, dim=-1)
        heads = (q.view(rows, dims.H, dims.K), k.view(rows, dims.H, dims.K))
        values = v.view(rows, dims.HV, dims.V)
        return layer.decode.decode(*heads, values, a, b, layer.params.gate, layer.state, *slots)

    def whole() -> object:
        layer.ran = conv.ran = None
        return layer(mixed, a, b)

    return whole, bare


def short_conv(rows: int) -> tuple[Run, Run]:
    """A whole layer, and its provider's conv between the two products by hand."""
    made = backend(LFM2_CONFIG)
    spec = next(made.selection.model.stateful_layers())
    dims = cast("ShortConvDims", spec.dims)
    params = ShortConvParams(torch.randn(dims.hidden, dims.W), None)
    layer = cast("ShortConvLayer", made.layer(spec.index, params))
    made.begin(batch(rows))
    step, conv = layer.current.get(), layer.bound_conv
    B, C, x = (torch.randn(rows, dims.hidden) for _ in range(3))

    def bare() -> Tensor:
        taps = (conv.weight, conv.bias, conv.state, step.src, step.dst, step.start)
        return C * conv.decode.decode(B * x, *taps, activation=None)

    def whole() -> Tensor:
        conv.ran = None
        return layer(B, C, x)

    return whole, bare


class Idle:
    """An operation that gives a tensor made before."""

    def __init__(self, out: Tensor) -> None:
        self.out = out

    def decode(self, *given: object, **named: object) -> Tensor:
        return self.out


def idle_delta(rows: int) -> tuple[Run, Run]:
    """The same with a conv and a recurrence that do nothing."""
    return delta(rows, idle=True)


def timed(benchmark: BenchmarkFixture, group: str, run: Run, before: Run | None = None) -> None:
    """Rounds of one call each, with `before` run untimed ahead of each."""
    benchmark.group = group

    def setup() -> None:
        if before is not None:
            before()

    benchmark.pedantic(run, setup=setup, rounds=ROUNDS, warmup_rounds=20)


@pytest.mark.parametrize("rows", SIZES)
def test_batch(benchmark: BenchmarkFixture, rows: int) -> None:
    timed(benchmark, "the batch, which the engine makes", lambda: batch(rows))


@pytest.mark.parametrize("rows", SIZES)
def test_begin(benchmark: BenchmarkFixture, rows: int) -> None:
    made, _ = delta_layer()
    given = batch(rows)
    timed(benchmark, "begin", lambda: made.begin(given))


@pytest.mark.parametrize("rows", SIZES)
def test_replay_metadata_in_a_capture_of_64(benchmark: BenchmarkFixture, rows: int) -> None:
    made, layer = delta_layer()
    inputs = [torch.zeros(64, n) for n in (sum(layer.sizes), layer.dims.HV, layer.dims.HV)]
    with made.capture(Mode.DECODE, 64):
        layer(*inputs)
    given = batch(rows)
    timed(benchmark, "replay metadata", lambda: made.stage(given))


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("side", ["layer", "bare"])
@pytest.mark.parametrize("make", [delta, idle_delta, short_conv])
def test_layer(
    benchmark: BenchmarkFixture, make: Callable[[int], tuple[Run, Run]], side: str, rows: int
) -> None:
    whole, bare = make(rows)
    run, other = (whole, bare) if side == "layer" else (bare, whole)
    timed(benchmark, f"{make.__name__}, {rows} rows", run, other)
