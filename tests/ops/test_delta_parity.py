"""The CPU delta rule equals the float64 oracle over dtypes, dims, gates, layouts and lengths."""

from dataclasses import replace

import pytest
import torch

from hal.model.spec import GateKind
from hal_cpu.chunk import CHANNEL_CHUNK, SCALAR_CHUNK
from hal_cpu.provider import TorchProvider
from hal_cpu.recurrent import IN_PLACE_ELEMENTS
from support.ops import LIMITS, Call, Delta, delta_case, i32, make_rows, worst

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
GATES = (GateKind.SCALAR, GateKind.CHANNEL, GateKind.SAFE, None)
C = SCALAR_CHUNK
MIXED = make_rows(
    [
        (C, "continue"),
        (1, "fork"),
        (0, "continue"),
        (C + 1, "fresh"),
        (1, "continue"),
        (3, "stateless"),
        (C - 1, "fork"),
        (1, "score"),
        (2, "fresh"),
        (0, "fork"),
        (1, "fresh"),
    ],
    seed=3,
    pads=3,
)
ROWS = make_rows(
    [(1, "continue"), (1, "fresh"), (1, "pad"), (1, "fork"), (1, "stateless"), (1, "pad")], seed=4
)
SMALL, LARGE = Delta(H=2, HV=4, K=16, V=24), Delta(H=2, HV=4, K=96, V=192)


def prefill(layout: str = "VK") -> Call:
    return TorchProvider("cpu", {"layouts": {"recurrent": layout}}).delta_rule.prefill


def decode(layout: str = "VK") -> Call:
    return TorchProvider("cpu", {"layouts": {"recurrent": layout}}).delta_rule.decode


def test_the_dims_of_this_sweep_reach_both_ways_to_decode() -> None:
    assert SMALL.HV * SMALL.K * SMALL.V < IN_PLACE_ELEMENTS <= LARGE.HV * LARGE.K * LARGE.V


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("layout", ["VK", "KV"])
def test_prefill_of_mixed_rows_equals_the_oracle(gate: GateKind | None, layout: str) -> None:
    delta_case(MIXED, Delta(gate=gate), layout=layout).check(prefill(layout))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_prefill_rounds_once_in_every_dtype(gate: GateKind | None, dtype: torch.dtype) -> None:
    delta_case(MIXED, Delta(gate=gate), dtype=dtype).check(prefill())


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("layout", ["VK", "KV"])
@pytest.mark.parametrize("dims", [SMALL, LARGE], ids=["small", "large"])
def test_decode_equals_the_oracle(gate: GateKind | None, layout: str, dims: Delta) -> None:
    dims = Delta(H=dims.H, HV=dims.HV, K=dims.K, V=dims.V, gate=gate)
    delta_case(ROWS, dims, layout=layout, decode=True).check(decode(layout))


