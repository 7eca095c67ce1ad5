"""Traps of the vendor's functions stay shut: a test for each, and each guard is needed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hal.model.spec import GateKind
from hal.testing.conv_cases import conv_case
from hal.testing.delta_cases import Delta, delta_case
from hal.testing.rows import NAN, i32, make_rows
from hal.testing.verify_cases import VerifyCase
from npu import fakes
from npu.fakes import Build
from npu.guards import GUARDS, Guard

BF16 = torch.bfloat16
KV = {"recurrent": "KV"}
MIXED = ((5, "fork"), (2, "fresh"), (70, "continue"), (1, "fresh"), (3, "fork"))
PADDED = tuple((1, kind) for kind in ("continue", "pad", "fork", "fresh", "pad"))
DRAFTS = ((3, "continue"), (2, "fork"), (3, "fresh"))


def rows(kinds: Any = MIXED, pads: int = 0) -> Any:
    return make_rows(kinds, seed=5, pads=pads, spare=4)


def decode(**changes: Any) -> Any:
    return delta_case(rows(PADDED), decode=True, **changes)


ERRORS = (
    AssertionError,
    ArithmeticError,
    LookupError,
    NameError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a test fails with where a guard is gone: its own assertion, or the vendor's error."""


@pytest.fixture
def build() -> Build:
    return fakes.build


def test_h1_a_bias_counts_in_decode(build: Build) -> None:
    case = conv_case(rows([(1, "continue")] * 3), decode=True)
    case.check(build().conv.decode)


def test_h2_pad_rows_leave_the_last_slot_alone(build: Build) -> None:
    case = conv_case(rows([(1, "continue"), (1, "pad")]), bias=False, decode=True)
    assert case.errors(build().conv.decode).stray == 0


def test_h3_rows_of_several_drafts_are_verified(build: Build) -> None:
    provider = build()
    verify(conv_case(rows(DRAFTS), bias=False)).check(provider.conv, provider.scratch_spec)


def test_h4_fresh_rows_beside_others_leave_the_right_window(build: Build) -> None:
    case = conv_case(rows())
    assert case.errors(build().conv.prefill).state == 0


def test_h5_rows_without_a_source_start_from_zeros(build: Build) -> None:
    conv_case(rows([(4, "fresh"), (2, "stateless")])).check(build().conv.prefill)


def test_h5_a_float32_weight_meets_16_bit_inputs(build: Build) -> None:
    conv_case(rows(), dtype=BF16, weight_dtype=torch.float32).check(build().conv.prefill)


def test_h6_an_odd_last_head_is_computed(build: Build) -> None:
    for heads in (1, 3):
        dims = Delta(H=1, HV=heads)
        decode(dims=dims, layout="KV").check(build(KV).delta_rule.decode)


def test_h7_channel_gates_do_not_reach_the_one_token_kernel(build: Build) -> None:
    dims = Delta(gate=GateKind.CHANNEL)
    decode(dims=dims, layout="KV").check(build(KV).delta_rule.decode)


def test_h7_chains_of_channel_gates_are_verified(build: Build) -> None:
    provider = build()
    case = verify(delta_case(rows(DRAFTS), Delta(gate=GateKind.CHANNEL)))
    case.check(provider.delta_rule, provider.scratch_spec)


def test_h8_a_prefill_has_bounds(build: Build) -> None:
    prefill(rows([(3, "fresh")])).check(build().delta_rule.prefill, "chunked")


def test_h9_dims_above_128_are_refused_in_prefill(build: Build) -> None:
    for dims in (Delta(K=160), Delta(V=160)):
        case = prefill(rows([(3, "fresh")]), dims)
        with pytest.raises(ValueError, match=r"^delta_rule.prefill: [KV] = 160, .* up to 128"):
            case.run(build().delta_rule.prefill)


