"""The scan kernels equal the float64 oracle over kinds, dims, dtypes and lengths."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from hal.testing.scan_cases import Scan, scan_case
from hal.testing.verify_cases import VerifyCase, accept, chain, tree
from hal_triton.tuning import Config
from support.ops import NAN, Call, Rows, i32, make_rows
from support.triton_guard import watch
from support.triton_ops import provider, watched

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INF = float("inf")
LIMITS = ((0.0, 0.1), (0.5, INF), (1e-3, INF))
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
SMALL = Scan(H=2, P=8, N=16, G=1)
KINDS = {
    "mamba2": Scan(),
    "gated": Scan(H=2, G=1, z=True),
    "bare": Scan(H=2, D=False, dt_bias=False),
    "plain dt": Scan(H=2, dt_softplus=False, dt_limit=(1e-3, 0.5)),
    "mamba1": Scan(kind="mamba1", G=1, z=True),
    "zamba": Scan(kind="mamba1", G=4),
    "lightning": Scan(kind="lightning", H=2),
}


def kind_of(dims: Scan, dtype: torch.dtype) -> str:
    return "one rounding" if dims.kind == "mamba1" or dtype == torch.float32 else "chunked"


def rows_of(dims: Scan) -> Rows:
    """Mamba-1 runs token by token, so that long rows cost the interpreter much."""
    return SHORT if dims.kind == "mamba1" else PACKED


def prefill(blocks: Mapping[str, Config] | None = None) -> Call:
    return watched(provider(blocks).scan.prefill)


def decode(blocks: Mapping[str, Config] | None = None) -> Call:
    return watched(provider(blocks).scan.decode)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", KINDS)
def test_decode_rounds_once_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    scan_case(TOKENS, KINDS[name], dtype=dtype, decode=True).check(decode())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", KINDS)
def test_prefill_of_mixed_rows_equals_the_oracle(name: str, dtype: torch.dtype) -> None:
    dims = KINDS[name]
    scan_case(rows_of(dims), dims, dtype=dtype).check(prefill(), kind_of(dims, dtype))


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("kind", ["mamba2", "mamba1"])
def test_the_dt_limit_binds_in_prefill_in_decode_and_in_verify(
    kind: str, limit: tuple[float, float]
) -> None:
    dims = Scan(kind=kind, H=2, G=1, dt_limit=limit)
    scan_case(SHORT, dims).check(prefill())
    scan_case(TOKENS, dims, decode=True).check(decode())
    check_verify(dims, torch.float32, "chain")


@pytest.mark.parametrize("P, N", [(5, 7), (24, 48), (16, 256)])
@pytest.mark.parametrize("kind", ["mamba2", "mamba1", "lightning"])
def test_any_dims_are_right(kind: str, P: int, N: int) -> None:
    dims = Scan(kind=kind, H=2, P=P, N=N, G=1)
    scan_case(TOKENS, dims, decode=True).check(decode())
    rows = make_rows([(9 if kind == "mamba1" else 70, "fork"), (1, "continue")], seed=P)
    scan_case(rows, dims, dtype=torch.bfloat16).check(prefill(), "chunked")
    check_verify(dims, torch.float32, "tree")


@pytest.mark.parametrize("H, G", [(6, 2), (4, 4), (3, 1), (20, 1)])
def test_any_ratio_of_heads_to_groups_is_right(H: int, G: int) -> None:
    dims = Scan(H=H, P=4, N=4, G=G)
    rows = make_rows([(1, "fork")])
    scan_case(rows, dims, decode=True).check(decode())
    scan_case(make_rows([(17, "fork")]), dims, dtype=torch.float16).check(prefill(), "chunked")


@pytest.mark.parametrize("kind", ["mamba2", "mamba1"])
def test_a_head_cut_into_tiles_is_the_same_head(kind: str) -> None:
    cut = {
        name: Config({"BP": 16, "BT": 32, "BR": 2})
        for name in ("scan.decode", "scan.decode.channel", "scan.recurrent", "scan.walk",
                     "scan.walk.float32", "scan.prepare", "scan.verify", "scan.verify.channel",
                     "scan.commit", "scan.commit.channel")
    }  # fmt: skip
    dims = Scan(kind=kind, H=1, P=24, N=8, G=1)
    rows = make_rows([(1, "continue"), (1, "fresh")])
    scan_case(rows, dims, decode=True).check(decode(cut))
    rows = make_rows([(8, "continue")])
    scan_case(rows, dims, dtype=torch.bfloat16).check(prefill(cut), "chunked")
    scan_case(rows, dims).check(prefill(cut))
    check_verify(dims, torch.float32, "tree", cut)


@pytest.mark.parametrize("length", [1, 31, 32, 63, 64, 65, 128, 193])
def test_lengths_around_the_chunk_are_right(length: int) -> None:
    dims = Scan(H=2, G=1)
    case = scan_case(make_rows([(length, "fork")]), dims, dtype=torch.float16)
    case.check(prefill(), "chunked")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("segment", [64, 128])
def test_long_rows_cut_into_segments_are_the_same_rows(segment: int, dtype: torch.dtype) -> None:
    rows = make_rows(
        [(segment, "fork"), (0, "fork"), (2 * segment + 1, "fresh"), (2, "continue"),
         (3 * segment, "continue"), (segment + 1, "stateless")],
        seed=7, pads=70,
    )  # fmt: skip
    found = Config({"BP": 16, "BT": 64, "SEG": segment})
    cut = {f"scan.walk{part}": found for part in ("", ".float16", ".float32")}
    case = scan_case(rows, Scan(H=1, P=8, N=8, G=1, z=True), dtype=dtype)
    case.check(prefill(cut), kind_of(SMALL, dtype))


def test_segments_keep_slow_decays_and_strong_ones() -> None:
    cut = {"scan.walk.float32": Config({"BP": 16, "BT": 32, "BJ": 16, "SEG": 64})}
    case = scan_case(make_rows([(300, "fork")]), Scan(H=2, G=1))
    case.replace(A=torch.tensor([-1e-4, -50.0])).check(prefill(cut))


@pytest.mark.parametrize("kind", ["mamba2", "mamba1"])
def test_strong_decays_are_finite_and_right(kind: str) -> None:
    case = scan_case(make_rows([(70, "fork"), (1, "fork")]), Scan(kind=kind, H=2, G=1))
    dt = case.args["dt"].clone()
    dt[5:9], dt[64] = 60.0, 200.0
    case.replace(dt=dt, dt_bias=None).check(prefill())


def test_float32_steps_beside_bfloat16_inputs_are_used_as_they_are() -> None:
    case = scan_case(PACKED, SMALL, dtype=torch.bfloat16)
    dt = case.args["dt"].float() * 1.001
    case.replace(dt=dt).check(prefill(), "chunked")
    case = scan_case(TOKENS, SMALL, dtype=torch.bfloat16, decode=True)
    case.replace(dt=torch.randn(case.args["dt"].shape)).check(decode())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_track_stores_states_at_multiples_of_the_chunk_and_at_a_row_s_end(
    dtype: torch.dtype,
) -> None:
    rows = make_rows([(200, "fork"), (1, "fresh"), (128, "stateless")], spare=12)
    unused = [s for s in range(1, rows.slots) if s not in {*rows.src, *rows.dst}]
    points = [(0, 64), (0, 192), (0, 200), (1, 1), (2, 64), (2, 128)]
    flat = [n for i, (row, count) in enumerate(points) for n in (row, count, unused[i])]
    track = i32(*flat, 0, 5, -1).view(-1, 3)
    found = Config({"BP": 16, "BT": 64, "SEG": 64})
    for cut in (None, {"scan.walk": found, "scan.walk.float32": found}):
        case = scan_case(rows, SMALL, dtype=dtype, track=track)
        case.check(prefill(cut), kind_of(SMALL, dtype))


def test_mamba1_tracks_any_count() -> None:
    rows = make_rows([(9, "fork"), (1, "fresh")], spare=6)
    unused = [s for s in range(1, rows.slots) if s not in {*rows.src, *rows.dst}]
    track = i32(0, 4, unused[0], 0, 9, unused[1], 1, 1, unused[2], 0, 5, -1).view(-1, 3)
    scan_case(rows, Scan(kind="mamba1"), track=track).check(prefill())


@pytest.mark.parametrize("options", [{"gap": 3}, {"strided": True}])
@pytest.mark.parametrize("kind", ["mamba2", "mamba1"])
def test_strided_inputs_pools_and_indices_are_taken_as_they_are(
    kind: str, options: dict[str, Any]
) -> None:
    dims = Scan(kind=kind, H=2, G=1, z=True)
    scan_case(TOKENS, dims, decode=True, **options).check(decode())
    scan_case(SHORT, dims, **options).check(prefill())
    check_verify(dims, torch.float32, "tree", **options)


@pytest.mark.parametrize("kind", ["mamba2", "mamba1"])
def test_a_transposed_pool_gets_the_writes_in_its_own_storage(kind: str) -> None:
    dims = Scan(kind=kind, H=2, G=1)
    for case, call in (
        (scan_case(TOKENS, dims, decode=True), decode()),
        (scan_case(SHORT, dims), prefill()),
    ):
        view = case.args["state"].transpose(-1, -2).contiguous().transpose(-1, -2)
        case.replace(state=view).check(call)


@pytest.mark.parametrize("kind", ["mamba2", "mamba1"])
def test_a_strided_result_is_filled_and_nothing_between(kind: str) -> None:
    dims = Scan(kind=kind, H=2, G=1)
    for case, call in (
        (scan_case(TOKENS, dims, decode=True), decode()),
        (scan_case(SHORT, dims), prefill()),
    ):
        want, _ = case.run(call)
        wide = torch.full((*want.shape[:-1], 2 * want.shape[-1]), NAN)
        got, _ = case.run(call, out=wide[..., ::2])
        assert torch.equal(got, want)
        assert wide[..., 1::2].isnan().all()


@pytest.mark.parametrize("state", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["mamba2", "mamba1"])
def test_a_narrow_state_is_rounded_once_a_call(kind: str, state: torch.dtype) -> None:
    dims = Scan(kind=kind, H=2, G=1)
    for case, call in (
        (scan_case(TOKENS, dims, dtype=state, decode=True), decode()),
        (scan_case(SHORT, dims, dtype=state), prefill()),
    ):
        held = case.args["state"].to(state)
        case.replace(state=held).check(call, kind_of(dims, torch.float32 if case.decode else state))


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("kind", ["mamba2", "mamba1"])
def test_nan_of_one_row_stays_in_that_row(kind: str, row: int) -> None:
    rows = make_rows([(5, "fork"), (7, "fork"), (1, "fork"), (1, "fresh")])
    case = scan_case(rows, Scan(kind=kind, H=2, G=1, z=True), dtype=torch.bfloat16)
    clean, end = case.run(prefill())
    hot = {name: tensor.clone() for name, tensor in case.tokens.items()}
    for tensor in hot.values():
        tensor[rows.spans()[row]] = NAN
    got, state = case.replace(**hot).run(prefill())
    for i, span in enumerate(rows.spans()):
        if i == row:
            assert got[span].isnan().all()
        else:
            assert torch.equal(got[span], clean[span])
            assert torch.equal(state[rows.dst[i]], end[rows.dst[i]])


@pytest.mark.parametrize("kind", ["mamba2", "mamba1"])
@pytest.mark.parametrize("rows", [[], [(0, "continue"), (0, "fresh")]])
@pytest.mark.parametrize("pads", [0, 3])
def test_batches_without_tokens_give_zero_pads(
    rows: list[tuple[int, str]], pads: int, kind: str
) -> None:
    case = scan_case(make_rows(rows, pads=pads), Scan(kind=kind, z=True))
    got, _ = case.run(prefill())
    assert torch.equal(got, torch.zeros_like(got))


def test_several_rows_may_start_from_one_source() -> None:
    rows = make_rows([(3, "fork"), (2, "fork"), (1, "stateless")], seed=6)
    shared = Rows(rows.lengths, (rows.src[0],) * 3, rows.dst, (3, 3, 3), rows.slots)
    scan_case(shared, SMALL).check(prefill())


DRAFTS = make_rows(
    [(4, "continue"), (1, "fork"), (0, "continue"), (3, "fresh"), (5, "fork"), (2, "stateless")],
    seed=3, pads=3,
)  # fmt: skip


def check_verify(
    dims: Scan,
    dtype: torch.dtype,
    shape: str,
    blocks: Mapping[str, Config] | None = None,
    rows: Rows = DRAFTS,
    **options: Any,
) -> None:
    """Verify and commit against the oracle, both under watch."""
    served = provider(blocks)
    parents = {"none": None, "chain": chain(rows), "tree": tree(rows, seed=2)}[shape]
    verify = VerifyCase.of(scan_case(rows, dims, dtype=dtype, **options), parents, accept(rows))
    verify.check(Watched(served.scan), served.scratch_spec)


class Watched:
    """Verify and commit of a scan under the guard."""

    def __init__(self, scan: Any) -> None:
        self.verify = self._under(scan.verify)
        self.commit = self._under(scan.commit)

    @staticmethod
    def _under(call: Any) -> Call:
        def run(**args: Any) -> Any:
            with watch():
                return call(**args)

        return run


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", ["none", "tree"])
@pytest.mark.parametrize("name", ["gated", "plain dt", "bare", "zamba", "lightning"])
def test_verify_and_commit_round_once(name: str, shape: str, dtype: torch.dtype) -> None:
    check_verify(KINDS[name], dtype, shape)


@pytest.mark.parametrize("kind", ["mamba2", "mamba1"])
def test_a_branch_does_not_see_its_siblings(kind: str) -> None:
    rows = make_rows([(4, "fork")], seed=8)
    case, parents = scan_case(rows, Scan(kind=kind, H=2, G=1)), i32(-1, 0, 0, 2)
    served = provider()
    verify = VerifyCase.of(case, parents, i32(3))
    clean, _, state = verify.run(served.scan, served.scratch_spec)
    hot = {n: t.clone() for n, t in case.tokens.items()}
    for tensor in hot.values():
        tensor[1] = NAN
    dirty = VerifyCase.of(case.replace(**hot), parents, i32(3))
    result, _, end = dirty.run(served.scan, served.scratch_spec)
    assert torch.equal(result[[0, 2, 3]], clean[[0, 2, 3]])
    assert torch.equal(end[rows.dst[0]], state[rows.dst[0]])


@pytest.mark.parametrize("kind", ["mamba2", "mamba1"])
def test_empty_drafts_verify_to_nothing(kind: str) -> None:
    for rows in (make_rows([]), make_rows([(0, "fork"), (0, "fresh")], pads=3)):
        check_verify(Scan(kind=kind, H=2, G=1), torch.float32, "tree", rows=rows)


def test_rates_of_another_dtype_and_scratch_of_another_count_are_refused() -> None:
    case = scan_case(SHORT, SMALL)
    with pytest.raises(TypeError, match=r"^scan\.prefill: D is bfloat16, expected float32$"):
        case.replace(D=case.args["D"].bfloat16()).run(provider().scan.prefill)
    verify = VerifyCase.of(scan_case(DRAFTS, SMALL), None, accept(DRAFTS))
    held = verify.case.args["state"].clone()
    with pytest.raises(ValueError, match=r"^scan\.verify: scratch has 0 tensors, expected 4$"):
        provider().scan.verify(**verify.verify_args(held), scratch=[])
    with pytest.raises(ValueError, match=r"^scan\.commit: scratch has 0 tensors, expected 4$"):
        provider().scan.commit(**verify.commit_args(held), scratch=[])
