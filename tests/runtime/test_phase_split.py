"""A split full attention sends every call of a mode to one part, and commits where it verified."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hal.errors import CompositionError, StepOrderError
from hal.runtime.batch import Batch, Mode
from hal.runtime.full_attention import FullAttention, SpeculativeAttention
from hal.runtime.phase_split import PhaseSplit
from support.attention import Attention, Speculating

Name = Literal["prefill", "decode"]

WHO: dict[Mode, Name] = {
    Mode.DECODE: "decode",
    Mode.IDLE: "decode",
    Mode.EXTEND: "prefill",
    Mode.MIXED: "prefill",
    Mode.DRAFT_EXTEND: "prefill",
}
"""Who runs a mode; VERIFY is the option's."""

VERIFIERS: list[Name] = ["prefill", "decode"]


def expected(mode: Mode, verify: Name) -> Name:
    return verify if mode is Mode.VERIFY else WHO[mode]


def make(
    verify: Name = "prefill", split: type[PhaseSplit] = PhaseSplit
) -> tuple[PhaseSplit, dict[Name, Speculating]]:
    parts: dict[Name, Speculating] = {name: Speculating(name) for name in VERIFIERS}
    return split(parts["prefill"], parts["decode"], verify), parts


def call(split: PhaseSplit) -> torch.Tensor:
    q, v = torch.ones(1, 2, 4), torch.ones(1, 1, 3)
    return split.forward(q, v, v, 7)


def holds(split_class: type[PhaseSplit]) -> None:
    """The whole table: every mode by every way in, then forward and commit, all in one part."""
    for verify in VERIFIERS:
        for mode in Mode:
            for way in ("begin", "capture", "replay"):
                split, parts = make(verify, split_class)
                enter(split, way, mode)
                call(split)
                log: list[tuple[object, ...]] = [way_log(way, mode), ("forward", 7)]
                if mode is Mode.VERIFY:
                    split.commit([1], [0])
                    log.append(("commit", [1], [0]))
                who = expected(mode, verify)
                assert parts[who].log == log
                assert parts["decode" if who == "prefill" else "prefill"].log == []


def enter(split: PhaseSplit, way: str, mode: Mode) -> None:
    match way:
        case "begin":
            split.begin(Batch(mode))
        case "capture":
            split.capture(mode, 4, 3)
        case _:
            split.replay(Batch(mode))


def way_log(way: str, mode: Mode) -> tuple[object, ...]:
    return (way, mode, 4, 3) if way == "capture" else (way, mode)


def test_the_table_names_every_mode() -> None:
    assert {*WHO, Mode.VERIFY} == set(Mode)


@pytest.mark.parametrize("verify", VERIFIERS)
@pytest.mark.parametrize("mode", Mode)
def test_one_part_is_chosen_for_a_mode(mode: Mode, verify: Name) -> None:
    split, parts = make(verify)
    assert split.part(mode) is parts[expected(mode, verify)]


def test_every_call_of_a_step_reaches_the_part_of_its_mode() -> None:
    holds(PhaseSplit)


class VerifyAlwaysDecodes(PhaseSplit):
    def part(self, mode: Mode) -> FullAttention:
        return self.decode if mode is Mode.VERIFY else super().part(mode)


class VerifyAlwaysPrefills(PhaseSplit):
    def part(self, mode: Mode) -> FullAttention:
        return self.prefill if mode is Mode.VERIFY else super().part(mode)


class VerifyIsSwapped(PhaseSplit):
    def part(self, mode: Mode) -> FullAttention:
        if mode is not Mode.VERIFY:
            return super().part(mode)
        return self.prefill if self.verify == "decode" else self.decode


class IdlePrefills(PhaseSplit):
    def part(self, mode: Mode) -> FullAttention:
        return self.prefill if mode is Mode.IDLE else super().part(mode)


class MixedDecodes(PhaseSplit):
    def part(self, mode: Mode) -> FullAttention:
        return self.decode if mode is Mode.MIXED else super().part(mode)


class DraftExtendDecodes(PhaseSplit):
    def part(self, mode: Mode) -> FullAttention:
        return self.decode if mode is Mode.DRAFT_EXTEND else super().part(mode)


class OnlyExtendPrefills(PhaseSplit):
    def part(self, mode: Mode) -> FullAttention:
        return self.prefill if mode is Mode.EXTEND else self.decode


class ForwardDecodes(PhaseSplit):
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int
    ) -> torch.Tensor:
        return self.decode.forward(q, k, v, layer_id)