def test_h10_empty_rows_reach_no_chunk(build: Build) -> None:
    kinds = [(0, "continue"), (3, "fork"), (0, "fork"), (2, "fresh"), (0, "continue")]
    prefill(rows(kinds, pads=2)).check(build().delta_rule.prefill, "chunked")


def test_h12_a_strided_pool_keeps_its_update(build: Build) -> None:
    case = delta_case(rows([(1, "continue")] * 3), layout="KV", decode=True, gap=2)
    case.check(build(KV).delta_rule.decode)


def test_h13_steps_of_other_lengths_follow_each_other(build: Build) -> None:
    rule = build().delta_rule
    for lengths in ((3, 5), (6, 2), (1, 7)):
        case = prefill(rows([(length, "fork") for length in lengths]))
        case.check(rule.prefill, "chunked")


def test_h14_nan_of_a_stale_slot_reaches_nobody(build: Build) -> None:
    case = conv_case(rows([(4, "fresh"), (2, "fresh")]))
    case.args["state"].fill_(NAN)
    got, _ = case.run(build().conv.prefill)
    assert torch.isfinite(got).all()


def test_h15_rows_without_a_target_write_nowhere(build: Build) -> None:
    case = decode()
    assert case.errors(build().delta_rule.decode).stray == 0


def test_h15_windows_without_a_target_are_written_nowhere(build: Build) -> None:
    case = conv_case(rows(PADDED), decode=True)
    assert case.errors(build().conv.decode).stray == 0


def test_h17_pad_rows_are_zero(build: Build) -> None:
    for layout in ("VK", "KV"):
        case = decode(layout=layout)
        assert case.errors(build({"recurrent": layout}).delta_rule.decode).pads == 0


def test_h18_ids_are_int64_where_addresses_are_made_of_them(build: Build) -> None:
    name = "fused_sigmoid_gating_delta_rule_update_npu"
    seen, spy = watched(name)
    decode(layout="KV").run(build(KV, **{name: spy}).delta_rule.decode)
    assert seen[0]["initial_state_indices"].dtype == torch.int64


def test_h18_slots_are_int64_where_addresses_are_made_of_them(build: Build) -> None:
    seen, spy = watched("kda_target_verify_npu")
    decode().run(build(kda_target_verify_npu=spy).delta_rule.decode)
    assert seen[0]["initial_state_indices"].dtype == torch.int64


def test_h22_no_rows_and_no_tokens_reach_no_convolution(build: Build) -> None:
    for kinds in ([], [(0, "continue"), (0, "fork")]):
        case = conv_case(rows(kinds, pads=2))
        case.check(build().conv.prefill)


def test_h22_no_rows_and_no_tokens_reach_no_chunk(build: Build) -> None:
    for kinds in ([], [(0, "continue"), (0, "fork")]):
        case = prefill(rows(kinds, pads=2))
        case.check(build().delta_rule.prefill, "chunked")


