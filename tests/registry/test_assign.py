"""Assignment against a brute-force oracle: it finds the best joint choice, or there is none."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal_registry import (
    Assignment,
    Candidate,
    Code,
    Manifest,
    Offer,
    Reason,
    Requirement,
    assign,
    clashes,
    judge,
)
from support.registry import EVERYTHING, candidate

TOUCHED = {
    "conv.prefill": ("conv",),
    "conv.verify": ("conv",),
    "conv.commit": ("conv",),
    "conv_state.step": ("conv",),
    "delta_rule.prefill": ("recurrent",),
    "delta_rule.decode": ("recurrent",),
    "delta_rule.verify": ("recurrent",),
    "delta_rule.commit": ("recurrent",),
    "delta_rule.decode_fused": ("recurrent", "conv"),
}
WORDS = {"conv": ("CW", "ring"), "recurrent": ("VK", "KV")}
SEVERAL = ("float32", "bfloat16")


@st.composite
def offered(draw: st.DrawFn) -> Offer:
    layouts = draw(st.permutations(["CW", "ring", "VK", "KV"]))
    return Offer(
        dtypes=("float32",) if draw(st.integers(0, 5)) else (),
        layouts=tuple(layouts[: draw(st.integers(1, 4))]),
        state_dtypes=draw(st.sampled_from([SEVERAL, SEVERAL[:1], SEVERAL[1:]])),
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Candidate], list[Requirement]]:
    operations = draw(st.sets(st.sampled_from(sorted(TOUCHED)), min_size=1, max_size=5))
    needs = [
        Requirement(
            op,
            "1 layer",
            dtype="float32",
            state_dtypes=draw(st.sampled_from([SEVERAL, SEVERAL[:1]]))
            if op.startswith("delta_rule")
            else (),
            optional=draw(st.integers(0, 2)) == 0,
        )
        for op in sorted(operations)
    ]
    count = draw(st.integers(1, 3))
    names = [f"x.{letter}" for letter in "abc"[:count]]
    everyone = [
        Candidate(
            Manifest(
                name=name,
                device="x",
                api=(1, 0),
                load="a:b",
                offers={op: draw(offered()) for op in sorted(operations) if draw(st.booleans())},
                priority=draw(st.integers(0, 2)),
            ),
            "given",
            "0",
        )
        for name in names
    ]
    return everyone, needs


def choices(
    everyone: Sequence[Candidate], needs: Sequence[Requirement], overrides: dict[str, str]
) -> Iterator[dict[str, Candidate]]:
    """Every mapping of operations to candidates that offer them, optional ones left out or not."""
    options: list[list[Candidate | None]] = []
    for need in needs:
        wanted = overrides.get(need.operation) or overrides.get(need.operation.split(".")[0])
        able = [
            c
            for c in everyone
            if need.operation in c.manifest.offers
            and need.dtype in c.manifest.offers[need.operation].dtypes
            and wanted in (None, c.name)
        ]
        options.append([*able, None] if need.optional else [*able])
    for chosen in product(*options):
        pairs = zip(needs, chosen, strict=True)
        yield {need.operation: c for need, c in pairs if c is not None}


def one_provider_each(choice: dict[str, Candidate], needs: Sequence[Requirement]) -> bool:
    """Verify and commit of an interface go together, and so do conv and conv_state."""
    interfaces = {need.operation.split(".")[0] for need in needs}
    groups: list[list[str]] = [
        ["conv.verify", "conv.commit"],
        ["delta_rule.verify", "delta_rule.commit"],
    ]
    if {"conv", "conv_state"} <= interfaces:
        groups.append([op for op in TOUCHED if op.split(".")[0] in ("conv", "conv_state")])
    return all(len({choice[op].name for op in group if op in choice}) <= 1 for group in groups)


def agree(choice: dict[str, Candidate], needs: Sequence[Requirement]) -> bool:
    """Some layout and dtype of every state is one that all the chosen accept."""
    for layouts in product(*WORDS.values()):
        for dtype in SEVERAL:
            fixed = dict(zip(WORDS, layouts, strict=True))
            if all(
                fixed[state] in c.manifest.offers[op].layouts
                for op, c in choice.items()
                for state in TOUCHED[op]
            ) and all(
                dtype in need.state_dtypes
                and dtype in choice[need.operation].manifest.offers[need.operation].state_dtypes
                for need in needs
                if need.operation in choice and need.state_dtypes
            ):
                return True
    return False


def value(choice: dict[str, Candidate]) -> tuple[int, int]:
    return sum(c.manifest.priority for c in choice.values()), len(choice)


def oracle(
    everyone: Sequence[Candidate], needs: Sequence[Requirement], overrides: dict[str, str]
) -> tuple[int, int] | None:
    found = [
        value(choice)
        for choice in choices(everyone, needs, overrides)
        if one_provider_each(choice, needs) and agree(choice, needs)
    ]
    return max(found, default=None)


def solve(
    everyone: Sequence[Candidate],
    needs: Sequence[Requirement],
    overrides: dict[str, str] | None = None,
) -> Assignment | None:
    return assign([judge(c, needs) for c in everyone], needs, overrides)


def conflict(
    everyone: Sequence[Candidate],
    needs: Sequence[Requirement],
    overrides: dict[str, str] | None = None,
) -> tuple[Reason, ...]:
    return clashes([judge(c, needs) for c in everyone], needs, overrides)


@settings(max_examples=400, deadline=None)
@given(problem=problems(), data=st.data())
def test_the_best_joint_assignment_is_found_exactly_when_there_is_one(
    problem: tuple[list[Candidate], list[Requirement]], data: st.DataObject
) -> None:
    everyone, needs = problem
    targets = ["conv", "delta_rule", *(need.operation for need in needs)]
    names = st.sampled_from([c.name for c in everyone])
    overrides = data.draw(st.dictionaries(st.sampled_from(targets), names, max_size=1))
    best = oracle(everyone, needs, overrides)
    found = solve(everyone, needs, overrides)
    if best is None:
        assert found is None
        return
    assert found is not None
    choice = dict(found.choices)
    assert value(choice) == best
    assert choice in list(choices(everyone, needs, overrides))
    assert one_provider_each(choice, needs)
    for need in needs:
        if (chosen := choice.get(need.operation)) is not None:
            offer = chosen.manifest.offers[need.operation]
            touched = TOUCHED[need.operation]
            assert all(found.layouts[state] in offer.layouts for state in touched)
            if need.state_dtypes:
                dtype = found.state_dtypes[touched[0]]
                assert dtype in need.state_dtypes
                assert dtype in offer.state_dtypes


@settings(max_examples=400, deadline=None)
@given(problem=problems())
def test_a_joint_failure_always_has_a_reason(
    problem: tuple[list[Candidate], list[Requirement]],
) -> None:
    everyone, needs = problem
    judged = [judge(c, needs) for c in everyone]
    if assign(judged, needs) is None:
        required = [need.operation for need in needs if not need.optional]
        assert clashes(judged, needs) or any(j.all_reasons(required) for j in judged)


@settings(max_examples=100, deadline=None)
@given(problem=problems(), data=st.data())
def test_the_order_of_candidates_does_not_matter(
    problem: tuple[list[Candidate], list[Requirement]], data: st.DataObject
) -> None:
    everyone, needs = problem
    shuffled = data.draw(st.permutations(everyone))
    assert solve(everyone, needs) == solve(shuffled, needs)


def needs_of(*operations: str, dtypes: tuple[str, ...] = ("float32",)) -> list[Requirement]:
    return [
        Requirement(op, "1 layer", state_dtypes=dtypes if op.startswith("delta") else ())
        for op in operations
    ]


def only(layout: str, **fields: object) -> Offer:
    return replace(EVERYTHING, layouts=(layout,), **fields)  # type: ignore[arg-type]


PHASES = ("delta_rule.prefill", "delta_rule.decode")


def test_a_greedy_pick_would_refuse_what_fits() -> None:
    best = candidate("x.best", PHASES[0], offer=only("KV"), priority=9)
    solid = candidate("x.solid", *PHASES, offer=only("VK"))
    found = solve([best, solid], needs_of(*PHASES))
    assert found is not None
    assert {c.name for c in found.choices.values()} == {"x.solid"}
    assert found.layouts == {"recurrent": "VK"}


def test_a_specialist_takes_one_operation_where_it_takes_the_same_state() -> None:
    special = candidate("x.special", PHASES[0], offer=only("VK"), priority=1)
    solid = candidate("x.solid", *PHASES, offer=only("VK"))
    found = solve([special, solid], needs_of(*PHASES))
    assert found is not None
    assert [found.choices[op].name for op in PHASES] == ["x.special", "x.solid"]


def test_one_provider_serves_an_interface_where_priorities_tie() -> None:
    part = candidate("x.a_part", PHASES[1])
    whole = candidate("x.b_whole", *PHASES)
    found = solve([part, whole], needs_of(*PHASES))
    assert found is not None
    assert {c.name for c in found.choices.values()} == {"x.b_whole"}


def test_full_ties_go_by_name() -> None:
    found = solve([candidate("x.b", "scan"), candidate("x.a", "scan")], needs_of("scan.decode"))
    assert found is not None
    assert found.choices["scan.decode"].name == "x.a"


def test_the_layout_that_the_provider_prefers_is_taken() -> None:
    both = replace(EVERYTHING, layouts=("ring", "CW"))
    found = solve([candidate("x.a", "conv", offer=both)], needs_of("conv.decode"))
    assert found is not None
    assert found.layouts == {"conv": "ring"}


def test_a_layout_that_a_need_leaves_out_is_not_taken_although_preferred() -> None:
    both = replace(EVERYTHING, layouts=("ring", "CW"))
    needs = [replace(need, layouts=("CW", "WC")) for need in needs_of("conv.decode")]
    found = solve([candidate("x.a", "conv", offer=both)], needs)
    assert found is not None
    assert found.layouts == {"conv": "CW"}


def test_conv_and_conv_state_come_from_one_provider() -> None:
    needs = needs_of("conv_state.step", "conv.prefill")
    halves = [candidate("x.a", "conv", priority=5), candidate("x.b", "conv_state")]
    assert solve(halves, needs) is None
    both = candidate("x.c", "conv", "conv_state")
    found = solve([*halves, both], needs)
    assert found is not None
    assert {c.name for c in found.choices.values()} == {"x.c"}
    alone = solve(halves, needs_of("conv.prefill"))
    assert alone is not None


def test_verify_and_commit_come_from_one_provider() -> None:
    needs = needs_of("scan.verify", "scan.commit", "scan.decode")
    part = candidate("x.part", "scan.verify", "scan.decode", priority=5)
    whole = candidate("x.whole", "scan")
    found = solve([part, whole], needs)
    assert found is not None
    chosen = {op: c.name for op, c in found.choices.items()}
    assert chosen == {"scan.verify": "x.whole", "scan.commit": "x.whole", "scan.decode": "x.part"}


def test_an_optional_operation_is_taken_where_it_fits_and_refuses_nothing() -> None:
    needs = [*needs_of(*PHASES), replace(needs_of("delta_rule.decode_fused")[0], optional=True)]
    plain, rich = candidate("x.a", *PHASES), candidate("x.b", "delta_rule")
    without, together = solve([plain], needs), solve([plain, rich], needs)
    assert without is not None
    assert set(without.choices) == set(PHASES)
    assert together is not None
    assert together.choices["delta_rule.decode_fused"].name == "x.b"


def test_an_optional_operation_of_a_group_does_not_outweigh_priority() -> None:
    needs = [*needs_of("scan.verify"), replace(needs_of("scan.commit")[0], optional=True)]
    best, whole = candidate("x.best", "scan.verify", priority=5), candidate("x.whole", "scan")
    found = solve([best, whole], needs)
    assert found is not None
    assert {op: c.name for op, c in found.choices.items()} == {"scan.verify": "x.best"}


def test_a_state_dtype_has_to_be_one_that_every_operation_may_have() -> None:
    prefill = needs_of(PHASES[0])
    decode = needs_of(PHASES[1], dtypes=("float32", "bfloat16"))
    low = replace(EVERYTHING, state_dtypes={"bfloat16"})
    best = candidate("x.best", PHASES[1], offer=low, priority=9)
    found = solve([best, candidate("x.solid", *PHASES)], [*prefill, *decode])
    assert found is not None
    assert found.state_dtypes == {"recurrent": "float32"}
    assert found.choices[PHASES[1]].name == "x.solid"


def test_an_operation_goes_before_its_interface_in_overrides() -> None:
    everyone = [candidate("x.a", "delta_rule", priority=5), candidate("x.b", "delta_rule")]
    overrides = {"delta_rule": "x.a", PHASES[0]: "x.b"}
    found = solve(everyone, needs_of(*PHASES), overrides)
    assert found is not None
    assert [found.choices[op].name for op in PHASES] == ["x.b", "x.a"]


def test_disjoint_state_dtypes_name_both_sides() -> None:
    """P037: prefill keeps its state in float32, decode in bfloat16."""
    prefill = candidate("x.a", PHASES[0], offer=replace(EVERYTHING, state_dtypes={"float32"}))
    decode = candidate("x.b", PHASES[1], offer=replace(EVERYTHING, state_dtypes={"bfloat16"}))
    needs = needs_of(*PHASES, dtypes=("float32", "bfloat16"))
    assert solve([prefill, decode], needs) is None
    (reason,) = conflict([prefill, decode], needs)
    assert reason.code is Code.DTYPE_UNSUPPORTED
    assert reason.subject == "recurrent state"
    assert reason.needed == "one state dtype for delta_rule.prefill, delta_rule.decode"
    assert reason.offered == "x.a delta_rule.prefill: float32; x.b delta_rule.decode: bfloat16"
    mixed = candidate("x.c", PHASES[1], offer=replace(EVERYTHING, state_dtypes={"float32"}))
    assert solve([prefill, decode, mixed], needs) is not None


def test_disjoint_layouts_name_both_sides() -> None:
    everyone = [
        candidate("x.a", PHASES[0], offer=only("VK")),
        candidate("x.b", PHASES[1], offer=only("KV")),
    ]
    (reason,) = conflict(everyone, needs_of(*PHASES))
    assert reason.code is Code.LAYOUT_UNSUPPORTED
    assert reason.needed == "one layout for delta_rule.prefill, delta_rule.decode"
    assert reason.offered == "x.a delta_rule.prefill: VK; x.b delta_rule.decode: KV"


def test_overrides_that_part_a_group_are_named() -> None:
    everyone = [candidate("x.a", "scan"), candidate("x.b", "scan")]
    needs = needs_of("scan.verify", "scan.commit")
    overrides = {"scan.verify": "x.a", "scan.commit": "x.b"}
    assert solve(everyone, needs, overrides) is None
    (reason,) = conflict(everyone, needs, overrides)
    assert reason.code is Code.OPERATION_MISSING
    assert reason.offered == "x.a scan.verify; x.b scan.commit"


def test_a_three_way_clash_is_told_as_such() -> None:
    """Each pair of operations shares a layout, all three do not."""
    fused = "delta_rule.decode_fused"
    everyone = [
        candidate("x.a", PHASES[0], offer=replace(EVERYTHING, layouts=("VK",))),
        candidate("x.b", "conv.prefill", offer=replace(EVERYTHING, layouts=("CW",))),
        candidate("x.c", fused, offer=replace(EVERYTHING, layouts=("VK", "ring"))),
        candidate("x.d", fused, offer=replace(EVERYTHING, layouts=("KV", "CW"))),
    ]
    needs = needs_of(PHASES[0], "conv.prefill", fused)
    assert solve(everyone, needs) is None
    (reason,) = conflict(everyone, needs)
    assert reason.subject == "conv and recurrent states"
    assert "x.c delta_rule.decode_fused: VK, ring" in reason.offered


def test_no_clash_is_told_where_an_operation_has_nobody() -> None:
    assert conflict([candidate("x.a", PHASES[0])], needs_of(*PHASES)) == ()


@pytest.mark.parametrize("count", [0, 1])
def test_no_requirements_are_an_empty_assignment(count: int) -> None:
    found = solve([candidate("x.a", "conv")][:count], [])
    assert found is not None
    assert not found.choices
