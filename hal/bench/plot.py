"""A report as a picture: cold medians with their range, a panel for each operation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from hal.bench.contest import Line
from hal.bench.run import Report

FORMS: Final = (".svg", ".png", ".pdf")
"""Endings of a file that can be drawn."""


def check(path: Path) -> None:
    """Refuse what cannot be drawn before anything is timed; matplotlib has to be there."""
    if path.suffix not in FORMS:
        raise ValueError(f"--plot {path}: expected a name that ends in {', '.join(FORMS)}")
    import matplotlib  # noqa: F401 - a missing one is told before the run


def draw(report: Report, path: Path) -> None:
    """Write the picture; times are on a logarithmic axis, in microseconds."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    timed = [line for line in report.lines if line.cold]
    kinds = list(dict.fromkeys(line.entrant for line in timed))
    operations = list(dict.fromkeys(line.operation for line in timed))
    parts = [[line for line in timed if line.operation == each] for each in operations]
    size = (9, 1.5 + 0.3 * len(timed) + 0.8 * len(parts))
    with rc_context({"svg.hashsalt": "hal", "svg.fonttype": "none"}):
        figure = Figure(figsize=size, layout="constrained")
        heights = [len(part) for part in parts] or [1]
        panels = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)
        for part, panel in zip(parts, panels[:, 0], strict=False):
            _panel(panel, part, kinds)
        where = report.environment
        figure.suptitle(
            f"{where['device']}, {where['machine']}: us with cold caches, median, range"
        )
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _panel(panel: Any, lines: Sequence[Line], kinds: Sequence[str]) -> None:
    """A point for each line, since a bar has no foot on a logarithmic axis."""
    for height, line in enumerate(lines):
        middle = median(line.cold)
        spread = [[middle - min(line.cold)], [max(line.cold) - middle]]
        colour = f"C{kinds.index(line.entrant)}"
        panel.errorbar([middle], [height], xerr=spread, fmt="o", capsize=3, color=colour)
    names = [f"{line.shape}  {line.entrant}" for line in lines]
    panel.set_yticks(range(len(lines)), names, fontsize=8)
    panel.set_ylim(len(lines) - 0.5, -0.5)
    panel.set_xscale("log")
    panel.grid(axis="x", which="both", alpha=0.3)
    panel.set_title(lines[0].operation, fontsize=9, loc="left")
