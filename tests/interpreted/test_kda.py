"""Chunked prefill where every channel decays equals the oracle, however strong the decay."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hal.interfaces import Gate
from hal.model.spec import GateKind
from hal_triton.tuning import Config
from support.ops import Call, Case, Delta, Rows, delta_case, i32, make_rows
from support.triton_guard import watch
from support.triton_ops import provider, watched

HALVES = (torch.bfloat16, torch.float16)
GATES = (GateKind.CHANNEL, GateKind.SAFE, None)
WHOLE = {"delta_rule.channel_walk": Config({"BV": 128})}
SMALL = Delta(H=1, HV=2, K=16, V=24, gate=GateKind.CHANNEL)
PACKED = make_rows(
    [
        (64, "continue"),
        (1, "fork"),
        (0, "continue"),
        (65, "fresh"),
        (3, "stateless"),
        (0, "fork"),
        (97, "fork"),
        (2, "score"),
    ],
    seed=3,
    pads=70,
)

FEW = make_rows([(66, "fork"), (1, "fresh"), (0, "continue")], seed=4, pads=3)


def prefill(layout: str = "VK", **blocks: Config) -> Call:
    named = {f"delta_rule.{name}": config for name, config in blocks.items()}
    return watched(provider({**WHOLE, **named}, recurrent=layout).delta_rule.prefill)


def ready(dims: Delta) -> Delta:
    """The dims, with gates that are ready by channel where there is no gate to compute them."""
    return dims if dims.gate is not None else replace(dims, per_channel=True)


def decaying(case: Case, least: float) -> Case:
    """The case with log decays of 0 down to `least` a token, every channel its own."""
    g = torch.rand(case.args["a"].shape, generator=torch.Generator().manual_seed(7)) * least
    g[::5] = least
    g[1::7] = 0.0
    g[case.rows.bounds[-1] :] = float("nan")
    return case.replace(a=g)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", HALVES)
def test_mixed_rows_equal_the_oracle(gate: GateKind | None, dtype: torch.dtype) -> None:
    delta_case(PACKED, ready(replace(SMALL, gate=gate)), dtype=dtype).check(prefill(), "chunked")


def test_two_launches_serve_a_prefill() -> None:
    case = delta_case(make_rows([(3, "fork")]), SMALL, dtype=torch.bfloat16)
    with watch() as names:
        case.run(provider(WHOLE).delta_rule.prefill)
    assert names == ["channel_chunks", "channel_walk"]


def test_keys_too_wide_for_chunks_run_token_by_token() -> None:
    dims = replace(SMALL, HV=1, K=130)
    case = delta_case(make_rows([(5, "fork")]), dims, dtype=torch.bfloat16)
    with watch() as names:
        case.check(provider().delta_rule.prefill)
    assert names == ["delta_recurrent"]


@pytest.mark.parametrize("least", [-0.3, -20.0, -200.0])
@pytest.mark.parametrize("dtype", HALVES)
def test_decay_of_any_strength_neither_overflows_nor_loses_a_pair(
    dtype: torch.dtype, least: float
) -> None:
    dims = Delta(H=1, HV=1, K=32, V=24, gate=None, per_channel=True)
    rows = make_rows([(130, "fork"), (64, "fresh")], seed=1)
    decaying(delta_case(rows, dims, dtype=dtype), least).check(prefill(), "chunked")


@pytest.mark.parametrize("first", (0, 15, 31, 32, 50))
def test_every_pair_of_a_chunk_decays_by_what_lies_between(first: int) -> None:
    dims = Delta(H=1, HV=1, K=16, V=16, gate=None, per_channel=True)
    case = delta_case(make_rows([(64, "fresh")]), dims, dtype=torch.bfloat16)
    g = torch.zeros_like(case.args["a"])
    g[first + 1 :: 2, :, ::2] = -0.7
    g[:first] = -30.0
    case.replace(a=g).check(prefill(), "chunked")


@pytest.mark.parametrize("log_g", [-1e-3, -1e-4])
@pytest.mark.parametrize("dtype", HALVES)
def test_shared_keys_and_beta_up_to_two_stay_within_the_limits(
    dtype: torch.dtype, log_g: float
) -> None:
    dims = Delta(H=1, HV=1, K=64, V=96, gate=None, per_channel=True, hard=True, beta_scale=2,
                 log_g=log_g)  # fmt: skip
    rows = make_rows([(257, "fork")])
    delta_case(rows, dims, dtype=dtype).check(prefill(), "chunked")


@pytest.mark.parametrize("dims", [(5, 7), (33, 20), (64, 96), (128, 16)])
@pytest.mark.parametrize("ratio", [1, 3])
def test_any_dims_and_head_ratio_are_right(dims: tuple[int, int], ratio: int) -> None:
    delta = Delta(H=1, HV=ratio, K=dims[0], V=dims[1], gate=GateKind.CHANNEL)
    rows = make_rows([(67, "fork")], seed=ratio)
    delta_case(rows, delta, dtype=torch.bfloat16).check(prefill(), "chunked")


@pytest.mark.parametrize("length", [1, 32, 33, 63, 65, 128])
def test_lengths_around_the_chunk_and_its_half_are_right(length: int) -> None:
    case = delta_case(make_rows([(length, "fork")]), SMALL, dtype=torch.float16)
    case.check(prefill(), "chunked")


@pytest.mark.parametrize("chunk", [32, 64])
@pytest.mark.parametrize("warps", [1, 4, 8])
def test_the_cut_of_a_half_among_threads_changes_nothing(chunk: int, warps: int) -> None:
    blocks = {"channel_chunks": Config({"BT": chunk}, warps=warps)}
    dims = Delta(H=1, HV=1, K=64, V=16, gate=GateKind.SAFE)
    case = delta_case(make_rows([(70, "fork")]), dims, dtype=torch.bfloat16)
    case.check(prefill(**blocks), "chunked")


@pytest.mark.parametrize("scale", [1e-4, 1.0])
def test_the_epsilon_of_the_norm_is_inside_the_root(scale: float) -> None:
    dims = replace(SMALL, scale=scale)
    delta_case(FEW, dims, dtype=torch.bfloat16).check(prefill(), "chunked")


@pytest.mark.parametrize("scale", [1e-3, 0.3])
@pytest.mark.parametrize("dtype", HALVES)
def test_without_the_norm_keys_and_queries_keep_their_lengths(
    dtype: torch.dtype, scale: float
) -> None:
    dims = replace(SMALL, qk_l2norm=False, scale=scale)
    delta_case(FEW, dims, dtype=dtype).check(prefill(), "chunked")


@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_values_and_states_of_any_size_are_carried(size: float) -> None:
    case = delta_case(FEW, SMALL, dtype=torch.bfloat16)
    grown = {name: case.args[name] * size for name in ("v", "state")}
    case.replace(**grown).check(prefill(), "chunked")


@pytest.mark.parametrize("layout", ["VK", "KV"])
def test_both_state_layouts_are_read_and_written(layout: str) -> None:
    case = delta_case(FEW, SMALL, layout=layout, dtype=torch.bfloat16)
    case.check(prefill(layout), "chunked")


def test_a_head_cut_into_tiles_is_the_same_head() -> None:
    case = delta_case(make_rows([(66, "continue")]), SMALL, dtype=torch.bfloat16)
    case.check(prefill(channel_walk=Config({"BV": 16})), "chunked")


def test_track_stores_states_at_multiples_of_the_chunk_and_at_a_row_s_end() -> None:
    rows = make_rows([(130, "fork"), (1, "fresh"), (64, "stateless")], spare=12)
    unused = [s for s in range(1, rows.slots) if s not in {*rows.src, *rows.dst}]
    points = [(0, 64), (0, 128), (0, 130), (1, 1), (2, 64)]
    flat = [n for i, (row, count) in enumerate(points) for n in (row, count, unused[i])]
    track = i32(*flat, 0, 5, -1).view(-1, 3)
    delta_case(rows, SMALL, dtype=torch.float16, track=track).check(prefill(), "chunked")


@pytest.mark.parametrize("options", [{"gap": 3}, {"strided": True}])
def test_strided_inputs_pools_and_indices_are_taken_as_they_are(options: dict[str, int]) -> None:
    case = delta_case(FEW, SMALL, dtype=torch.bfloat16, **options)
    case.check(prefill(), "chunked")


def test_a_strided_result_is_filled_and_nothing_between() -> None:
    case = delta_case(make_rows([(40, "fork")], pads=3), SMALL, dtype=torch.bfloat16)
    want, _ = case.run(prefill())
    wide = torch.full((*want.shape[:-1], 2 * want.shape[-1]), float("nan"), dtype=want.dtype)
    got, _ = case.run(prefill(), out=wide[..., ::2])
    assert torch.equal(got, want)
    assert wide[..., 1::2].isnan().all()


@pytest.mark.parametrize("kinds", [[], [(0, "continue"), (0, "fresh")]])
@pytest.mark.parametrize("pads", [0, 3])
def test_batches_without_tokens_give_zero_pads(kinds: list[tuple[int, str]], pads: int) -> None:
    case = delta_case(make_rows(kinds, pads=pads), SMALL, dtype=torch.bfloat16)
    got, _ = case.run(prefill())
    assert torch.equal(got, torch.zeros_like(got))


def test_several_rows_may_start_from_one_source() -> None:
    rows = make_rows([(3, "fork"), (2, "fork"), (1, "stateless")], seed=6)
    shared = Rows(rows.lengths, (rows.src[0],) * 3, rows.dst, (3, 3, 3), rows.slots)
    delta_case(shared, SMALL, dtype=torch.bfloat16).check(prefill(), "chunked")


def test_a_cut_anywhere_gives_the_state_of_the_whole() -> None:
    dims = Delta(H=1, HV=1, K=16, V=16, gate=GateKind.SAFE)
    whole = delta_case(make_rows([(90, "fork")]), dims, dtype=torch.float16)
    call = provider(WHOLE).delta_rule.prefill
    _, want = whole.run(call)
    args, slot = whole.args, whole.rows.dst[0]
    for cut in (1, 33):
        state = args["state"].clone()
        for src, span in ((whole.rows.src[0], slice(0, cut)), (slot, slice(cut, 90))):
            call(**_piece(args, span, src, slot), state=state)
        error = (state[slot] - want[slot]).norm() / want[slot].norm()
        assert error < 3e-3


def _piece(args: dict[str, Any], span: slice, src: int, dst: int) -> dict[str, Any]:
    parts: dict[str, Any] = {name: args[name][span] for name in ("q", "k", "v", "a", "b")}
    length = span.stop - span.start
    gate: Gate = args["gate"]
    bounds: Tensor = i32(0, length)
    return parts | {"gate": gate, "src": i32(src), "dst": i32(dst), "query_start_loc": bounds,
                    "max_len": length}  # fmt: skip
