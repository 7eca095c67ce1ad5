"""Verify leaves committed state alone and commit leaves what the accepted path alone leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hal.model.spec import GateKind
from hal.testing.verify_cases import VerifyCase, accept, tree
from hal_triton.provider import TritonProvider
from hal_triton.tuning import Config
from support.ops import (
    Call,
    Case,
    Delta,
    Rows,
    changed_outside,
    clone_view,
    conv_case,
    delta_case,
    i32,
    make_rows,
)
from support.triton_ops import provider, watched

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DRAFTS = make_rows(
    [(4, "continue"), (1, "fork"), (0, "continue"), (5, "fresh"), (3, "stateless"), (2, "score")],
    seed=3, pads=9,
)  # fmt: skip
FEW = make_rows([(4, "fork"), (0, "fork"), (3, "fresh")], seed=5, pads=2)
HEADS = Delta(H=1, HV=2, K=16, V=24)
GATES = (GateKind.SCALAR, GateKind.CHANNEL, GateKind.SAFE, None)


class Watched:
    """Verify and commit of an interface, every launch under the guard."""

    def __init__(self, ops: Any) -> None:
        self.verify: Call = watched(ops.verify)
        self.commit: Call = watched(ops.commit)


def check(case: Case, ours: TritonProvider, *, branches: bool, seed: int = 1) -> None:
    """Parity in the strictest class: outputs round once, states keep float32's digits."""
    rows = case.rows
    drafts = VerifyCase.of(case, tree(rows, seed=seed) if branches else None, accept(rows))
    drafts.check(Watched(getattr(ours, drafts.interface)), ours.scratch_spec)


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("layout", ["ring", "CW", "WC"])
def test_conv_drafts_equal_the_oracle_in_every_layout(layout: str, branches: bool) -> None:
    for dtype in (FP32, BF16):
        case = conv_case(DRAFTS, layout=layout, dtype=dtype, channels=40)
        check(case, provider(conv=layout), branches=branches)


@pytest.mark.parametrize("width", [2, 3, 7, 8])
@pytest.mark.parametrize("layout", ["ring", "CW"])
def test_windows_of_every_width_follow_the_parents(width: int, layout: str) -> None:
    kwargs = {"width": width, "bias": False, "activation": None}
    case = conv_case(DRAFTS, layout=layout, dtype=FP16, **kwargs)
    check(case, provider(conv=layout), branches=True)


def test_a_float32_window_keeps_inputs_of_16_bits_exactly() -> None:
    for layout in ("ring", "WC"):
        case = conv_case(DRAFTS, layout=layout, dtype=BF16, state_dtype=FP32)
        check(case, provider(conv=layout), branches=True)


@pytest.mark.parametrize("tokens", [1, 8])
def test_the_tokens_of_a_row_may_be_cut_into_tiles(tokens: int) -> None:
    ours = provider({"conv.verify": Config({"BT": tokens, "BC": 32})}, conv="ring")
    check(conv_case(DRAFTS, layout="ring"), ours, branches=True)


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("gate", GATES)
def test_delta_drafts_equal_the_oracle_with_every_gate(
    gate: GateKind | None, branches: bool
) -> None:
    check(delta_case(DRAFTS, replace(HEADS, gate=gate)), provider(), branches=branches)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("gate", [GateKind.SCALAR, GateKind.SAFE])
def test_drafts_of_16_bits_round_once_and_commit_float32_s_digits(
    gate: GateKind, dtype: torch.dtype
) -> None:
    check(delta_case(FEW, replace(HEADS, gate=gate), dtype=dtype), provider(), branches=True)


def test_ready_gates_a_channel_are_taken() -> None:
    dims = replace(HEADS, gate=None, per_channel=True)
    check(delta_case(FEW, dims, dtype=BF16), provider(), branches=True)


@pytest.mark.parametrize("dims", [(5, 7), (33, 20), (128, 96)])
def test_any_dims_and_head_ratio_are_right(dims: tuple[int, int]) -> None:
    delta = Delta(H=2, HV=6, K=dims[0], V=dims[1])
    rows = make_rows([(3, "fork")], seed=2)
    check(delta_case(rows, delta, dtype=BF16), provider(), branches=True)


