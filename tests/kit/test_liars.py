"""Every wrong provider is caught by the kit's test that the table names."""

from dataclasses import replace
from typing import Any

import pytest

from hal_cpu.provider import TorchProvider
from kit import liars
from ops import mutations as wrong
from support.kit import catches, manifest_of, outcomes, suite_of

PARITY = "test_every_declared_point_equals_the_oracle"
CUT = "test_any_cut_of_a_row_gives_the_same"
HANDOVER = "test_prefill_of_all_but_one_then_decode_gives_the_same"
BATCH = "test_a_row_is_the_same_alone_and_in_any_order"
PADS = "test_what_pads_hold_changes_no_bit"
SLOTS = "test_which_slots_rows_hold_changes_no_bit"
WRITES = "test_only_addressed_slots_change"
FRESH = "test_a_fresh_row_reads_nothing_of_its_slot"
NAN = "test_nan_of_a_row_reaches_no_other"
EMPTY = "test_rows_without_tokens_change_nothing"
VIEWS = "test_views_equal_copies"
OUT = "test_a_given_result_is_filled_and_returned"
TRACK = "test_a_tracked_state_is_that_of_the_prefix_alone"
SAME = "test_two_runs_give_the_same_bits"
STEPS = "test_sixty_four_decodes_in_place_stay_within_the_limits"
FAR = "test_slots_beyond_32_bits_are_addressed"
ERRORS = "test_bad_arguments_are_refused_before_anything_is_written"
ACCEPT = "test_verify_and_commit_equal_the_accepted_path"
COUNTS = "test_every_acceptance_equals_so_many_decodes"
RUN = "test_steps_of_any_acceptance_and_without_drafts_do_not_drift"
CONV, CONV_1, DELTA, DELTA_1 = (
    "conv.prefill", "conv.decode", "delta_rule.prefill", "delta_rule.decode"
)  # fmt: skip

