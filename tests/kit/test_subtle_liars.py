"""Every provider that is wrong in a corner is caught by the kit's test that the table names."""

from typing import Any

import pytest

from hal_cpu.provider import TorchProvider
from kit import sidecar_liars
from kit import subtle_liars as liars
from support.kit import catches, manifest_of, outcomes, suite_of

PARITY = "test_every_declared_point_equals_the_oracle"
ACCEPT = "test_verify_and_commit_equal_the_accepted_path"
TWICE = "test_a_verify_is_committed_to_several_slots"
REFUSED = "test_a_commit_that_does_not_fit_is_refused_before_anything_is_written"
WRITES = "test_only_addressed_slots_change"
NAN = "test_nan_of_a_row_reaches_no_other"
VIEWS = "test_views_equal_copies"
OUT = "test_a_given_result_is_filled_and_returned"
OWN = "test_a_result_of_its_own_has_the_inputs_dtype_and_the_rows_shape"
SAME = "test_two_runs_give_the_same_bits"
FAR = "test_slots_beyond_32_bits_are_addressed"
ERRORS = "test_bad_arguments_are_refused_before_anything_is_written"
BOUND = "test_max_len_is_an_upper_bound"
REPLAY = "test_a_recorded_call_reads_what_its_tensors_hold_in_each_replay"
SIDE = "test_the_sidecar_pairs_tensors_with_the_indices_of_the_step"

CONV, CONV_1, DELTA, DELTA_1, SCAN, SCAN_1 = (
    f"{interface}.{verb}"
    for interface in ("conv", "delta_rule", "scan")
    for verb in ("prefill", "decode")
)
EVERY = ("conv.verify", "delta_rule.verify", "scan.verify")
COMMITS = ("conv.commit", "delta_rule.commit", "scan.commit")

