"""Failures seen in the field that no other test of the house holds."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import hal
from hal.cli.matrix import example
from hal.testing.rows import i32
from hal_cpu.provider import TorchProvider
from support import bound
from support.ops import conv_case, make_rows, worst
from support.registry import run_python

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import hal
from hal.testing.conv_cases import conv_case
from hal.testing.delta_cases import delta_case
from hal.testing.rows import make_rows
from hal_cpu.provider import TorchProvider
rows = make_rows([(70, "fork"), (1, "continue"), (3, "fresh")])
provider = TorchProvider("cpu", {})
conv_case(rows).check(provider.conv.prefill)
delta_case(rows).check(provider.delta_rule.prefill)
print(hal.select("cpu", {"model_type": "lfm2", "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 8, "vocab_size": 64, "layer_types": ["conv", "full_attention"]}).dtype)
"""


def test_the_cpu_computes_and_selects_where_triton_cannot_be_imported() -> None:
    done = run_python(WITHOUT_TRITON)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_a_convolution_of_width_one_is_refused_before_anything_runs() -> None:
    config = {**bound.LFM2_CONFIG, "conv_L_cache": 1}
    with pytest.raises((hal.Unsupported, hal.ConfigError)) as caught:
        hal.select("cpu", config)
    assert "1" in str(caught.value)


def test_one_request_after_another_in_two_slots_gives_the_same_bits() -> None:
    torch.manual_seed(0)
    layer = bound.short_conv()
    given, results = layer.inputs(5), []
    for round_ in range(6):
        (slot,) = layer.backend.pool.alloc(1)
        batch = hal.Batch(hal.Mode.EXTEND, lengths=(5,), start=(0,), src=(-1,), dst=(slot,))
        layer.backend.begin(batch)
        results.append(layer.call(given).clone())
        layer.backend.pool.free([slot])
        assert torch.equal(results[0], results[round_])


def test_track_points_of_a_step_do_not_live_on_in_the_next() -> None:
    torch.manual_seed(0)
    backend = bound.backend_for(bound.GDN_CONFIG, prefix_cache=True)
    spec = next(backend.selection.model.stateful_layers())
    assert spec.dims is not None
    layer = backend.layer(spec.index, bound.delta_params(spec.dims))
    slot, kept = backend.pool.alloc(2)
    channels = sum(size for _, size in spec.dims.segments)
    heads = spec.dims.HV

    def step(mode: hal.Mode, tokens: int, start: int, **more: object) -> None:
        source = slot if start else -1
        backend.begin(
            hal.Batch(mode, (tokens,), (start,), (source,), (slot,), **more)  # type: ignore[arg-type]
        )
        shapes = ((tokens, channels), (tokens, heads), (tokens, heads))
        layer(*(torch.randn(shape) for shape in shapes))

    step(hal.Mode.EXTEND, 6, 0, track=((0, 4, kept),))
    held = {n: t[kept].clone() for n, t in backend.pool.tensors(spec.index).items()}
    step(hal.Mode.DECODE, 1, 6)
    step(hal.Mode.EXTEND, 5, 7)
    for name, tensor in backend.pool.tensors(spec.index).items():
        assert torch.equal(tensor[kept], held[name]), name


def test_threads_that_select_and_run_first_do_not_meet() -> None:
    case = conv_case(make_rows([(9, "fork"), (1, "continue")]))

    def first(_: int) -> torch.Tensor:
        hal.select("cpu", example("qwen3_next"))
        return case.run(TorchProvider("cpu", {}).conv.prefill)[0]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(first, range(8)))
    assert all(torch.equal(results[0], result) for result in results)


@pytest.mark.slow
def test_three_hundred_thousand_tokens_in_pieces_of_any_size_end_in_one_state() -> None:
    torch.manual_seed(0)
    tokens, scan = 300_000, TorchProvider("cpu", {}).scan
    x, dt = torch.randn(tokens, 1, 2), torch.randn(tokens, 1)
    B, C = (torch.randn(tokens, 1, 4) for _ in range(2))
    ends = []
    for piece in (8_192, 65_536):
        state = torch.full((2, 1, 2, 4), float("nan"))
        for begin in range(0, tokens, piece):
            part = slice(begin, min(begin + piece, tokens))
            count = part.stop - part.start
            scan.prefill(
                x[part], dt[part], torch.tensor([-0.01]), B[part], C[part], None, None, None,
                state, i32(1 if begin else -1), i32(1), i32(0, count), count,
            )  # fmt: skip
        ends.append(state[1])
    assert ends[0].isfinite().all()
    assert worst(ends[0], ends[1].double(), 1) <= 1e-5