LIARS: list[tuple[str, str, Any, str]] = [
    ("pad writes the last slot", DELTA_1, wrong.TOKENS["pad writes the last slot"], WRITES),
    ("pad writes the last slot", CONV_1, wrong.TOKENS["pad writes the last slot"], WRITES),
    ("K and V transposed", DELTA_1, wrong.DELTA["state transposed"], PARITY),
    ("stale start state", DELTA, wrong.COMMON["stale start state"], FRESH),
    ("stale start window", CONV, wrong.COMMON["stale start state"], FRESH),
    ("zeroed by a product", DELTA, wrong.COMMON["fresh rows zeroed by a product"], FRESH),
    ("start ignored", CONV, wrong.COMMON["start state ignored"], CUT),
    ("start ignored by decode", DELTA_1, wrong.COMMON["start state ignored"], HANDOVER),
    ("start of a lone row ignored", DELTA, liars.first(liars.lone_row_forgets_its_start), CUT),
    ("history of a short row dropped", CONV, liars.history_dropped, CUT),
    ("window off by one", CONV, wrong.CONV["window off by one in short rows"], CUT),
    ("empty row shifts others", DELTA, liars.first(liars.empty_row_shifts_its_neighbours), EMPTY),
    ("empty row clears its slot", CONV, wrong.PACKED["row without tokens clears its slot"], EMPTY),
    ("NaN leaks across rows", DELTA, liars.then(liars.nan_leaks), NAN),
    ("NaN leaks across rows", CONV, liars.then(liars.nan_leaks), NAN),
    ("writes go to a hidden copy", DELTA_1, liars.hidden_copy, VIEWS),
    ("writes go to a hidden copy", CONV, liars.hidden_copy, VIEWS),
    ("offsets wrap at 32 bits", DELTA, liars.wraps(32, signed=False), FAR),
    ("offsets wrap at 31 bits", CONV_1, liars.wraps(32, signed=True), FAR),
    ("wrong scale", DELTA, wrong.DELTA["scale missing"], PARITY),
    ("epsilon outside the root", DELTA, wrong.SCALED["eps outside the root"], PARITY),
    ("norm missing", DELTA_1, wrong.DELTA["norm missing"], PARITY),
    ("head map h % H", DELTA, wrong.DELTA["head map h % H"], PARITY),
    ("odd head dropped", DELTA, liars.then(liars.odd_head_dropped), PARITY),
    ("bias ignored", CONV, wrong.CONV["bias ignored"], PARITY),
    ("activation ignored", CONV_1, wrong.CONV["activation ignored"], PARITY),
    ("taps reversed", CONV, wrong.CONV["taps reversed"], PARITY),
    ("out ignored", DELTA_1, liars.out_ignored, OUT),
    ("out ignored", CONV, liars.out_ignored, OUT),
    ("track stores the final state", DELTA, liars.track_stores_the_end, TRACK),
    ("track stores the final window", CONV, liars.track_stores_the_end, TRACK),
    ("fork writes its source", DELTA, wrong.COMMON["fork writes its source"], WRITES),
    ("pads keep garbage", DELTA, wrong.COMMON["pads keep garbage"], PADS),
    ("pad rows are run", CONV_1, liars.pads_are_read, PADS),
    ("dst none writes", DELTA, liars.then(liars.stateless_writes_the_last_slot), WRITES),
    ("last row dropped", CONV_1, wrong.COMMON["end state of the last row dropped"], BATCH),
    ("gates of other tokens", DELTA_1, liars.first(liars.gates_of_other_tokens), BATCH),
    ("rows taken for slots", DELTA_1, liars.first(liars.rows_taken_for_slots), SLOTS),
    ("keys normed in place", DELTA, liars.then(liars.keys_normed_in_place), WRITES),
    ("state rounded", DELTA, liars.then(liars.state_rounded), PARITY),
    ("state drifts", DELTA_1, liars.then(liars.drifts), STEPS),
    ("order of a sum changes", DELTA, liars.noisy(), SAME),
    ("rows truncated", CONV_1, liars.first(liars.rows_truncated), ERRORS),
    ("rows truncated", DELTA_1, liars.first(liars.rows_truncated), ERRORS),
    ("D ignored", "scan.prefill", liars.without("D"), PARITY),
    ("dt bias ignored", "scan.decode", liars.without("dt_bias"), PARITY),
    ("z ignored", "scan.decode", liars.without("z"), PARITY),
    ("dt limit dropped", "scan.decode", liars.first(liars.limit_dropped), PARITY),
    ("groups by remainder", "scan.prefill", liars.first(liars.groups_by_remainder), PARITY),
    ("dt rounded", "scan.prefill", liars.first(liars.dt_limited_late), PARITY),
    (
        "start of a lone row ignored",
        "scan.prefill",
        liars.first(liars.lone_row_forgets_its_start),
        CUT,
    ),
    ("stale start state", "scan.decode", wrong.COMMON["stale start state"], FRESH),
    (
        "verify writes the committed state",
        "delta_rule.verify",
        liars.then(liars.verify_writes_the_committed_state),
        ACCEPT,
    ),
    (
        "verify writes the committed window",
        "conv.verify",
        liars.then(liars.verify_writes_the_committed_state),
        ACCEPT,
    ),
    ("tree taken for a chain", "delta_rule.verify", liars.first(liars.parents_ignored), ACCEPT),
    ("tree taken for a chain", "conv.verify", liars.first(liars.parents_ignored), ACCEPT),
    ("rejected tokens kept", "conv.commit", liars.first(liars.commit_keeps_all), COUNTS),
    ("rejected tokens kept", "scan.commit", liars.first(liars.commit_keeps_all), COUNTS),
    (
        "commit counts one more",
        "delta_rule.commit",
        liars.first(liars.commit_counts_one_more),
        COUNTS,
    ),
    (
        "commit into the source",
        "delta_rule.commit",
        liars.first(liars.commit_into_the_source),
        COUNTS,
    ),
    (
        "row without drafts not committed",
        "scan.commit",
        liars.first(liars.commit_nothing_of_one),
        RUN,
    ),
]
"""What is wrong, with which operation, and the test of the kit that says so."""


@pytest.mark.parametrize(
    ("operation", "mutation", "test"), [row[1:] for row in LIARS],
    ids=[f"{row[1]}: {row[0]}" for row in LIARS],
)  # fmt: skip
def test_a_wrong_operation_is_caught_by_the_named_test(
    operation: str, mutation: Any, test: str
) -> None:
    assert catches(operation, mutation, test)