class ForwardByLength(PhaseSplit):
    """The mode read off the shapes: one token looks like a decode."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int
    ) -> torch.Tensor:
        part = self.decode if q.shape[0] == 1 else self.prefill
        return part.forward(q, k, v, layer_id)


class CommitDecodes(PhaseSplit):
    def commit(self, accepted: object, tips: object = None) -> None:
        assert isinstance(self.decode, Speculating)
        self.decode.commit(accepted, tips)  # type: ignore[arg-type]


class CommitReachesBoth(PhaseSplit):
    def commit(self, accepted: object, tips: object = None) -> None:
        for part in (self.prefill, self.decode):
            assert isinstance(part, Speculating)
            part.commit(accepted, tips)  # type: ignore[arg-type]


class CommitIsDropped(PhaseSplit):
    def commit(self, accepted: object, tips: object = None) -> None:
        pass


class TipsAreDropped(PhaseSplit):
    def commit(self, accepted: object, tips: object = None) -> None:
        super().commit(accepted)  # type: ignore[arg-type]


class ReplayPrefills(PhaseSplit):
    def replay(self, batch: Batch) -> None:
        super().replay(batch)
        self.prefill.replay(batch)


class CaptureIsWidthless(PhaseSplit):
    def capture(self, mode: Mode, rows: int, width: int) -> None:
        super().capture(mode, rows, 1)


MUTANTS = [
    VerifyAlwaysDecodes, VerifyAlwaysPrefills, VerifyIsSwapped, IdlePrefills, MixedDecodes,
    DraftExtendDecodes, OnlyExtendPrefills, ForwardDecodes, ForwardByLength, CommitDecodes,
    CommitReachesBoth, CommitIsDropped, TipsAreDropped, ReplayPrefills, CaptureIsWidthless,
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_wrong_dispatch_fails_the_table(mutant: type[PhaseSplit]) -> None:
    with pytest.raises(AssertionError):
        holds(mutant)


@pytest.mark.parametrize("verify", ["", "Decode", "both", None])
def test_an_unknown_verify_is_refused(verify: object) -> None:
    with pytest.raises(ValueError, match=r"verify is .*, expected 'prefill' or 'decode'"):
        PhaseSplit(Attention("a"), Attention("b"), verify)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["SPLIT_PREFILL", "DECODE", None])
def test_an_unknown_mode_is_refused_before_either_part_is_called(mode: object) -> None:
    split, parts = make()
    split.begin(Batch(Mode.EXTEND))
    for refused in (
        lambda: split.part(mode),  # type: ignore[arg-type]
        lambda: split.begin(Batch(mode)),  # type: ignore[arg-type]
        lambda: split.capture(mode, 1, 1),  # type: ignore[arg-type]
        lambda: split.replay(Batch(mode)),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=f"Invalid forward mode: {mode}"):
            refused()
    assert parts["prefill"].log == [("begin", Mode.EXTEND)]
    assert parts["decode"].log == []


def test_forward_before_a_step_is_an_error() -> None:
    with pytest.raises(StepOrderError, match="before begin"):
        call(make()[0])


@contextmanager
def failing(part: Attention) -> Iterator[None]:
    part.failure = RuntimeError("no memory")
    with pytest.raises(RuntimeError, match="no memory"):
        yield
    part.failure = None


@pytest.mark.parametrize("way", ["begin", "capture", "replay"])
def test_a_step_that_fails_in_its_part_leaves_none_to_run(way: str) -> None:
    split, parts = make()
    split.begin(Batch(Mode.VERIFY))
    with failing(parts["decode"]):
        enter(split, way, Mode.DECODE)
    with pytest.raises(StepOrderError, match="before begin"):
        call(split)
    with pytest.raises(StepOrderError, match="without a verify"):
        split.commit([1])


def test_a_commit_belongs_to_the_last_step_and_comes_once() -> None:
    split, parts = make("decode")
    with pytest.raises(StepOrderError, match="commit without a verify"):
        split.commit([1])
    split.begin(Batch(Mode.VERIFY))
    split.commit([1])
    with pytest.raises(StepOrderError, match="commit without a verify"):
        split.commit([1])
    split.begin(Batch(Mode.DECODE))
    with pytest.raises(StepOrderError, match="commit without a verify"):
        split.commit([1])
    assert [entry for entry in parts["decode"].log if entry[0] == "commit"] == [
        ("commit", [1], None)
    ]


@pytest.mark.parametrize("verify", VERIFIERS)
def test_it_speculates_where_the_part_that_verifies_does(verify: Name) -> None:
    plain, able = Attention("plain"), Speculating("able")
    good = (
        PhaseSplit(able, plain, verify) if verify == "prefill" else PhaseSplit(plain, able, verify)
    )
    bad = (
        PhaseSplit(plain, able, verify) if verify == "prefill" else PhaseSplit(able, plain, verify)
    )
    assert good.speculation is good
    assert bad.speculation is None
    bad.begin(Batch(Mode.VERIFY))
    with pytest.raises(CompositionError, match=f"{verify} part plain, which has no commit"):
        bad.commit([0])


@given(st.lists(st.sampled_from(list(Mode)), max_size=12), st.sampled_from(VERIFIERS))
def test_wrapped_twice_every_commit_reaches_the_one_that_verified(
    modes: list[Mode], verify: Name
) -> None:
    """P048: through any wrapping, by type."""
    inner, parts = make(verify)
    outer = PhaseSplit(inner, Speculating("other"), "prefill")
    committing: SpeculativeAttention | None = outer.speculation
    assert committing is outer
    count = 0
    for mode in modes:
        outer.begin(Batch(mode))
        if mode is Mode.VERIFY:
            outer.commit([count])
            count += 1
    commits = [entry for entry in parts[verify].log if entry[0] == "commit"]
    assert commits == [("commit", [i], None) for i in range(count)]


def test_its_label_names_both_parts_and_who_verifies() -> None:
    split, _ = make("decode")
    assert split.label == "PhaseSplit(prefill=prefill, decode=decode, verify in decode)"