def test_h23_switches_of_the_environment_are_refused(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDN_USE_MEGA_GDN", "1")
    with pytest.raises(ValueError, match=r"GDN_USE_MEGA_GDN: needed 0 or unset; offered 1"):
        build()


def test_h24_other_ranks_and_counts_of_results_are_taken(build: Build) -> None:
    chunk = fakes.function(fakes.called()["chunk_gated_delta_rule_npu"])

    def later(**given: Any) -> tuple[Tensor, Tensor]:
        o, ends, _ = chunk(**given)
        return o[0].flatten(1), ends

    case = prefill(rows())
    case.check(build(chunk_gated_delta_rule_npu=later).delta_rule.prefill, "chunked")


def test_h25_kernels_see_no_negative_id_but_minus_one(build: Build) -> None:
    case = decode()
    away = case.replace(
        **{n: torch.where(case.args[n] < 0, -9, case.args[n]) for n in ("src", "dst")}
    )
    seen, spy = watched("kda_target_verify_npu")
    moved, move = watched("speculative_state_scatter_npu")
    given = {"kda_target_verify_npu": spy, "speculative_state_scatter_npu": move}
    away.run(build(**given).delta_rule.decode)
    assert seen[0]["initial_state_indices"].min() == -1
    assert moved[0]["dst_indices"].min() == -1


def test_h11_h16_h19_to_h21_functions_with_traps_are_not_bound(build: Build) -> None:
    import hal_npu.symbols

    bound = {symbol.name for symbol in hal_npu.symbols.SYMBOLS if symbol.operations}
    assert bound == {
        "causal_conv1d_fn_npu",
        "causal_conv1d_linear_verify_npu",
        "chunk_gated_delta_rule_npu",
        "fused_sigmoid_gating_delta_rule_update_npu",
        "kda_target_verify_npu",
        "speculative_state_scatter_npu",
    }


def test_trees_are_refused_by_verify(build: Build) -> None:
    provider = build()
    for case in (conv_case(rows(DRAFTS)), delta_case(rows(DRAFTS))):
        tree = replace(verify(case), parents=i32(-1, 0, 0, -1, 0, -1, 0, 0))
        with pytest.raises(ValueError, match=r"^\w+.verify: parents were given"):
            tree.run(getattr(provider, tree.interface), provider.scratch_spec)


def test_float32_is_refused_in_prefill(build: Build) -> None:
    case = delta_case(rows([(3, "fresh")]))
    with pytest.raises(TypeError, match=r"q is float32, npu.ascend takes bfloat16, float16"):
        case.run(build().delta_rule.prefill)


def test_channel_gates_are_refused_in_prefill(build: Build) -> None:
    case = prefill(rows([(3, "fresh")]), Delta(gate=GateKind.CHANNEL))
    with pytest.raises(ValueError, match="a decay for every key channel"):
        case.run(build().delta_rule.prefill)


def test_rows_without_tokens_commit_nothing(build: Build) -> None:
    provider = build()
    case = delta_case(rows([(2, "continue"), (0, "fork")]))
    one = VerifyCase.of(case, None, i32(1, 0))
    one.check(provider.delta_rule, provider.scratch_spec)


def test_short_keys_are_normed_as_the_contract_has_it(build: Build) -> None:
    for layout in ("VK", "KV"):
        case = decode(dims=Delta(scale=1e-4), layout=layout)
        case.check(build({"recurrent": layout}).delta_rule.decode)


def prefill(made: Any, dims: Delta | None = None) -> Any:
    return delta_case(made, dims or Delta(), dtype=BF16)


def verify(case: Any) -> VerifyCase:
    ends = [length - 1 for length in case.rows.lengths]
    return VerifyCase.of(case, None, i32(*ends))


def watched(name: str) -> tuple[list[dict[str, Any]], Callable[..., Any]]:
    """The keywords of every call of a function, and the function."""
    seen: list[dict[str, Any]] = []
    call = fakes.function(fakes.called()[name])

    def spy(**given: Any) -> Any:
        seen.append(given)
        return call(**given)

    return seen, spy


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: f"{guard.hazards}-{guard.test}")
def test_without_its_guard_a_test_fails(
    guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = globals()[guard.test]
    more = {"monkeypatch": monkeypatch} if guard.hazards == "H23" else {}
    with fakes.edited(guard.edits, tmp_path):
        try:
            test(fakes.build, **more)
        except (*ERRORS, pytest.fail.Exception):
            return
    pytest.fail(f"{guard.test} passes without its guard")


def test_every_hazard_of_the_docs_has_a_guard_or_a_reason() -> None:
    text = (Path(__file__).parents[2] / "docs" / "npu.md").read_text()
    listed = set(re.findall(r"^\| H(\d+) ", text, re.MULTILINE))
    guarded = {number for guard in GUARDS for number in re.findall(r"H(\d+)", guard.hazards)}
    assert listed == guarded == {str(number) for number in range(1, 26)}