@pytest.mark.parametrize("branches", [False, True])
def test_sixteen_tokens_fit_in_a_row(branches: bool) -> None:
    rows = make_rows([(16, "fork"), (9, "continue")], seed=2)
    dims = replace(HEADS, HV=1)
    check(delta_case(rows, dims, dtype=BF16), provider(), branches=branches)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_shared_keys_and_beta_up_to_two_keep_float32_s_digits(dtype: torch.dtype) -> None:
    dims = Delta(H=1, HV=1, K=64, V=96, gate=None, hard=True, beta_scale=2, log_g=-1e-3)
    rows = make_rows([(8, "fork"), (6, "fresh")])
    check(delta_case(rows, dims, dtype=dtype), provider(), branches=False)


@pytest.mark.parametrize("scale", [1e-4, 1.0])
def test_the_epsilon_of_the_norm_is_inside_the_root(scale: float) -> None:
    check(delta_case(FEW, replace(HEADS, scale=scale)), provider(), branches=False)


def test_without_the_norm_keys_and_queries_are_used_as_they_are() -> None:
    dims = replace(HEADS, qk_l2norm=False, scale=0.2)
    check(delta_case(FEW, dims, dtype=FP16), provider(), branches=True)


def test_a_head_cut_into_tiles_of_values_and_parts_of_keys_is_the_same_head() -> None:
    blocks = {
        "delta_rule.verify": Config({"BV": 16, "BK": 16}),
        "delta_rule.commit": Config({"BV": 8, "BG": 1}),
    }
    rows = make_rows([(3, "fork")], seed=2)
    for layout in ("VK", "KV"):
        case = delta_case(rows, replace(HEADS, K=40), dtype=BF16, layout=layout)
        check(case, provider(blocks, recurrent=layout), branches=True)


def test_strided_inputs_pools_and_indices_are_taken_as_they_are() -> None:
    options = {"gap": 3, "strided": True}
    check(conv_case(FEW, layout="ring", **options), provider(), branches=True)
    check(delta_case(FEW, HEADS, dtype=BF16, **options), provider(), branches=True)


def test_a_state_of_16_bits_is_rounded_once_by_commit() -> None:
    case = delta_case(FEW, HEADS, dtype=BF16, state_dtype=BF16)
    check(case, provider(), branches=True)


@pytest.mark.parametrize("name", ["conv", "delta"])
def test_every_acceptance_is_the_prefix_or_nothing(name: str) -> None:
    rows = make_rows([(4, "fork"), (2, "continue"), (3, "stateless")], seed=4)
    case = conv_case(rows, layout="ring") if name == "conv" else delta_case(rows, HEADS)
    ours = provider()
    interface = VerifyCase.of(case, None, accept(rows)).interface
    for last in range(-1, 4):
        ends = i32(*[min(last, n - 1) for n in rows.lengths])
        served = Watched(getattr(ours, interface))
        VerifyCase.of(case, None, ends).check(served, ours.scratch_spec)


@pytest.mark.parametrize("name", ["conv", "delta"])
@pytest.mark.parametrize("pads", [0, 3])
def test_rows_without_tokens_do_nothing_and_pads_are_zero(name: str, pads: int) -> None:
    ours = provider()
    for kinds in ([], [(0, "continue"), (0, "fork")]):
        rows = make_rows(kinds, pads=pads)
        case = conv_case(rows, layout="ring") if name == "conv" else delta_case(rows, HEADS)
        drafts = VerifyCase.of(case, tree(rows), accept(rows))
        served = Watched(getattr(ours, drafts.interface))
        got, between, state = drafts.run(served, ours.scratch_spec)
        assert torch.equal(got, torch.zeros_like(got))
        for pool in (between, state):
            assert changed_outside(case.args["state"], pool, set()) == 0


def test_rows_may_start_from_one_source_and_commit_apart() -> None:
    rows = make_rows([(3, "fork"), (2, "fork"), (1, "stateless")], seed=6)
    shared = Rows(rows.lengths, (rows.src[0],) * 3, rows.dst, (rows.start[0],) * 3, rows.slots)
    check(delta_case(shared, HEADS), provider(), branches=False)
    check(conv_case(shared, layout="ring"), provider(), branches=False)


