"""Every provider that is wrong where words meet, or between calls, is caught by the named test."""

from typing import Any

import pytest

from kit import corner_liars as liars
from kit.subtle_liars import half, left, shown
from support.kit import catches

PARITY = "test_every_declared_point_equals_the_oracle"
ACCEPT = "test_verify_and_commit_equal_the_accepted_path"
CUT = "test_any_cut_of_a_row_gives_the_same"
BATCH = "test_a_row_is_the_same_alone_and_in_any_order"
PADS = "test_what_pads_hold_changes_no_bit"
WRITES = "test_only_addressed_slots_change"
NAN = "test_nan_of_a_row_reaches_no_other"
EMPTY = "test_rows_without_tokens_change_nothing"
VIEWS = "test_views_equal_copies"
OUT = "test_a_given_result_is_filled_and_returned"
TRACK = "test_a_tracked_state_is_that_of_the_prefix_alone"
FAR = "test_track_points_beyond_32_bits_are_addressed"
ERRORS = "test_bad_arguments_are_refused_before_anything_is_written"
LAYERS = "test_two_layers_in_turn_know_nothing_of_each_other"
AGAIN = "test_a_repeated_call_reads_what_its_tensors_hold_now"
NONE = "test_any_negative_id_means_none"
ALONE = "test_pads_alone_give_zeros"
INFERENCE = "test_a_call_in_inference_mode_is_right"

CONV, CONV_1, DELTA, DELTA_1, SCAN, SCAN_1 = (
    f"{interface}.{verb}"
    for interface in ("conv", "delta_rule", "scan")
    for verb in ("prefill", "decode")
)
PREFILLS, DECODES = (CONV, DELTA, SCAN), (CONV_1, DELTA_1, SCAN_1)
EVERY = ("conv.verify", "delta_rule.verify", "scan.verify")
COMMITS = ("conv.commit", "delta_rule.commit", "scan.commit")
ALL = (*PREFILLS, *DECODES, *EVERY)
CONVS, DELTAS, SCANS = (CONV, CONV_1), (DELTA, DELTA_1), (SCAN, SCAN_1)

