"""The delta-rule kernels equal the float64 oracle over gates, dims, dtypes and lengths."""

import pytest
import torch

from hal.model.spec import GateKind
from hal_triton.tuning import Config
from support.ops import Call, Delta, delta_case, i32, make_rows
from support.triton_ops import provider, watched

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)
GATES = (GateKind.SCALAR, GateKind.CHANNEL, GateKind.SAFE, None)
SMALL = Delta(H=1, HV=2, K=16, V=24)
TOKENS = make_rows(
    [(1, "continue"), (1, "fresh"), (1, "pad"), (1, "fork"), (1, "stateless"), (1, "pad")], seed=4
)
PACKED = make_rows(
    [
        (64, "continue"),
        (1, "fork"),
        (0, "continue"),
        (65, "fresh"),
        (1, "continue"),
        (3, "stateless"),
        (0, "fork"),
        (130, "fork"),
        (2, "score"),
    ],
    seed=3,
    pads=70,
)
SHORT = make_rows(
    [(3, "continue"), (0, "continue"), (5, "fresh"), (1, "fork"), (2, "stateless")], seed=6, pads=3
)


def kind_of(dtype: torch.dtype) -> str:
    return "one rounding" if dtype == torch.float32 else "chunked"


def prefill(layout: str = "VK", **blocks: Config) -> Call:
    return watched(provider(recurrent=layout).delta_rule.prefill)


def decode(layout: str = "VK") -> Call:
    return watched(provider(recurrent=layout).delta_rule.decode)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_decode_rounds_once_in_every_dtype(gate: GateKind | None, dtype: torch.dtype) -> None:
    delta_case(TOKENS, Delta(gate=gate), dtype=dtype, decode=True).check(decode())


@pytest.mark.parametrize("dims", [(5, 7), (33, 20), (64, 96), (128, 16), (16, 256)])
@pytest.mark.parametrize("ratio", [1, 3])
def test_any_dims_and_head_ratio_are_right(dims: tuple[int, int], ratio: int) -> None:
    delta = Delta(H=2, HV=2 * ratio, K=dims[0], V=dims[1])
    delta_case(TOKENS, delta, decode=True).check(decode())
    rows = make_rows([(70, "fork"), (1, "continue")], seed=ratio)
    delta_case(rows, delta, dtype=torch.bfloat16).check(prefill(), "chunked")


@pytest.mark.parametrize("layout", ["VK", "KV"])
def test_both_state_layouts_are_read_and_written(layout: str) -> None:
    delta_case(TOKENS, layout=layout, decode=True).check(decode(layout))
    delta_case(SHORT, SMALL, layout=layout).check(prefill(layout))
    case = delta_case(PACKED, SMALL, layout=layout, dtype=torch.bfloat16)
    case.check(prefill(layout), "chunked")


@pytest.mark.parametrize("tile", [8, 16])
def test_a_head_cut_into_tiles_is_the_same_head(tile: int) -> None:
    blocks = {
        f"delta_rule.{name}": Config({"BV": tile}) for name in ("decode", "walk", "recurrent")
    }
    ops = provider(blocks).delta_rule
    rows = make_rows([(1, "continue"), (1, "fresh")])
    delta_case(rows, SMALL, decode=True).check(watched(ops.decode))
    rows = make_rows([(66, "continue")])
    delta_case(rows, SMALL, dtype=torch.float16).check(watched(ops.prefill), "chunked")
    delta_case(SHORT, SMALL).check(watched(ops.prefill))


@pytest.mark.parametrize("gate", [GateKind.SCALAR, None])
@pytest.mark.parametrize("dtype", HALVES)
def test_chunked_prefill_of_mixed_rows_equals_the_oracle(
    gate: GateKind | None, dtype: torch.dtype
) -> None:
    dims = Delta(H=1, HV=2, K=16, V=24, gate=gate)
    delta_case(PACKED, dims, dtype=dtype).check(prefill(), "chunked")


@pytest.mark.parametrize("gate", GATES)
def test_float32_prefill_keeps_float32_digits(gate: GateKind | None) -> None:
    delta_case(SHORT, Delta(H=1, HV=2, K=16, V=24, gate=gate)).check(prefill())


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 193])
def test_lengths_around_the_chunk_are_right(length: int) -> None:
    case = delta_case(make_rows([(length, "fork")]), SMALL, dtype=torch.float16)
    case.check(prefill(), "chunked")