@pytest.mark.parametrize("dims", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_decode_rounds_once_in_every_dtype(dtype: torch.dtype, dims: Delta) -> None:
    delta_case(ROWS, dims, dtype=dtype, decode=True).check(decode())


@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
@pytest.mark.parametrize("dims", [(5, 7), (16, 32), (33, 20), (64, 96), (96, 16)])
def test_any_dims_and_head_ratio_are_right(ratio: int, dims: tuple[int, int]) -> None:
    delta = Delta(H=2, HV=2 * ratio, K=dims[0], V=dims[1])
    rows = make_rows([(19, "fork"), (1, "continue"), (4, "fresh")], seed=ratio)
    delta_case(rows, delta, seed=ratio).check(prefill())
    delta_case(ROWS, delta, seed=ratio, decode=True).check(decode())


@pytest.mark.parametrize("length", [1, 2, CHANNEL_CHUNK - 1, CHANNEL_CHUNK, C - 1, C, C + 1, 257])
@pytest.mark.parametrize("gate", [GateKind.SCALAR, GateKind.CHANNEL])
@pytest.mark.parametrize("kind", ["fresh", "fork"])
def test_lengths_around_the_chunk_are_right(length: int, gate: GateKind, kind: str) -> None:
    delta_case(make_rows([(length, kind)]), Delta(gate=gate)).check(prefill())


@pytest.mark.parametrize("log_g", [-1e-3, -1e-4])
@pytest.mark.parametrize("per_channel", [False, True])
def test_shared_keys_and_beta_up_to_two_stay_within_the_limits(
    log_g: float, per_channel: bool
) -> None:
    dims = Delta(
        K=64, V=96, gate=None, hard=True, beta_scale=2, per_channel=per_channel, log_g=log_g
    )
    delta_case(make_rows([(257, "fork"), (64, "fresh")]), dims).check(prefill())


@pytest.mark.slow
@pytest.mark.parametrize("hard", [False, True])
def test_long_rows_of_served_dims_stay_within_the_limits(hard: bool) -> None:
    dims = Delta(H=1, HV=2, K=128, V=128, hard=hard, gate=None if hard else GateKind.SCALAR,
                 log_g=-1e-3 if hard else None, beta_scale=2)  # fmt: skip
    delta_case(make_rows([(1024, "fork")]), dims).check(prefill())


@pytest.mark.parametrize("kind", [GateKind.SCALAR, GateKind.CHANNEL, GateKind.SAFE])
def test_beta_scale_two_is_applied(kind: GateKind) -> None:
    dims = Delta(gate=kind, beta_scale=2, hard=True)
    delta_case(MIXED, dims).check(prefill())
    delta_case(ROWS, dims, decode=True).check(decode())


def test_the_epsilon_of_the_norm_is_inside_the_root() -> None:
    delta_case(MIXED, Delta(scale=1e-4)).check(prefill())
    delta_case(ROWS, Delta(scale=1e-4), decode=True).check(decode())


def test_without_the_norm_keys_and_queries_are_used_as_they_are() -> None:
    dims = Delta(qk_l2norm=False, scale=0.2)
    delta_case(MIXED, dims).check(prefill())
    delta_case(ROWS, dims, decode=True).check(decode())


@pytest.mark.parametrize("ready", [False, True])
def test_float32_gates_beside_bfloat16_inputs_are_used_as_they_are(ready: bool) -> None:
    dims = Delta(gate=None if ready else GateKind.SCALAR)
    case = delta_case(MIXED, dims, dtype=torch.bfloat16)
    case.replace(a=case.args["a"].float(), b=case.args["b"].float()).check(prefill())


@pytest.mark.parametrize("gate", [GateKind.SCALAR, GateKind.CHANNEL])
def test_track_stores_the_state_of_the_prefix_at_any_count(gate: GateKind) -> None:
    rows = make_rows([(70, "fork"), (1, "fresh"), (9, "stateless"), (0, "continue")], spare=12)
    unused = [s for s in range(1, rows.slots) if s not in {*rows.src, *rows.dst}]
    points = [(0, 1), (0, 33), (0, 64), (0, 70), (1, 1), (2, 9), (2, 4)]
    track = [[row, count, unused[i]] for i, (row, count) in enumerate(points)]
    case = delta_case(
        rows, Delta(gate=gate), track=torch.tensor([*track, [0, 5, -1]], dtype=torch.int32)
    )
    case.check(prefill())


def test_a_tracked_state_has_the_bits_of_its_prefix_run_alone() -> None:
    rows = make_rows([(100, "fork")], spare=6)
    slot = next(s for s in range(1, rows.slots) if s not in {*rows.src, *rows.dst})
    case = delta_case(rows, track=i32(0, 41, slot).view(1, 3))
    _, state = case.run(prefill())
    cut = {name: case.args[name][:41] for name in ("q", "k", "v", "a", "b")}
    alone = delta_case(rows).replace(**cut, query_start_loc=i32(0, 41))
    _, prefix = alone.run(prefill())
    assert torch.equal(state[slot], prefix[rows.dst[0]])


@pytest.mark.parametrize("dims", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("hard", [False, True])
def test_sixty_four_decodes_in_place_stay_within_the_limits(dims: Delta, hard: bool) -> None:
    dims = replace(dims, gate=None if hard else GateKind.SCALAR, hard=hard, log_g=-1e-3)
    case = delta_case(make_rows([(64, "continue")]), replace(dims, beta_scale=2))
    want, end = case.expect()
    state, slot = case.args["state"].clone(), case.args["dst"]
    got = torch.cat(
        [
            decode()(
                **{name: case.args[name][t : t + 1] for name in ("q", "k", "v", "a", "b")},
                gate=case.args["gate"], state=state, src=slot, dst=slot,
            )
            for t in range(64)
        ]
    )  # fmt: skip
    limits = LIMITS["float32", "one rounding"]
    assert worst(got.transpose(0, 1), want.transpose(0, 1), 1) <= limits[0]
    assert worst(state[slot], end[slot], 2) <= limits[1]
