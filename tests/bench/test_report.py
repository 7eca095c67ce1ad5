"""The table, the data and the picture of a report say the same."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hal.bench import plot
from hal.bench.contest import FAILED, RIGHT, SKIPPED, WRONG, Line
from hal.bench.judge import Verdict
from hal.bench.run import Report
from hal.cli import bench_report

CHECK = Verdict(1e-7, 2e-8, (1e-5, 1e-5), True)
MINE = Line(
    "conv.decode",
    "B1",
    "float32",
    "cpu.torch",
    "0.1",
    RIGHT,
    (1,),
    CHECK,
    "",
    [8.0, 10.0, 12.0],
    [5.0],
)
OTHER = replace(MINE, entrant="other", version="2.0", cold=[20.0, 21.0, 19.0], warm=[9.0])
STATELESS = replace(OTHER, entrant="stateless", check=replace(CHECK, state=None))
BAD = replace(OTHER, entrant="bad", verdict=WRONG, why="errors 1 of the result", cold=[], warm=[],
              check=replace(CHECK, result=float("inf"), right=False))  # fmt: skip
GONE = replace(BAD, entrant="gone", verdict=FAILED, check=None, why="RuntimeError: no")
LACKS = replace(GONE, entrant="lacks", verdict=SKIPPED, why="takes no z")
REPORT = Report(
    {
        "device": "cpu", "machine": "x", "arch": "", "providers": {"cpu.torch": "0.1"},
        "python": "3", "torch": "2", "triton": None, "threads": 1, "timer": "ticks", "rounds": 3,
    },
    (MINE, OTHER, STATELESS, BAD, GONE, LACKS),
    ("fla: fla-core is not installed",),
)  # fmt: skip


def test_the_table_has_medians_ranges_ratios_and_what_is_wrong() -> None:
    text = list(bench_report.lines(REPORT))
    rows = {line.split()[0]: line for line in text[3:]}
    assert rows["B1"].split()[1:] == ["cpu.torch", "0.1", "10", "8..12", "5", "5..5", "1.0e-07"]
    assert rows["other"].split() == [
        "other", "2.0", "20", "19..21", "9", "9..9", "2.00x", "1.0e-07",
    ]  # fmt: skip
    assert rows["stateless"].endswith("its state is not checked")
    assert rows["bad"].endswith("wrong: errors 1 of the result")
    assert rows["gone"].endswith("failed: RuntimeError: no")
    assert rows["lacks"].endswith("not comparable: takes no z")
    assert text[-1] == "Note: fla: fla-core is not installed"


def test_the_data_holds_every_reading_and_is_json() -> None:
    data = json.loads(json.dumps(bench_report.data(REPORT), allow_nan=False))
    mine, _, stateless, bad, *_ = data["lines"]
    assert mine["cold_us"] == {"median": 10.0, "readings": [8.0, 10.0, 12.0]}
    assert bad["cold_us"] is None
    assert bad["check"]["result"] is None
    assert stateless["check"]["state"] is None
    assert data["environment"] == REPORT.environment


def test_only_a_provider_that_is_not_right_makes_a_report_unsound() -> None:
    assert REPORT.sound
    for verdict in (WRONG, FAILED):
        assert not replace(REPORT, lines=(replace(MINE, verdict=verdict),)).sound


def test_a_picture_has_a_point_for_every_line_that_was_timed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "out.svg"
    plot.check(target)
    plot.draw(REPORT, target)
    text = target.read_text()
    assert all(f"B1  {name}" in text for name in ("cpu.torch", "other", "stateless"))
    assert "B1  bad" not in text
    again = tmp_path / "again.svg"
    plot.draw(REPORT, again)
    assert again.read_bytes() == target.read_bytes()


def test_an_empty_report_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot.draw(replace(REPORT, lines=(BAD,)), tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size


def test_a_picture_of_another_kind_is_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match=r"--plot out.gif: expected a name that ends in .svg"):
        plot.check(Path("out.gif"))