@pytest.mark.parametrize(("test", "operation"), sorted({(row[3], row[1]) for row in LIARS}))
def test_the_honest_provider_passes_what_catches_liars(test: str, operation: str) -> None:
    told = [
        *outcomes(suite_of(manifest_of(TorchProvider)), test, operation.replace("commit", "verify"))
    ]
    assert told
    assert [*filter(None, told)] == []


def _with_sidecar(sidecar: type) -> type[TorchProvider]:
    class Sidecar(TorchProvider):
        def __init__(self, device: str, options: Any) -> None:
            super().__init__(device, options)
            self.conv_state = sidecar()

    return Sidecar


BUILD = "test_it_builds_and_keeps_the_protocols"
SIDE = "test_the_sidecar_pairs_tensors_with_the_indices_of_the_step"
WHOLE: list[tuple[str, type, str]] = [
    ("layouts ignored", liars.LayoutBlind, "test_an_unknown_layout_is_refused"),
    ("layouts ignored", liars.LayoutBlind, PARITY),
    ("src and dst swapped in a signature", liars.Renamed, BUILD),
    ("bias lost by prepare", liars.BiasLost, PARITY),
    ("indices copied for each layer", _with_sidecar(liars.CopyingSidecar), SIDE),
    ("src taken for dst", _with_sidecar(liars.SwappingSidecar), SIDE),
    ("pool copied", _with_sidecar(liars.DetachedSidecar), SIDE),
]
"""Providers that are wrong beside their operations."""


@pytest.mark.parametrize(
    ("provider", "test"), [row[1:] for row in WHOLE], ids=[row[0] for row in WHOLE]
)
def test_a_wrong_provider_is_caught_by_the_named_test(provider: type, test: str) -> None:
    assert any(outcomes(suite_of(manifest_of(provider)), test))


DECLARED: list[tuple[str, dict[str, Any], str]] = [
    ("any width", {"widths": liars.Everything((2, 3, 4))}, "test_one_beyond_is_refused"),
    ("any dtype", {"dtypes": liars.Everything(("float32",))}, "test_one_beyond_is_refused"),
    ("wider than it can", {"widths": range(2, 10)}, PARITY),
    ("a layout that it cannot", {"layouts": ("CW", "ring")}, PARITY),
    ("no width at all", {"widths": ()}, "test_every_offer_can_be_tested_and_used"),
]
"""What a manifest declares of the convolution, against what the provider does."""


@pytest.mark.parametrize(
    ("fields", "test"), [row[1:] for row in DECLARED], ids=[row[0] for row in DECLARED]
)
def test_a_manifest_that_declares_what_is_not_so_is_caught(
    fields: dict[str, Any], test: str
) -> None:
    from hal_cpu.plugin import MANIFEST

    offer = replace(MANIFEST.offers["conv.decode"], **fields)
    provider = _strict if fields.get("widths") == range(2, 10) else TorchProvider
    assert any(outcomes(suite_of(manifest_of(provider, offers={"conv.decode": offer})), test))


class _strict(TorchProvider):
    """A provider that computes the first eight taps alone."""

    def __init__(self, device: str, options: Any) -> None:
        super().__init__(device, options)
        right = self.conv.decode
        self.conv.decode = lambda **args: right(**_eight_taps(args))  # type: ignore[method-assign]


def _eight_taps(args: dict[str, Any]) -> dict[str, Any]:
    weight = args["weight"].clone()
    weight[:, :-8] = 0
    return {**args, "weight": weight}


def _faulty(need: Any) -> Any:
    raise RuntimeError("driver 1.2 is too old")


@pytest.mark.parametrize(
    "check", [lambda need: [], _faulty, lambda need: None], ids=["silent", "raises", "nothing"]
)
def test_a_check_that_fails_is_not_taken_for_a_refusal(check: Any) -> None:
    from hal_cpu.plugin import MANIFEST

    offers = {"conv.decode": MANIFEST.offers["conv.decode"]}
    suite = suite_of(manifest_of(TorchProvider, offers=offers, check=check))
    told = [*outcomes(suite, "test_every_offer_can_be_tested_and_used")]
    assert any(told) == (check(None) != [] if check is not _faulty else True)
