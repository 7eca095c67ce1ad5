"""The table of failures from the field names tests that exist, and leaves none out."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"\| (P\d{3}) \| ([^|]+) \| ([^|]+) \|")
TEXT = (ROOT / "tests" / "failures.md").read_text(encoding="utf-8")
ROWS = {found[1]: (found[2], found[3]) for line in TEXT.splitlines() if (found := ROW.match(line))}
TESTS = sorted(set(re.findall(r"`([\w/]+\.py)::(test_\w+)`", TEXT)))
SOURCES = sorted((ROOT / "backends").rglob("*.py")) + sorted((ROOT / "hal").rglob("*.py"))
TUNERS = re.compile(r"autotune|Autotuner|do_bench|@heuristics")
"""What measures configurations of a kernel at its first call."""
MEASURES = ("bench", "tune")
"""Folders of what only a command runs."""


def test_every_failure_has_a_row_and_no_other() -> None:
    assert list(ROWS) == [f"P{number:03}" for number in range(1, 112)]


@pytest.mark.parametrize("entry", ROWS)
def test_a_row_says_what_holds_it_or_why_nothing_does(entry: str) -> None:
    what, held = ROWS[entry]
    assert what.strip()
    excused = re.fullmatch(r"not applicable: .{20,}", held.strip())
    assert "::" in held or excused
    assert "later" not in held


@pytest.mark.parametrize(("path", "name"), TESTS, ids=["::".join(test) for test in TESTS])
def test_a_named_test_exists(path: str, name: str) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    assert re.search(rf"^\s*def {name}\(", source, re.MULTILINE)


def test_no_kernel_is_tuned_while_it_serves() -> None:
    """Configurations are tables, measured before, so that no request waits for a sweep."""
    serving = [path for path in SOURCES if not set(MEASURES) & set(path.parts)]
    assert len(serving) > 100
    assert [str(p) for p in serving if TUNERS.search(p.read_text(encoding="utf-8"))] == []
    asking = [p for p in serving if "hal.bench" in p.read_text(encoding="utf-8")]
    assert {path.parent.name for path in asking if path.name != "tuner.py"} == {"cli"}


def test_what_needs_only_a_cpu_is_mostly_held() -> None:
    held = [entry for entry, (_, text) in ROWS.items() if "::" in text]
    assert len(held) >= 100
