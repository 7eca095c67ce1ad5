"""A table loads back as it was written, and is refused by name where it does not fit."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal_cuda.candidates import CANDIDATES
from hal_cuda.tables import TABLES, table
from hal_triton.table_file import (
    LOGGER,
    VARIABLE,
    TableError,
    code,
    document,
    parse,
    read,
)
from hal_triton.table_file import (
    given as under,
)
from hal_triton.tune.classes import CLASSES
from hal_triton.tuning import DEFAULT, UNBOUNDED, Config, Table

ARCH = "sm_90"
SHIPPED = table(ARCH)


@st.composite
def tables(draw: st.DrawFn) -> dict[str, Any]:
    """Tables over some names, each of candidates with rising limits."""
    names = draw(st.sets(st.sampled_from(sorted(CANDIDATES)), min_size=1, max_size=5))
    found = {}
    for name in sorted(names):
        limits = sorted(draw(st.sets(st.integers(1, 10**6), max_size=3)))
        pick = st.sampled_from(list(CANDIDATES[name]))
        found[name] = tuple((limit, draw(pick)) for limit in (*limits, UNBOUNDED))
    return found


@given(tables())
def test_a_table_loads_back_equal(made: Table) -> None:
    text = json.dumps(document(made, ARCH, {"machine": "x"}), allow_nan=False)
    assert parse("file", json.loads(text), ARCH, SHIPPED) == made


@pytest.mark.parametrize("arch", TABLES)
def test_every_shipped_table_could_be_a_file(arch: str) -> None:
    text = json.dumps(document(table(arch), arch, {}))
    assert parse("file", json.loads(text), arch, table(arch)) == table(arch)


def write(path: Path, entries: Any, **changes: Any) -> Path:
    path.write_text(json.dumps({"schema": 1, "arch": ARCH, "made": {}, "table": entries} | changes))
    return path


def entry(**changes: Any) -> dict[str, Any]:
    plain = {"up_to": None, "blocks": {"BV": 8}, "warps": 1, "stages": 1, "evict": ""}
    return plain | changes


NAME, WALK = "delta_rule.decode", "delta_rule.prefill.hopper"
WRONG = {
    "another arch": ({}, {"arch": "sm_80"}, "is of arch 'sm_80', the device is 'sm_90'"),
    "another schema": ({}, {"schema": 2}, "expected a table of schema 1"),
    "no table": ([], {}, "table is [], expected entries by name"),
    "unknown name": ({"delta_rule.decod": [entry()]}, {}, "delta_rule.decod is no name of a table"),
    "no entries": ({NAME: []}, {}, "delta_rule.decode is [], expected a list"),
    "unknown block": ({NAME: [entry(blocks={"BK": 8})]}, {}, "expected ['BV']"),
    "missing block": ({NAME: [entry(blocks={})]}, {}, "expected ['BV']"),
    "size of nought": (
        {NAME: [entry(blocks={"BV": 0})]},
        {},
        "BV of delta_rule.decode is 0, expec",
    ),
    "size of no tile": ({NAME: [entry(blocks={"BV": 24})]}, {}, "is 24, expected a power of two"),
    "three warps": (
        {NAME: [entry(warps=3)]},
        {},
        "warps of delta_rule.decode is 3, expected a pow",
    ),
    "three groups": ({WALK: [entry(blocks={"CONSUMERS": 3})]}, {}, "is 3, expected 1 or 2"),
    "size that is a truth": ({NAME: [entry(blocks={"BV": True})]}, {}, "expected positive whole"),
    "no warps": ({NAME: [entry(warps=0)]}, {}, "expected positive whole numbers"),
    "half a stage": ({NAME: [entry(stages=1.5)]}, {}, "expected positive whole numbers"),
    "eviction": ({NAME: [entry(evict="all")]}, {}, "evict of delta_rule.decode is 'all'"),
    "no registers": ({NAME: [entry(registers=-1)]}, {}, "expected positive whole numbers"),
    "registers of two threads": ({NAME: [entry(registers=256)]}, {}, "256, expected at most 255"),
    "no field": ({NAME: [{"up_to": None}]}, {}, "an entry of delta_rule.decode is"),
    "no end": ({NAME: [entry(up_to=4)]}, {}, "up_to of delta_rule.decode has to rise, and be null"),
    "two ends": ({NAME: [entry(), entry()]}, {}, "has to rise, and be null in the last alone"),
    "falling": (
        {NAME: [entry(up_to=4), entry(up_to=4), entry()]},
        {},
        "up_to of delta_rule.decode has to rise",
    ),
}


@pytest.mark.parametrize("kind", sorted(WRONG))
def test_what_does_not_fit_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    entries, changes, text = WRONG[kind]
    path = write(tmp_path / "table.json", entries, **changes)
    with pytest.raises(TableError) as caught:
        read(path, ARCH, SHIPPED)
    assert str(caught.value).startswith(str(path))
    assert text in str(caught.value)


def test_a_limit_of_registers_may_be_left_out_and_is_of_nvidia_alone(tmp_path: Path) -> None:
    older, newer = ({NAME: [entry(**each)]} for each in ({}, {"registers": 96}))
    assert read(write(tmp_path / "older.json", older), ARCH, SHIPPED)[NAME][0][1].registers == 0
    limited = read(write(tmp_path / "newer.json", newer), ARCH, SHIPPED)[NAME][0][1]
    assert limited.options["maxnreg"] == 96
    amd = write(tmp_path / "amd.json", newer, arch="gfx942")
    with pytest.raises(TableError, match="registers 96, which gfx942 cannot limit"):
        read(amd, "gfx942", SHIPPED)


@pytest.mark.parametrize("text", ["{", "[]", "3", "\x00"])
def test_a_file_that_is_no_table_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text(text)
    with pytest.raises(TableError, match="hal tune"):
        read(tmp_path / "table.json", ARCH, SHIPPED)
    with pytest.raises(TableError, match="No such file"):
        read(tmp_path / "other.json", ARCH, SHIPPED)


def test_nothing_is_read_unasked_and_a_file_lies_over_what_is_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert under(SHIPPED, ARCH) is SHIPPED
    path = write(tmp_path / "table.json", {NAME: [entry(blocks={"BV": 64})]})
    monkeypatch.setenv(VARIABLE, str(path))
    with caplog.at_level(logging.INFO, logger=LOGGER):
        found = under(SHIPPED, ARCH)
    assert found == {**SHIPPED, NAME: ((UNBOUNDED, Config({"BV": 64}, 1)),)}
    assert caplog.messages == [f"{VARIABLE}: 1 entries of {path} for {ARCH}"]


def test_the_code_of_a_table_is_the_table() -> None:
    made = {NAME: ((2048, Config({"BV": 4}, 1)), (UNBOUNDED, Config({"BV": 16}, 2, 1, "x")))}
    text = "{\n" + "\n".join(code(made)) + "\n}"
    assert eval(text, {"UNBOUNDED": UNBOUNDED, "Config": Config}) == made


def test_every_name_of_the_default_has_candidates_and_a_class() -> None:
    assert set(CANDIDATES) == set(DEFAULT) == {each.name for each in CLASSES}


def test_the_classes_of_a_name_are_neighbours_with_rising_limits() -> None:
    seen: list[str] = []
    for each in CLASSES:
        if not seen or seen[-1] != each.name:
            assert each.name not in seen
            seen.append(each.name)
    for name in seen:
        limits = [each.limit for each in CLASSES if each.name == name]
        assert limits == sorted(set(limits))
        assert limits[-1] == UNBOUNDED


@pytest.mark.parametrize("name", DEFAULT)
def test_candidates_have_the_blocks_of_what_is_shipped_and_differ(name: str) -> None:
    needed = set.intersection(*(set(config.blocks) for _, config in DEFAULT[name]))
    tried = CANDIDATES[name]
    assert all(needed <= set(config.blocks) for config in tried)
    assert all(one != two for at, one in enumerate(tried) for two in tried[:at])