def test_a_strided_result_is_filled_and_nothing_between() -> None:
    ours = provider()
    for case in (conv_case(FEW, layout="ring"), delta_case(FEW, HEADS)):
        drafts = VerifyCase.of(case, None, accept(FEW))
        served = Watched(getattr(ours, drafts.interface))
        want, _, _ = drafts.run(served, ours.scratch_spec)
        wide = torch.full((*want.shape[:-1], 2 * want.shape[-1]), float("nan"))
        got, _, _ = drafts.run(served, ours.scratch_spec, out=wide[..., ::2])
        assert torch.equal(got, want)
        assert wide[..., 1::2].isnan().all()


def test_a_layer_with_a_conv_keeps_one_key_for_the_heads_that_share_it() -> None:
    rows, dims = make_rows([(3, "fork"), (2, "fresh")], seed=2), Delta(H=2, HV=6, K=16, V=24)
    case, ours = delta_case(rows, dims, dtype=BF16), provider()
    channels = 2 * dims.H * dims.K + dims.HV * dims.V

    def spec(interface: str, shapes: dict[str, Any], batch: int, width: int) -> Any:
        return ours.scratch_spec(interface, {**shapes, "conv": (4, channels)}, batch, width)

    drafts = VerifyCase.of(case, tree(rows), accept(rows))
    assert [t.shape[1] for t in drafts.scratch(spec)] == [2, 6, 6, 2]
    assert [t.shape[1] for t in drafts.scratch(ours.scratch_spec)] == [6, 6, 6, 2]
    drafts.check(Watched(ours.delta_rule), spec)


def test_one_scratch_serves_steps_of_other_lengths_and_trees() -> None:
    ours, rows = provider(), make_rows([(4, "continue")], seed=1)
    first = VerifyCase.of(delta_case(rows, HEADS, dtype=BF16), tree(rows), i32(3))
    scratch = first.scratch(ours.scratch_spec)
    for length, last in ((4, 2), (1, 0), (2, -1), (3, 2)):
        short = replace(rows, lengths=(length,))
        drafts = VerifyCase.of(delta_case(short, HEADS, dtype=BF16, seed=length), None, i32(last))
        _, wanted = drafts.expect()
        state = clone_view(drafts.case.args["state"])
        Watched(ours.delta_rule).verify(**drafts.verify_args(state), scratch=scratch)
        Watched(ours.delta_rule).commit(**drafts.commit_args(state), scratch=scratch)
        slot = rows.dst[0]
        assert (state[slot] - wanted[slot]).norm() <= 1e-5 * wanted[slot].norm()


def test_rows_that_do_not_fit_are_refused_before_anything_is_written() -> None:
    ours, rows = provider(), make_rows([(4, "continue"), (2, "fork")])
    for case, tensors in ((conv_case(rows, layout="ring"), 2), (delta_case(rows, HEADS), 4)):
        drafts = VerifyCase.of(case, None, accept(rows))
        ops, scratch = getattr(ours, drafts.interface), drafts.scratch(ours.scratch_spec)
        name, state = f"{drafts.interface}.verify", clone_view(case.args["state"])
        given = drafts.verify_args(state)

        def refused(text: str, scratch: list[Tensor], ops: Any = ops, **args: Any) -> None:
            with pytest.raises((ValueError, TypeError)) as caught:
                ops.verify(**args, scratch=scratch)
            assert text in str(caught.value)

        refused(f"{name}: scratch has 1 tensors, expected {tensors}", scratch[:1], **given)
        short = [t[:3] for t in scratch]
        refused(f"{name}: rows have 6 tokens, scratch has room for 3", short, **given)
        odd = [scratch[0][..., :1], *scratch[1:]]
        refused(f"{name}: {'inputs' if tensors == 2 else 'keys'} of scratch is", odd, **given)
        bad = {**given, "parents": i32(-1)}
        refused(f"{name}: 6 tokens, 1 entries in parents", scratch, **bad)
        with pytest.raises(ValueError, match="2 rows in src, 1 in last"):
            ops.commit(**{**drafts.commit_args(state), "last": i32(0)}, scratch=scratch)
        assert changed_outside(case.args["state"], state, set()) == 0


def test_a_row_of_more_tokens_than_the_kernels_take_is_refused() -> None:
    ours, rows = provider(), make_rows([(17, "fork")])
    drafts = VerifyCase.of(delta_case(rows, HEADS), None, accept(rows))
    with pytest.raises(ValueError, match="max_len is 17, rows may have up to 16 tokens"):
        drafts.run(ours.delta_rule, ours.scratch_spec)
