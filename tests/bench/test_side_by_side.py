"""The merged report, its table and its picture say what the parts said, and no more."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "benchmarks" / "gpu" / "side_by_side.py"))
ENVIRONMENT = {"device": "cuda", "machine": "card", "arch": "sm_99", "providers": {"cuda.a": "1"},
               "python": "3", "torch": "2", "triton": "3", "timer": "t", "rounds": 3}  # fmt: skip
DECODE, STEP = "delta_rule.decode", "conv.decode"


def line(operation: str, shape: str, entrant: str, *cold: float, **more: Any) -> dict[str, Any]:
    times = {"median": sorted(cold)[len(cold) // 2], "readings": list(cold)} if cold else None
    return {"operation": operation, "shape": shape, "entrant": entrant, "version": "1",
            "verdict": "right", "cold_us": times, **more}  # fmt: skip


def part(*lines: dict[str, Any], **environment: Any) -> dict[str, Any]:
    return {"environment": {**ENVIRONMENT, **environment}, "lines": list(lines), "notes": []}


STEPS = part(
    line(STEP, "B512-C8192", "cuda.a", 10.0, 10.1, 9.9),
    line(STEP, "B512-C8192", "sglang (a way)", 20.0, 20.0, 21.0),
    line(STEP, "B512-C8192", "fla", 10.0, 15.0, 30.0),
)
DECODES = part(
    line(DECODE, "B1-HV32", "cuda.a", 2000.0, 2000.0),
    line(DECODE, "B1-HV32", "flashinfer", verdict="failed"),
    line(DECODE, "B1-HV32", "fla", 1000.0, 1000.0),
    line(DECODE, "B1-HV32", "sglang", verdict="not comparable"),
)


def test_rows_are_shapes_and_columns_the_peers_with_their_times_over_the_provider_s() -> None:
    report = SCRIPT["merged"]([STEPS, DECODES])
    assert SCRIPT["table"](report, 0.1) == [
        "| operation | shape | provider | us | flashinfer | fla | sglang |",
        "|---|---|---|---|---|---|---|",
        "| delta_rule.decode | B1-HV32 | cuda.a | 2000 | failed | 1000 (0.50x) | - |",
        "| conv.decode | B512-C8192 | cuda.a | 10 | - | unsettled | 20 (2.00x) |",
    ]


def test_a_shape_is_of_the_last_part_that_has_it() -> None:
    again = part(line(STEP, "B512-C8192", "cuda.a", 11.0), quiet=False)
    report = SCRIPT["merged"]([STEPS, again])
    assert [each["cold_us"]["median"] for each in report["lines"]] == [11.0]
    assert report["notes"] == ["1 of 1 shapes: other work ran on the card meanwhile"]


def test_a_part_of_which_nothing_stays_says_nothing() -> None:
    replaced = part(line(STEP, "B512-C8192", "cuda.a", 9.0), rounds=15)
    replaced["notes"] = ["a note of what was measured again"]
    report = SCRIPT["merged"]([replaced, STEPS, DECODES])
    assert report["notes"] == [] and report["environment"]["rounds"] == [3]


def test_a_merged_report_is_a_part_too() -> None:
    report = SCRIPT["merged"]([STEPS, DECODES])
    assert SCRIPT["merged"]([report]) == report
    again = part(line(STEP, "B512-C8192", "cuda.a", 11.0), rounds=5)
    both = SCRIPT["merged"]([report, again])
    assert both["environment"]["rounds"] == [3, 5]
    assert [each["cold_us"]["median"] for each in both["lines"][-1:]] == [11.0]


def test_parts_of_other_versions_are_refused() -> None:
    other = part(line(DECODE, "B1-HV32", "cuda.a", 1.0), torch="3")
    with pytest.raises(ValueError, match="torch is '3' beside '2'"):
        SCRIPT["merged"]([STEPS, other])


def test_what_is_left_out_is_told_and_no_time_ever_is() -> None:
    report = SCRIPT["merged"]([DECODES], [f"flashinfer:{DECODE}=not there", f"fla:{DECODE}=slow"])
    assert [each["entrant"] for each in report["lines"]] == ["cuda.a", "fla", "sglang"]
    assert f"flashinfer:{DECODE} is left out: not there" in report["notes"]


def test_the_table_goes_between_the_marks_and_nothing_else_changes() -> None:
    text = f"before\n{SCRIPT['BEGIN']}\nold\n{SCRIPT['END']}\nafter\n"
    want = f"before\n{SCRIPT['BEGIN']}\n\nnew\n\n{SCRIPT['END']}\nafter\n"
    assert SCRIPT["written"](text, ["new"]) == want
    assert SCRIPT["written"](want, ["new"]) == want
    with pytest.raises(ValueError, match="has no lines"):
        SCRIPT["written"]("nothing", ["new"])


def test_the_picture_has_a_row_for_each_shape_and_the_same_bytes_twice(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = SCRIPT["merged"]([STEPS, DECODES])
    for name in ("one.svg", "two.svg"):
        SCRIPT["draw"](report, 0.1, tmp_path / name)
    text = (tmp_path / "one.svg").read_text()
    assert text == (tmp_path / "two.svg").read_text()
    assert all(name in text for name in ("B512-C8192", "B1-HV32", "fla", "sglang"))


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "reports").glob("peers-*.json")))
def test_the_document_s_table_is_the_report_s(path: Path) -> None:
    report = json.loads(path.read_text(encoding="utf-8"))
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert path.name in text
    assert SCRIPT["merged"]([report]) == report
    assert text == SCRIPT["written"](text, SCRIPT["table"](report, 0.1))
