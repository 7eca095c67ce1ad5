"""Time what a decode step costs on the host: the batch, `begin`, replay metadata, a layer's call.

Layers run beside bare calls of the same provider on the same tensors, in one interleaved run of
thread time, so that other work on the machine counts less. Run with `OMP_NUM_THREADS=1`.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor

import hal
from hal.interfaces import Gate
from hal.model.spec import DeltaDims, ShortConvDims
from hal.runtime.backend import Backend
from hal.runtime.batch import Batch, Mode
from hal.runtime.layers import DeltaLayer, ShortConvLayer
from hal.runtime.params import DeltaParams, ShortConvParams

Run = Callable[[], object]
DELTA = {
    "model_type": "qwen3_5_text",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "vocab_size": 64,
}
SHORT_CONV = {
    "model_type": "lfm2",
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "conv_L_cache": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "vocab_size": 64,
}


@dataclass(frozen=True, slots=True)
class Result:
    """Median and least microseconds; of a layer also those of the bare calls beside it."""

    case: str
    us: float
    least_us: float
    bare_us: float | None = None

    @property
    def over_us(self) -> float | None:
        return None if self.bare_us is None else self.us - self.bare_us


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


def delta(rows: int) -> tuple[Run, Run]:
    """A whole layer, and its provider's conv and recurrence by hand."""
    made, layer = delta_layer()
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
    made = backend(SHORT_CONV)
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


def staged(rows: int) -> Run:
    """Replay metadata of `rows` rows in a capture of 64."""
    made, layer = delta_layer()
    inputs = [torch.zeros(64, n) for n in (sum(layer.sizes), layer.dims.HV, layer.dims.HV)]
    with made.capture(Mode.DECODE, 64):
        layer(*inputs)
    given = batch(rows)
    return lambda: made.stage(given)


def steps(rows: int) -> dict[str, Run]:
    made, _ = delta_layer()
    given = batch(rows)
    return {
        f"batch, {rows} rows": lambda: batch(rows),
        f"begin, {rows} rows": lambda: made.begin(given),
        f"replay metadata, {rows} rows of 64": staged(rows),
    }


def timed(run: Run) -> float:
    start = time.thread_time()
    run()
    return 1e6 * (time.thread_time() - start)


def measure(name: str, run: Run, repeats: int) -> Result:
    run()
    times = [timed(run) for _ in range(repeats)]
    return Result(name, median(times), min(times))


def beside(name: str, sides: tuple[Run, Run], repeats: int) -> Result:
    """The layer's time and that of the bare calls, which go first in every other round."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats):
        for side in (0, 1) if turn % 2 else (1, 0):
            times[side].append(timed(sides[side]))
    ours, bare = times
    return Result(name, median(ours), min(ours), median(bare))


def results(repeats: int) -> list[Result]:
    found = []
    for rows in (1, 8, 64):
        found += [measure(name, run, repeats) for name, run in steps(rows).items()]
        found.append(beside(f"delta layer, {rows} rows", delta(rows), repeats))
        found.append(beside(f"short-conv layer, {rows} rows", short_conv(rows), repeats))
    return found


def row(found: Result) -> str:
    cells: list[Any] = [found.us, found.least_us]
    text = " ".join(f"{value:9.1f}" for value in cells)
    if found.bare_us is None or found.over_us is None:
        return f"{found.case:32} {text}"
    return f"{found.case:32} {text} {found.bare_us:9.1f} {found.over_us:9.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        found = results(args.repeats)
    if args.json:
        print(json.dumps([{**asdict(r), "over_us": r.over_us} for r in found], indent=2))
        return
    print(f"{'case':32} {'us':>9} {'least':>9} {'bare us':>9} {'over us':>9}")
    for each in found:
        print(row(each))


if __name__ == "__main__":
    main()