@pytest.mark.parametrize("log_g", [-1e-3, -1e-4])
@pytest.mark.parametrize("dtype", HALVES)
def test_shared_keys_and_beta_up_to_two_stay_within_the_limits(
    dtype: torch.dtype, log_g: float
) -> None:
    dims = Delta(H=1, HV=2, K=64, V=96, gate=None, hard=True, beta_scale=2, log_g=log_g)
    rows = make_rows([(257, "fork"), (64, "fresh")])
    delta_case(rows, dims, dtype=dtype).check(prefill(), "chunked")


@pytest.mark.parametrize("scale", [1e-4, 1.0])
def test_the_epsilon_of_the_norm_is_inside_the_root(scale: float) -> None:
    delta_case(TOKENS, Delta(scale=scale), decode=True).check(decode())
    dims = Delta(H=1, HV=2, K=16, V=24, scale=scale)
    delta_case(PACKED, dims, dtype=torch.bfloat16).check(prefill(), "chunked")


def test_without_the_norm_keys_and_queries_are_used_as_they_are() -> None:
    dims = Delta(H=1, HV=2, K=16, V=24, qk_l2norm=False, scale=0.2)
    delta_case(TOKENS, dims, decode=True).check(decode())
    delta_case(SHORT, dims).check(prefill())
    delta_case(PACKED, dims, dtype=torch.float16).check(prefill(), "chunked")


def test_track_stores_states_at_multiples_of_the_chunk_and_at_a_row_s_end() -> None:
    rows = make_rows([(200, "fork"), (1, "fresh"), (128, "stateless")], spare=12)
    unused = [s for s in range(1, rows.slots) if s not in {*rows.src, *rows.dst}]
    points = [(0, 64), (0, 192), (0, 200), (1, 1), (2, 64), (2, 128)]
    flat = [n for i, (row, count) in enumerate(points) for n in (row, count, unused[i])]
    track = i32(*flat, 0, 5, -1).view(-1, 3)
    case = delta_case(rows, SMALL, dtype=torch.float16, track=track)
    case.check(prefill(), "chunked")


def test_float32_prefill_tracks_any_count() -> None:
    rows = make_rows([(9, "fork"), (1, "fresh")], spare=6)
    unused = [s for s in range(1, rows.slots) if s not in {*rows.src, *rows.dst}]
    track = i32(0, 4, unused[0], 0, 9, unused[1], 1, 1, unused[2], 0, 5, -1).view(-1, 3)
    delta_case(rows, SMALL, track=track).check(prefill())


@pytest.mark.parametrize("options", [{"gap": 3}, {"strided": True}])
def test_strided_inputs_pools_and_indices_are_taken_as_they_are(options: dict[str, int]) -> None:
    delta_case(TOKENS, decode=True, **options).check(decode())
    case = delta_case(PACKED, SMALL, dtype=torch.bfloat16, **options)
    case.check(prefill(), "chunked")


def test_a_strided_result_is_filled_and_nothing_between() -> None:
    for case, call in (
        (delta_case(TOKENS, decode=True), decode()),
        (delta_case(SHORT, SMALL), prefill()),
    ):
        want, _ = case.run(call)
        wide = torch.full((*want.shape[:-1], 2 * want.shape[-1]), float("nan"))
        got, _ = case.run(call, out=wide[..., ::2])
        assert torch.equal(got, want)
        assert wide[..., 1::2].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kinds", [[], [(0, "continue"), (0, "fresh")]])
@pytest.mark.parametrize("pads", [0, 3])
def test_batches_without_tokens_give_zero_pads(
    kinds: list[tuple[int, str]], pads: int, dtype: torch.dtype
) -> None:
    got, _ = delta_case(make_rows(kinds, pads=pads), SMALL, dtype=dtype).run(prefill())
    assert torch.equal(got, torch.zeros_like(got))


def test_several_rows_may_start_from_one_source() -> None:
    rows = make_rows([(3, "fork"), (2, "fork"), (1, "stateless")], seed=6)
    shared = type(rows)(rows.lengths, (rows.src[0],) * 3, rows.dst, (3, 3, 3), rows.slots)
    delta_case(shared, SMALL).check(prefill())