LIARS: list[tuple[str, tuple[str, ...], Any, str]] = [
    ("copied in 16 bits", (*PREFILLS, *DECODES), liars.copied_where(half), VIEWS),
    (
        "copied in the second layout",
        (*CONVS, *DELTAS),
        liars.copied_where(liars.second_layout),
        VIEWS,
    ),
    (
        "copied where slots lie apart",
        (*PREFILLS, *DECODES, *COMMITS),
        liars.copied_where(liars.slots_apart),
        VIEWS,
    ),
    ("offset of the pool", (*ALL, *COMMITS), shown(liars.offset_ignored), VIEWS),
    ("strided result", ALL, shown(liars.strided_results_of_half_ignored), OUT),
    ("tracks wrap at 32 bits", PREFILLS, shown(liars.tracks_wrap), FAR),
    ("late tracks", PREFILLS, shown(liars.late_tracks_dropped), TRACK),
    ("tracks in order", PREFILLS, shown(liars.tracks_taken_in_order), PARITY),
    ("width 7", CONVS, left(liars.seven_taps), PARITY),
    ("width 7", ("conv.verify",), left(liars.seven_taps), ACCEPT),
    ("lone row in 16 bits", PREFILLS, shown(liars.lone_row_of_half_forgets), CUT),
    ("lone row in 16 bits", (*DECODES, *EVERY), shown(liars.lone_row_of_half_forgets), BATCH),
    ("full chunks", PREFILLS, left(liars.last_token_of_full_chunks), CUT),
    ("rows of one length", PREFILLS, shown(liars.rows_of_one_length_exchanged), PARITY),
    ("rows of one length", EVERY, shown(liars.rows_of_one_length_exchanged), ACCEPT),
    ("single tokens", PREFILLS, shown(liars.single_tokens_unwritten), PARITY),
    ("start counted on", (CONV, CONV_1), liars.written("start"), WRITES),
    ("start counted on", ("conv.verify", "conv.commit"), liars.written("start"), ACCEPT),
    ("last counted on", COMMITS, liars.written("last"), ACCEPT),
    ("weights of another layer", CONVS, liars.kept_by_shape("weight", "bias"), LAYERS),
    ("gates of another layer", DELTAS, liars.kept_by_shape("gate"), LAYERS),
    ("rates of another layer", SCANS, liars.kept_by_shape("A", "D", "dt_bias"), LAYERS),
    ("sources by address", PREFILLS, liars.kept_by_address("src"), AGAIN),
    ("targets by address", (*PREFILLS, *DECODES), liars.kept_by_address("dst"), AGAIN),
    ("bounds by address", PREFILLS, liars.kept_by_address("query_start_loc"), AGAIN),
    ("result reused", ALL, liars.result_reused, LAYERS),
    ("bound of -5", DELTAS, shown(liars.bound_of_five), PARITY),
    ("bound of -5", ("delta_rule.verify",), shown(liars.bound_of_five), ACCEPT),
    ("pads alone", DECODES, left(liars.pads_alone_are_garbage), ALONE),
    ("rows and no token", (*PREFILLS, *EVERY), shown(liars.rows_and_no_token_refused), EMPTY),
    ("tokens and no row", (*PREFILLS, *EVERY), shown(liars.tokens_and_no_row_refused), ALONE),
    ("source -2", ALL, liars.only_minus_one_is_none("src"), NONE),
    (
        "target -2",
        (*PREFILLS, *DECODES, *COMMITS),
        liars.only_minus_one_is_none("dst"),
        NONE,
    ),
    ("many pads", (*PREFILLS, *EVERY), left(liars.many_pads_unwritten), PADS),
    ("pads folded in", PREFILLS, liars.pads_folded_in, PADS),
    ("pad rows of lightning", (SCAN_1,), left(liars.pad_rows_of_lightning_leak), PARITY),
    ("any result", ALL, liars.any_result, ERRORS),
    ("NaN of a state leaks", ALL, liars.nan_of_a_state_leaks, NAN),
    ("targets filled up", (*PREFILLS, *DECODES), shown(liars.targets_filled_up), ERRORS),
    ("large values", DELTAS, liars.large_inputs_clamped("v"), PARITY),
    ("large inputs", (*CONVS, *SCANS), liars.large_inputs_clamped("x"), PARITY),
    ("float32 dt", (SCAN_1,), shown(liars.steps_rounded), PARITY),
    ("z in 16 bits", SCANS, liars.dropped_in_half(z=None), PARITY),
    ("limits in 16 bits", SCANS, liars.dropped_in_half(dt_limit=(0.0, float("inf"))), PARITY),
    ("softplus in 16 bits", SCANS, liars.softplus_of_half, PARITY),
    (
        "width 3 in 16 bits",
        CONVS,
        liars.wrong_in_half(lambda args: args["weight"].shape[1] == 3),
        PARITY,
    ),
    (
        "large heads in 16 bits",
        DELTAS,
        liars.wrong_in_half(lambda args: args["q"].shape[-1] > 128),
        PARITY,
    ),
    (
        "large states in 16 bits",
        SCANS,
        liars.wrong_in_half(lambda args: args["B"].shape[-1] > 128),
        PARITY,
    ),
    (
        "many rows in 16 bits",
        (*PREFILLS, *DECODES),
        liars.wrong_in_half(lambda args: len(args["src"]) > 16),
        PARITY,
    ),
    ("version counters", ALL, shown(liars.version_read), INFERENCE),
]
"""What is wrong, with which operations, and the test of the kit that says so."""

CASES = [(f"{op}: {row[0]}", op, *row[2:]) for row in LIARS for op in row[1]]


@pytest.mark.parametrize(
    ("operation", "mutation", "test"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_what_is_wrong_where_words_meet_is_caught_by_the_named_test(
    operation: str, mutation: Any, test: str
) -> None:
    assert catches(operation, mutation, test)
