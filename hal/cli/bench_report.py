"""A report as a table, and as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import isfinite
from statistics import median
from typing import TYPE_CHECKING, Any

from hal.bench.contest import RIGHT
from hal.cli.output import aligned

if TYPE_CHECKING:
    from hal.bench.contest import Line
    from hal.bench.run import Report

HEADER = ("shape", "entrant", "cold us", "spread", "warm us", "spread", "hal is", "error", "")
"""Columns of the table of one operation; "hal is" says how many times faster the first one is."""


def lines(report: Report) -> Iterator[str]:
    """Where it ran, then a table for each operation."""
    where = report.environment
    yield (
        f"{where['device']} ({', '.join(filter(None, (where['machine'], where['arch'])))}), torch "
        f"{where['torch']}, {where['threads']} threads, {where['timer']}, {where['rounds']} rounds"
    )
    for operation in dict.fromkeys(line.operation for line in report.lines):
        yield operation + (" and commit" if operation.endswith(".verify") else "")
        mine = [line for line in report.lines if line.operation == operation]
        yield from aligned([HEADER, *_rows(mine)], indent=2)
    yield from (f"Note: {note}" for note in report.notes)


def _rows(found: Sequence[Line]) -> Iterator[tuple[str, ...]]:
    first: dict[str, Line] = {}
    for line in found:
        base = first.setdefault(line.shape, line)
        name = f"{line.entrant} {line.version}".rstrip()
        times = (*_times(line.cold), *_times(line.warm), _ratio(base, line))
        yield line.shape if line is base else "", name, *times, _error(line), _said(line)


def _times(readings: Sequence[float]) -> tuple[str, str]:
    """The median, and the least and the largest."""
    if not readings:
        return "-", "-"
    return _us(median(readings)), f"{_us(min(readings))}..{_us(max(readings))}"


def _us(time: float) -> str:
    return f"{time:.0f}" if time >= 1000 else f"{time:.3g}"


def _ratio(base: Line, line: Line) -> str:
    """How many times faster the first entrant is with cold caches."""
    if line is base or not (base.cold and line.cold):
        return ""
    return f"{median(line.cold) / median(base.cold):.2f}x"


def _error(line: Line) -> str:
    return "-" if line.check is None else f"{line.check.result:.1e}"


def _said(line: Line) -> str:
    """The verdict where it is not that all is right, and what was not checked."""
    if line.verdict != RIGHT:
        return f"{line.verdict}: {line.why}" if line.why else line.verdict
    return "its state is not checked" if line.check and line.check.state is None else ""


def data(report: Report) -> dict[str, Any]:
    """Everything, with every reading; numbers that are not finite are null."""
    return {
        "schema": 1,
        "environment": report.environment,
        "lines": [_plain(line) for line in report.lines],
        "notes": list(report.notes),
    }


def _plain(line: Line) -> dict[str, Any]:
    found = asdict(line)
    for side in ("cold", "warm"):
        times = found.pop(side)
        found[f"{side}_us"] = {"median": median(times), "readings": times} if times else None
    check = found["check"]
    if check is not None:
        found["check"] = {
            "result": _finite(check["result"]),
            "state": _finite(check["state"]),
            "limits": list(check["limits"]),
        }
    return {**found, "rows": list(found["rows"])}


def _finite(error: float | None) -> float | None:
    return error if error is not None and isfinite(error) else None
