"""The kit takes manifests of any width: rings, fused operations, pairs, narrow states."""

from dataclasses import replace
from typing import Any

import pytest

from hal.testing import ProviderSuite
from hal.testing.plan import Plan
from hal_cpu.provider import TorchProvider
from hal_registry import Code, Offer, Reason
from support.kit import lying, manifest_of, outcomes, suite_of
from support.oracle_provider import OracleProvider

FLOATS = ("float32", "bfloat16")
FEATURES = ("negative_slots", "strided", "bias")
CONV = Offer(
    dtypes=FLOATS, layouts=("ring", "CW", "WC"), activations=("silu", "none"), widths=(2, 4, 7),
    track=(1,), features=FEATURES,
)  # fmt: skip
DELTA = Offer(
    dtypes=FLOATS, state_dtypes=("float32",), layouts=("VK", "KV"),
    gates=("scalar", "channel", "safe", "ready_scalar", "ready_channel"),
    head_dims=((16, 24), (32, 16)), ratios=(1, 2, 3),
    track=(64,), features=FEATURES[:2],
)  # fmt: skip
FUSED = replace(
    DELTA, layouts=("VK", "ring", "CW"), track=(), widths=(4,), activations=("silu",),
    features=FEATURES,
)  # fmt: skip
MANIFESTS: dict[str, dict[str, Offer]] = {
    "rings": {"conv.prefill": CONV, "conv.decode": CONV},
    "short conv": {
        op: replace(CONV, activations=("none",), track=())
        for op in ("short_conv.prefill", "short_conv.decode")
    },
    "fused": {
        "delta_rule.prefill_fused": replace(DELTA, track=()),
        "delta_rule.decode_fused": FUSED,
    },
    "pairs and coarse tracking": {"delta_rule.prefill": DELTA, "delta_rule.decode": DELTA},
    "no float32": {
        op: replace(DELTA, dtypes=("bfloat16",), track=())
        for op in ("delta_rule.prefill", "delta_rule.decode")
    },
    "narrow states": {
        op: replace(DELTA, state_dtypes=("float32", "bfloat16"), track=())
        for op in ("delta_rule.prefill", "delta_rule.decode")
    },
    "dense inputs and no negative slots": {
        op: replace(CONV, features=("bias",), track=()) for op in ("conv.prefill", "conv.decode")
    },
}
COPIES_POOLS = {
    "test_slots_beyond_32_bits_are_addressed",
    "test_track_points_beyond_32_bits_are_addressed",
}
"""The oracle copies whole pools, so it cannot be asked for one of 16 GiB."""

TESTS = sorted({n for n in dir(ProviderSuite) if n.startswith("test_")} - COPIES_POOLS)


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_right_provider_passes_whatever_it_declares(name: str) -> None:
    suite = suite_of(manifest_of(OracleProvider, offers=MANIFESTS[name]))
    told = [f"{test}: {text}" for test in TESTS for text in outcomes(suite, test) if text]
    assert told == []


@pytest.mark.parametrize("name", MANIFESTS)
def test_every_offered_operation_is_run(name: str) -> None:
    plan = Plan.of(manifest_of(OracleProvider, offers=MANIFESTS[name]))
    assert set(plan.base) == set(MANIFESTS[name])
    assert plan.lacks == {}


def _no_wide_rings(need: Any) -> Any:
    if need.width == 7:
        yield Reason(Code.SHAPE_UNSUPPORTED, need.operation, "width 7", "width 2 or 4", fix="none")


def test_what_the_manifests_own_check_refuses_is_not_run() -> None:
    manifest = manifest_of(OracleProvider, offers=MANIFESTS["rings"], check=_no_wide_rings)
    plan = Plan.of(manifest)
    assert [trial.label for trial in plan.refused] == ["width=7", "corner, width=7"] * 2
    assert all(trial.settings["width"] != 7 for trial in plan.trials)
    assert not any(outcomes(suite_of(manifest), "test_what_its_check_refuses_has_a_reason"))


def test_a_device_of_another_arch_is_not_asked_for_what_its_arch_lacks() -> None:
    offers = {**MANIFESTS["rings"], "conv.decode": replace(CONV, arches=("a1",))}
    manifest = manifest_of(OracleProvider, offers=offers, arches=("a1", "a2"))
    assert set(Plan.of(manifest, "a1").base) == {"conv.prefill", "conv.decode"}
    assert set(Plan.of(manifest, "a2").base) == {"conv.prefill"}


def test_a_ring_that_is_written_as_a_window_is_caught() -> None:
    def shifted(call: Any) -> Any:
        return lambda **args: call(**{**args, "start": args["start"] + 1})

    class Shifted(OracleProvider):
        def __init__(self, device: str, options: Any) -> None:
            super().__init__(device, options)
            self.conv.decode = shifted(self.conv.decode)  # type: ignore[attr-defined]

    suite = suite_of(manifest_of(Shifted, offers=MANIFESTS["rings"]))
    test = "test_every_declared_point_equals_the_oracle"
    assert any(outcomes(suite, test, "conv.decode"))


def test_track_points_on_the_grid_of_the_batch_are_caught() -> None:
    """A chunk begins with its row, and not where a multiple of the grid falls in the batch."""

    def on_the_batch(call: Any) -> Any:
        def wrong(**args: Any) -> Any:
            track = args.get("track")
            if track is None:
                return call(**args)
            begins, moved = args["query_start_loc"], track.clone()
            for point in (point for point in moved if point[2] >= 0):
                begin = int(begins[point[0]])
                point[1] = max(1, (begin + int(point[1])) // 64 * 64 - begin)
            return call(**{**args, "track": moved})

        return wrong

    class Flat(OracleProvider):
        def __init__(self, device: str, options: Any) -> None:
            super().__init__(device, options)
            rule = self.delta_rule
            rule.prefill = on_the_batch(rule.prefill)  # type: ignore[attr-defined]

    suite = suite_of(manifest_of(Flat, offers=MANIFESTS["pairs and coarse tracking"]))
    test = "test_every_declared_point_equals_the_oracle"
    assert any(outcomes(suite, test, "delta_rule.prefill"))


def test_a_device_of_its_own_memory_gets_copies_and_gives_its_writes_back() -> None:
    suite = suite_of(manifest_of(TorchProvider), stand_in="cpu:0")
    kept = [test for test in TESTS if "family" not in test and "beyond_is" not in test]
    told = [f"{test}: {text}" for test in kept for text in outcomes(suite, test) if text]
    assert told == []


def test_what_a_device_writes_to_an_input_is_seen() -> None:
    from kit.liars import keys_normed_in_place, then

    provider = lying("delta_rule.prefill", then(keys_normed_in_place))
    suite = suite_of(manifest_of(provider), stand_in="cpu:0")
    assert any(outcomes(suite, "test_only_addressed_slots_change", "delta_rule.prefill"))
