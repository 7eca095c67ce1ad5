"""What an offer does not hold is refused with needed and offered; what it leaves out too."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal_registry import Code, Offer, Reason, Requirement, judge, show
from support.registry import EVERYTHING, candidate

OPERATION = "delta_rule.decode"
NAMED: dict[str, tuple[str, Any, Code]] = {
    "dtype": ("dtypes", "float32", Code.DTYPE_UNSUPPORTED),
    "state_dtypes": ("state_dtypes", ("float32",), Code.DTYPE_UNSUPPORTED),
    "gates": ("gates", ("scalar",), Code.SHAPE_UNSUPPORTED),
    "kind": ("kinds", "mamba2", Code.SHAPE_UNSUPPORTED),
    "activation": ("activations", "silu", Code.SHAPE_UNSUPPORTED),
    "head_dims": ("head_dims", (64, 96), Code.SHAPE_UNSUPPORTED),
    "ratio": ("ratios", 2, Code.SHAPE_UNSUPPORTED),
    "width": ("widths", 4, Code.SHAPE_UNSUPPORTED),
    "state_size": ("state_sizes", 16, Code.SHAPE_UNSUPPORTED),
    "verify": ("verify", "chain", Code.MODE_UNSUPPORTED),
    "verify_width": ("verify_widths", 4, Code.MODE_UNSUPPORTED),
    "track": ("track", 64, Code.MODE_UNSUPPORTED),
    "features": ("features", ("graph",), Code.MODE_UNSUPPORTED),
    "arch": ("arches", "sm_90", Code.ARCH_UNSUPPORTED),
}
"""Requirement field: the offer's field, a value, the code of its refusal."""


def found(offer: Offer, need: Requirement, **fields: object) -> tuple[Reason, ...]:
    judged = judge(candidate("cuda.x", need.operation, offer=offer, **fields), [need])
    return judged.reasons[need.operation]


def needing(operation: str = OPERATION, **fields: Any) -> Requirement:
    return Requirement(operation, "3 layers", **fields)


def test_every_field_of_a_requirement_is_judged() -> None:
    fields = {field.name for field in dataclasses.fields(Requirement)}
    by_themselves = {"layouts"}
    assert fields - {"operation", "why", "optional"} - by_themselves == set(NAMED)


@pytest.mark.parametrize("name", sorted(NAMED))
def test_a_field_left_out_refuses_what_names_it(name: str) -> None:
    attribute, value, code = NAMED[name]
    offer = dataclasses.replace(EVERYTHING, **{attribute: ()})
    (reason,) = found(offer, needing(**{name: value}))
    assert (reason.code, reason.subject) == (code, OPERATION)
    assert reason.offered.endswith(" none")
    assert reason.needed.endswith(" (3 layers)")
    assert reason.fix


@pytest.mark.parametrize("name", sorted(NAMED))
def test_a_field_left_out_refuses_nothing_that_does_not_name_it(name: str) -> None:
    offer = dataclasses.replace(EVERYTHING, **{NAMED[name][0]: ()})
    assert not found(offer, needing())


@pytest.mark.parametrize("name", sorted(NAMED))
def test_a_value_that_is_offered_fits(name: str) -> None:
    attribute, value, _ = NAMED[name]
    values = value if name in ("state_dtypes", "gates", "features") else (value,)
    offer = dataclasses.replace(EVERYTHING, **{attribute: values})
    assert not found(offer, needing(**{name: value}))


def test_layouts_left_out_refuse_the_operation() -> None:
    offer = dataclasses.replace(EVERYTHING, layouts=("CW",))
    (reason,) = found(offer, needing())
    assert reason.code is Code.LAYOUT_UNSUPPORTED
    assert reason.needed == "recurrent layout VK or KV (3 layers)"
    fused = found(dataclasses.replace(EVERYTHING, layouts=("VK",)), needing(f"{OPERATION}_fused"))
    assert [reason.needed for reason in fused] == ["conv layout CW or WC or ring (3 layers)"]