LIARS: list[tuple[str, tuple[str, ...], Any, str]] = [
    ("out ignored", EVERY, liars.own_result, OUT),
    ("inputs overwritten", EVERY, liars.left(liars.inputs_scaled_in_place), WRITES),
    ("NaN leaks across rows", EVERY, liars.left(liars.nan_of_a_row_leaks), NAN),
    ("order of a sum changes", EVERY, liars.another_order_each_run(), SAME),
    ("sources wrap at 32 bits", EVERY, liars.wrapped_at_32_bits("src"), FAR),
    ("targets wrap at 32 bits", COMMITS, liars.wrapped_at_32_bits("dst"), FAR),
    ("writes go to a hidden copy", COMMITS, liars.shown(liars.copied_pool), VIEWS),
    ("sources filled up", EVERY, liars.rows_filled_up("src"), ERRORS),
    ("targets filled up", COMMITS, liars.rows_filled_up("dst"), REFUSED),
    ("scratch used up", COMMITS, liars.scratch_used_up, TWICE),
    ("exact grid", (CONV, DELTA, SCAN, *EVERY), liars.exact_grids, BOUND),
    ("empty pad rows", (CONV, DELTA, SCAN), liars.empty_pad_rows_refused, PARITY),
    ("empty pad rows", EVERY, liars.empty_pad_rows_refused, ACCEPT),
    (
        "twins",
        (CONV, CONV_1, DELTA, DELTA_1, SCAN, SCAN_1),
        liars.shown(liars.later_twins_start_from_zeros),
        PARITY,
    ),
    ("twins", EVERY, liars.shown(liars.later_twins_start_from_zeros), ACCEPT),
    ("gates saturate", (DELTA, DELTA_1), liars.shown(liars.gates_saturate), PARITY),
    ("dt saturates", (SCAN, SCAN_1), liars.shown(liars.dt_saturates), PARITY),
    ("dt saturates", ("scan.verify",), liars.shown(liars.dt_saturates), ACCEPT),
    (
        "channel gates in 16 bits",
        (DELTA, DELTA_1),
        liars.shown(liars.channel_gates_of_half_forget),
        PARITY,
    ),
    (
        "channel gates in 16 bits",
        ("delta_rule.verify",),
        liars.shown(liars.channel_gates_of_half_forget),
        ACCEPT,
    ),
    ("Mamba-1 in 16 bits", (SCAN, SCAN_1), liars.shown(liars.mamba1_of_half_drops_d), PARITY),
    ("Mamba-1 in 16 bits", ("scan.verify",), liars.shown(liars.mamba1_of_half_drops_d), ACCEPT),
    ("long rows in 16 bits", (CONV, DELTA, SCAN), liars.left(liars.late_tokens_of_half), PARITY),
    ("tracks in 16 bits", (CONV, DELTA, SCAN), liars.shown(liars.half_drops_tracks), PARITY),
    ("tracks of WC", (CONV,), liars.shown(liars.second_layout_drops_tracks), PARITY),
    (
        "float32 results",
        (CONV, CONV_1, DELTA, DELTA_1, SCAN, SCAN_1, *EVERY),
        liars.widened,
        OWN,
    ),
    ("many channels", (CONV, CONV_1), liars.left(liars.channels_beyond_128_zero), PARITY),
    ("many channels", ("conv.verify",), liars.left(liars.channels_beyond_128_zero), ACCEPT),
    (
        "many heads",
        (DELTA, DELTA_1, SCAN, SCAN_1),
        liars.left(liars.heads_beyond_48_zero),
        PARITY,
    ),
    ("many heads", EVERY[1:], liars.left(liars.heads_beyond_48_zero), ACCEPT),
    ("many tokens", (CONV, DELTA, SCAN), liars.left(liars.late_tokens_of_long_rows), PARITY),
    (
        "many rows",
        (CONV, CONV_1, DELTA, DELTA_1, SCAN, SCAN_1),
        liars.shown(liars.rows_beyond_16_unwritten),
        PARITY,
    ),
    ("many rows", COMMITS, liars.shown(liars.rows_beyond_16_unwritten), ACCEPT),
    (
        "slots of the recording",
        (CONV_1, DELTA_1, SCAN_1, *EVERY),
        liars.ids_of_the_recording,
        REPLAY,
    ),
]
"""What is wrong, with which operations, and the test of the kit that says so."""

CASES = [(f"{op}: {row[0]}", op, *row[2:]) for row in LIARS for op in row[1]]


@pytest.mark.parametrize(
    ("operation", "mutation", "test"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_a_wrong_corner_is_caught_by_the_named_test(
    operation: str, mutation: Any, test: str
) -> None:
    assert catches(operation, mutation, test)


def _with_sidecar(sidecar: type) -> type[TorchProvider]:
    class Sidecar(TorchProvider):
        def __init__(self, device: str, options: Any) -> None:
            super().__init__(device, options)
            self.conv_state = sidecar()

    return Sidecar


SIDECARS = (
    sidecar_liars.ClonesIndices,
    sidecar_liars.SkipsEmptySteps,
    sidecar_liars.ClampsLengths,
    sidecar_liars.WipesPools,
    sidecar_liars.WipesNarrowPools,
    sidecar_liars.OneTensor,
)
WHOLE: list[tuple[str, type[TorchProvider], str]] = [
    *((sidecar.__doc__ or "", _with_sidecar(sidecar), SIDE) for sidecar in SIDECARS),
    *((f"{op}: drafts kept", liars.in_itself(op.partition(".")[0]), ACCEPT) for op in EVERY),
    *((f"{op}: exact scratch", liars.exact_scratch(op.partition(".")[0]), ACCEPT) for op in EVERY),
]
"""Providers that are wrong beside one operation."""


@pytest.mark.parametrize(
    ("provider", "test"), [row[1:] for row in WHOLE], ids=[row[0] for row in WHOLE]
)
def test_a_provider_that_is_wrong_between_calls_is_caught_by_the_named_test(
    provider: type[TorchProvider], test: str
) -> None:
    assert any(outcomes(suite_of(manifest_of(provider)), test))
