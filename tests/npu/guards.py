"""Every guard of the adapter, the edit that takes it out, and the test that then fails."""

from __future__ import annotations

from dataclasses import dataclass

from npu.fakes import Edit


@dataclass(frozen=True, slots=True)
class Guard:
    """A guard of the hazards named, by the test that holds it and the edits that remove it."""

    hazards: str
    test: str
    edits: tuple[Edit, ...]


_DECODE = (
    "conv",
    "result = self._run(x.unsqueeze(2), weight, bias, gather(state, src), windows, activation)",
    "from npu import fakes\n        result = fakes.conv_by_update("
    "x.unsqueeze(2), state, weight, bias, src, windows)",
)
_VERIFY = (
    "conv",
    "result = self._run(cells, weight, bias, heads, windows, activation)",
    "from npu import fakes\n        result = fakes.conv_by_update("
    "cells, self._by_channel(state), weight, bias, src, windows)",
)
_BOUNDS = "cu_seqlens=torch.tensor(bounds, device=carried.device),"

GUARDS = (
    Guard("H1", "test_h1_a_bias_counts_in_decode", (_DECODE,)),
    Guard("H2", "test_h2_pad_rows_leave_the_last_slot_alone", (_DECODE,)),
    Guard("H3", "test_h3_rows_of_several_drafts_are_verified", (_VERIFY,)),
    Guard(
        "H4",
        "test_h4_fresh_rows_beside_others_leave_the_right_window",
        (
            (
                "conv",
                "torch.ones(rows, dtype=torch.bool, device=x.device)",
                "_ints([row.src for row in spans.rows], x) >= 0",
            ),
        ),
    ),
    Guard(
        "H5",
        "test_h5_rows_without_a_source_start_from_zeros",
        (
            ("rows", "state.index_select(0, src.clamp_min(0).long())", "state[src.long()]"),
            ("rows", "return taken.masked_fill_(fresh, 0)", "return taken"),
        ),
    ),
    Guard(
        "H5",
        "test_h5_a_float32_weight_meets_16_bit_inputs",
        (("conv", "x=x.float().t().contiguous(),", "x=x.t().contiguous(),"),),
    ),
    Guard(
        "H6",
        "test_h6_an_odd_last_head_is_computed",
        (("delta_rule", " and heads % 2 == 0", ""),),
    ),
    Guard(
        "H7",
        "test_h7_channel_gates_do_not_reach_the_one_token_kernel",
        (("delta_rule", "gate.kind is GateKind.SCALAR and ", ""),),
    ),
    Guard(
        "H7",
        "test_h7_chains_of_channel_gates_are_verified",
        (
            (
                "delta_rule",
                "result = self._run(cells, gate, self._value_major(state), src, snapshots, "
                "qk_l2norm)",
                "from npu import fakes\n        result = fakes.kda_by_update("
                "cells, gate, self._value_major(state), src, snapshots.shape[1])",
            ),
        ),
    ),
    Guard("H8", "test_h8_a_prefill_has_bounds", (("chunked", _BOUNDS, "cu_seqlens=None,"),)),
    Guard(
        "H9",
        "test_h9_dims_above_128_are_refused_in_prefill",
        (("chunked", "MAX_DIM: Final = 128", "MAX_DIM: Final = 512"),),
    ),
    Guard(
        "H10",
        "test_h10_empty_rows_reach_no_chunk",
        (("rows", "            if end > begin\n", ""),),
    ),
    Guard(
        "H12",
        "test_h12_a_strided_pool_keeps_its_update",
        (
            ("delta_rule", "ends = gather(state, src)", "ends = state"),
            (
                "delta_rule",
                "            initial_state_indices=count_up(rows, src),\n            scale",
                "            initial_state_indices=slots(src),\n            scale",
            ),
            (
                "delta_rule",
                "self._store(state, ends.unsqueeze(1), dst, torch.zeros_like(dst))",
                "pass",
            ),
        ),
    ),
    Guard(
        "H13",
        "test_h13_steps_of_other_lengths_follow_each_other",
        (
            ("chunked", _BOUNDS, "cu_seqlens=Bounds.of(bounds),"),
            ("chunked", "class Chunked:", "from npu.fakes import Bounds\n\n\nclass Chunked:"),
        ),
    ),
    Guard(
        "H14",
        "test_h14_nan_of_a_stale_slot_reaches_nobody",
        (("rows", "return taken.masked_fill_(fresh, 0)", "return taken * ~fresh"),),
    ),
    Guard(
        "H15",
        "test_h15_rows_without_a_target_write_nowhere",
        (
            (
                "delta_rule",
                "        self._move(\n",
                "        from npu import fakes\n        fakes.move_by_step(\n",
            ),
        ),
    ),
    Guard(
        "H15",
        "test_h15_windows_without_a_target_are_written_nowhere",
        (
            (
                "conv",
                "        self._move(\n",
                "        from npu import fakes\n        fakes.move_by_step(\n",
            ),
        ),
    ),
    Guard(
        "H17",
        "test_h17_pad_rows_are_zero",
        (("rows", "return result.masked_fill(pads, 0)", "return result"),),
    ),
    Guard(
        "H18",
        "test_h18_ids_are_int64_where_addresses_are_made_of_them",
        (
            (
                "rows",
                "torch.arange(rows, device=like.device)",
                "torch.arange(rows, dtype=torch.int32, device=like.device)",
            ),
        ),
    ),
    Guard(
        "H18",
        "test_h18_slots_are_int64_where_addresses_are_made_of_them",
        (("rows", "ids.clamp_min(NONE).long()", "ids.clamp_min(NONE)"),),
    ),
    Guard(
        "H22",
        "test_h22_no_rows_and_no_tokens_reach_no_convolution",
        (("conv", "        if not spans.rows:\n", "        if False:\n"),),
    ),
    Guard(
        "H22",
        "test_h22_no_rows_and_no_tokens_reach_no_chunk",
        (("chunked", "default=0", "default=1"),),
    ),
    Guard(
        "H23",
        "test_h23_switches_of_the_environment_are_refused",
        (("provider", "list(switched())", "list[str]()"),),
    ),
    Guard(
        "H24",
        "test_h24_other_ranks_and_counts_of_results_are_taken",
        (("chunked", "o, ends, *_ = ", "o, ends, _ = "),),
    ),
    Guard(
        "H24",
        "test_h24_other_ranks_and_counts_of_results_are_taken",
        (("chunked", "return o.reshape(inputs.v.shape), ", "return o, "),),
    ),
    Guard(
        "H25",
        "test_h25_kernels_see_no_negative_id_but_minus_one",
        (("rows", "ids.clamp_min(NONE).long()", "ids.long()"),),
    ),
    Guard(
        "H11, H16, H19, H20, H21",
        "test_h11_h16_h19_to_h21_functions_with_traps_are_not_bound",
        (
            (
                "symbols",
                '"block_idx_last_scheduled_token=None, initial_state_idx=None, '
                'validate_data=False)",\n',
                '"block_idx_last_scheduled_token=None, initial_state_idx=None, '
                'validate_data=False)",\n        ("conv.decode",),\n',
            ),
        ),
    ),
    Guard(
        "trees",
        "test_trees_are_refused_by_verify",
        (("scratch", "    if parents is not None:\n", "    if False:\n"),),
    ),
    Guard(
        "float32 prefill",
        "test_float32_is_refused_in_prefill",
        (("chunked", "    if dtype not in DTYPES:\n", "    if False:\n"),),
    ),
    Guard(
        "channel prefill",
        "test_channel_gates_are_refused_in_prefill",
        (("chunked", "    if inputs.a.ndim != 2:\n", "    if False:\n"),),
    ),
    Guard(
        "garbage of commit",
        "test_rows_without_tokens_commit_nothing",
        (("rows", "slots(last.masked_fill(empty, NONE))", "slots(last)"),),
    ),
    Guard(
        "eps outside the root",
        "test_short_keys_are_normed_as_the_contract_has_it",
        (("operands", "c = stretch(k, qk_l2norm)", "c = torch.ones_like(k[..., :1])"),),
    ),
)
"""In the order of docs/npu.md; the hazards that no guard is for are those of functions not called.
"""