def test_layouts_that_a_need_names_refuse_an_offer_of_others() -> None:
    offer = dataclasses.replace(EVERYTHING, layouts=("ring", "VK"))
    need = needing("conv.decode", layouts=("CW", "WC"))
    (reason,) = found(offer, need)
    assert reason.code is Code.LAYOUT_UNSUPPORTED
    assert reason.needed == "conv layout CW or WC (3 layers)"
    assert reason.offered == "conv layout ring"
    assert not found(dataclasses.replace(offer, layouts=("ring", "WC")), need)


@pytest.mark.parametrize("name", ["ratio", "width", "state_size", "verify_width"])
@given(low=st.integers(1, 50), size=st.integers(1, 50), step=st.integers(1, 4), data=st.data())
def test_ranges_hold_at_their_borders(
    name: str, low: int, size: int, step: int, data: st.DataObject
) -> None:
    values = range(low, low + size, step)
    offer = dataclasses.replace(EVERYTHING, **{NAMED[name][0]: values})
    last = values[-1]
    value = data.draw(st.sampled_from([low - 1, low, low + 1, last - 1, last, last + 1]))
    fits = low <= value <= last and (value - low) % step == 0
    assert (not found(offer, needing(**{name: max(value, 0)}))) == fits


@given(
    pairs=st.sets(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=4),
    dims=st.sets(st.integers(1, 4), max_size=3),
    pair=st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
def test_head_dims_are_pairs_or_dims_one_by_one(
    pairs: set[tuple[int, int]], dims: set[int], pair: tuple[int, int]
) -> None:
    offer = dataclasses.replace(EVERYTHING, head_dims=tuple(pairs) + tuple(dims))
    fits = pair in pairs or (pair[0] in dims and pair[1] in dims)
    assert (not found(offer, needing(head_dims=pair))) == fits


def test_a_pair_is_ordered() -> None:
    offer = dataclasses.replace(EVERYTHING, head_dims=((64, 96),))
    assert not found(offer, needing(head_dims=(64, 96)))
    (reason,) = found(offer, needing(head_dims=(96, 64)))
    assert reason.needed == "head dims 96 x 64 (3 layers)"
    assert reason.offered == "head dims 64 x 96"


@pytest.mark.parametrize("name", ["gates", "state_dtypes"])
def test_one_of_the_alternatives_is_enough(name: str) -> None:
    both = {"gates": ("safe", "ready_channel"), "state_dtypes": ("float32", "bfloat16")}[name]
    offer = dataclasses.replace(EVERYTHING, **{name: both[1:]})
    assert not found(offer, needing(**{name: both}))
    (reason,) = found(dataclasses.replace(EVERYTHING, **{name: ()}), needing(**{name: both}))
    assert " or ".join(both) in reason.needed


def test_ready_gates_do_not_serve_raw_projections() -> None:
    offer = dataclasses.replace(EVERYTHING, gates=("ready_scalar",))
    assert not found(offer, needing(gates=("scalar", "ready_scalar")))
    assert found(offer, needing(gates=("scalar",)))


def test_features_are_needed_all_and_only_missing_ones_are_named() -> None:
    offer = dataclasses.replace(EVERYTHING, features={"strided", "graph"})
    (reason,) = found(offer, needing(features=("strided", "negative_slots", "bias")))
    assert reason.needed == "feature negative_slots, bias (3 layers)"
    assert reason.offered == "feature graph, strided"


@given(grid=st.integers(0, 256), steps=st.sets(st.sampled_from([1, 16, 64, 48]), max_size=2))
def test_a_tracking_grid_needs_a_granularity_that_divides_it(grid: int, steps: set[int]) -> None:
    offer = dataclasses.replace(EVERYTHING, track=steps)
    fits = any(grid % step == 0 for step in steps)
    assert (not found(offer, needing(track=grid))) == fits


def test_an_offer_narrows_the_arches_of_its_manifest() -> None:
    wide = {"arches": ("sm_80", "sm_90")}
    narrow = dataclasses.replace(EVERYTHING, arches=("sm_90",))
    assert not found(EVERYTHING, needing(arch="sm_80"), **wide)
    (reason,) = found(narrow, needing(arch="sm_80"), **wide)
    assert reason.offered == "arch sm_90"
    assert not found(narrow, needing(), **wide)


def test_a_missing_interface_is_one_finding_and_names_all_who_need_it() -> None:
    needs = [
        Requirement("conv_state.step", "10 short-conv layers"),
        Requirement("conv_state.step", "2 CCA layers"),
    ]
    judged = judge(candidate("npu.x", "conv", "scan"), needs)
    (reason,) = judged.all_reasons([need.operation for need in needs])
    assert reason.code is Code.INTERFACE_MISSING
    assert reason.subject == "conv_state"
    assert reason.needed == "10 short-conv layers, 2 CCA layers"
    assert reason.offered == "conv, scan"


def test_a_missing_operation_names_its_siblings() -> None:
    judged = judge(candidate("cuda.x", "conv.prefill", "conv.decode"), [needing("conv.verify")])
    (reason,) = judged.reasons["conv.verify"]
    assert (reason.code, reason.subject) == (Code.OPERATION_MISSING, "conv.verify")
    assert reason.offered == "conv.prefill, conv.decode"


def test_an_operation_outside_the_vocabulary_is_missing_everywhere() -> None:
    judged = judge(candidate("cuda.x", "all"), [needing("rg_lru.prefill")])
    assert judged.reasons["rg_lru.prefill"][0].code is Code.INTERFACE_MISSING


def test_several_needs_of_one_operation_all_have_to_fit() -> None:
    offer = dataclasses.replace(EVERYTHING, widths=(3,))
    needs = [needing("conv.decode", width=width) for width in (3, 4, 5)]
    judged = judge(candidate("cuda.x", "conv", offer=offer), needs)
    assert len(judged.reasons["conv.decode"]) == 2
    assert not judged.fits("conv.decode")


def vendor(need: Requirement) -> Iterable[Reason]:
    if need.head_dims == (128, 128) and need.dtype == "float16":
        yield Reason(Code.SHAPE_UNSUPPORTED, need.operation, "fp16 at 128", "fp16 below 128")


def test_a_vendor_check_adds_joint_constraints() -> None:
    need = needing(head_dims=(128, 128), dtype="float16")
    (reason,) = found(EVERYTHING, need, check=vendor)
    assert reason.needed == "fp16 at 128"
    assert not found(EVERYTHING, dataclasses.replace(need, dtype="bfloat16"), check=vendor)


def raising(need: Requirement) -> Iterable[Reason]:
    yield from ()
    raise SystemExit("driver gone")


@pytest.mark.parametrize(
    ("check", "text"),
    [(raising, "SystemExit: driver gone"), (lambda need: ["no"], "['no']"), (int, "TypeError")],
)
def test_a_vendor_check_that_fails_speaks_against_its_own_plugin(check: Any, text: str) -> None:
    (reason,) = found(EVERYTHING, needing(), check=check)
    assert reason.code is Code.PLUGIN_BROKEN
    assert reason.subject == "cuda.x"
    assert text in reason.offered


def test_a_vendor_check_is_not_asked_about_what_is_not_offered() -> None:
    judged = judge(candidate("cuda.x", "conv", check=raising), [needing()])
    assert judged.reasons[OPERATION][0].code is Code.INTERFACE_MISSING


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (range(2, 9), "2..8"),
        (range(16, 257, 16), "16..256 step 16"),
        (range(4, 5), "4"),
        (range(0), "none"),
        ((), "none"),
        ({"b", "a"}, "a, b"),
        (("b", "a"), "b, a"),
        (((64, 96), 128), "64 x 96, 128"),
    ],
)
def test_values_are_shown_as_people_write_them(values: Any, text: str) -> None:
    assert show(values) == text
