"""Merge reports of `hal bench --json` into one report, a table and a picture.

The parts share the card and the versions; each shape is of one part. Entrants that were not right,
and those whose readings lie further apart than `--settled` of their median, have no time.

$ python benchmarks/gpu/side_by_side.py part-*.json --out docs/reports/peers-h200-DATE.json \
    --table docs/performance.md --plot docs/bench-h200.svg
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final

from hal.bench.shapes import SHAPES

BEGIN, END = "<!-- side by side -->", "<!-- side by side ends -->"
"""Between which lines of a document the table lies."""

SAME: Final = ("device", "machine", "arch", "providers", "python", "torch", "triton", "timer")
"""What the parts of one run have in common."""

RANK: Final = {op: n for n, op in enumerate(dict.fromkeys(shape.operation for shape in SHAPES))}
NUMBER: Final = {(shape.operation, shape.name): n for n, shape in enumerate(SHAPES)}
PEERS: Final = ("flashinfer", "fla", "sglang", "mamba_ssm", "flash_kda")
OURS: Final = "cuda."

Line = dict[str, Any]


def merged(parts: Sequence[dict[str, Any]], left_out: Sequence[str] = ()) -> dict[str, Any]:
    """One report of all parts, in the order of the named shapes; other versions are refused.

    Where several parts have a shape the last one's lines stay, and a part of which none stay says
    nothing. A part may be such a report itself. `left_out` drops lines without a time, as
    PEER:OPERATION=WHY.
    """
    first = parts[0]["environment"]
    for part, name in product(parts, SAME):
        if part["environment"].get(name) != first.get(name):
            found = f"{part['environment'].get(name)!r} beside {first.get(name)!r}"
            raise ValueError(f"these parts are of different machines: {name} is {found}")
    drops = dict(each.split("=", 1) for each in left_out)
    last = {shape_of(line): part for part in parts for line in part["lines"]}
    lines = [line for part in parts for line in part["lines"] if last[shape_of(line)] is part]
    dropped = {tuple(name.split(":")) for name in drops}
    lines = [
        line
        for line in lines
        if line["cold_us"] or (peer_of(line), line["operation"]) not in dropped
    ]
    lines.sort(key=order)
    heard = [part for part in parts if any(each is part for each in last.values())]
    rounds = sorted({count for part in heard for count in rounds_of(part)})
    notes = [note for part in heard for note in part["notes"]]
    notes += [f"{name} is left out: {why}" for name, why in drops.items()]
    if loud := sum(part["environment"].get("quiet") is False for part in last.values()):
        notes.append(f"{loud} of {len(last)} shapes: other work ran on the card meanwhile")
    named = {name: first.get(name) for name in SAME}
    return {"schema": 1, "environment": {**named, "rounds": rounds}, "lines": lines, "notes": notes}


def rounds_of(part: dict[str, Any]) -> list[int]:
    """How many readings its lines have: one number, or those of the parts that it was made of."""
    rounds = part["environment"]["rounds"]
    return rounds if isinstance(rounds, list) else [rounds]


def order(line: Line) -> tuple[int, bool, int]:
    """By operation, KDA behind the others, then as shapes are named."""
    operation, shape = shape_of(line)
    return RANK[operation], shape.startswith("kda"), NUMBER[operation, shape]


def shape_of(line: Line) -> tuple[str, str]:
    """What tells a shape from all others."""
    return line["operation"], line["shape"]


def peer_of(line: Line) -> str:
    """The peer's name without what tells its ways apart."""
    return str(line["entrant"]).partition(" ")[0]


def spread(line: Line) -> float:
    """How far the cold readings lie apart, in parts of their median."""
    times = line["cold_us"]
    return float((max(times["readings"]) - min(times["readings"])) / times["median"])


def time_of(line: Line, settled: float) -> float | None:
    """The cold median, None where nothing was timed or nothing can be said."""
    if not line["cold_us"] or spread(line) > settled:
        return None
    return float(line["cold_us"]["median"])


def rows(report: dict[str, Any], settled: float) -> Iterator[tuple[Line, dict[str, Line]]]:
    """The provider's line of each shape that has peers, and the peers' lines by name."""
    shapes: dict[tuple[str, str], list[Line]] = {}
    for line in report["lines"]:
        shapes.setdefault(shape_of(line), []).append(line)
    for lines in shapes.values():
        ours = [line for line in lines if line["entrant"].startswith(OURS)]
        others = {peer_of(line): line for line in lines if line not in ours}
        if ours and others and time_of(ours[0], settled) is not None:
            yield ours[0], others


def cell(line: Line | None, base: float, settled: float) -> str:
    """A peer's time, and how many times the provider's it is; its verdict where it has none."""
    if line is None or line["verdict"] == "not comparable":
        return "-"
    time = time_of(line, settled)
    if time is None:
        return "unsettled" if line["cold_us"] else str(line["verdict"])
    return f"{figure(time)} ({time / base:.2f}x)"


def figure(time: float) -> str:
    """Three digits, or whole microseconds."""
    return f"{time:.0f}" if time >= 1000 else f"{time:.3g}"


def table(report: dict[str, Any], settled: float) -> list[str]:
    """The table in Markdown: a row a shape, a column a peer that has a line."""
    found = list(rows(report, settled))
    peers = [name for name in PEERS if any(name in others for _, others in found)]
    head = ("operation", "shape", "provider", "us", *peers)
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for ours, others in found:
        base = float(ours["cold_us"]["median"])
        cells = [cell(others.get(name), base, settled) for name in peers]
        named = (ours["operation"], ours["shape"], ours["entrant"], figure(base))
        lines.append("| " + " | ".join([*named, *cells]) + " |")
    return lines


def versions(report: dict[str, Any]) -> str:
    """Who was there, with versions, as a sentence."""
    found = {peer_of(line): line["version"] for line in report["lines"]}
    return ", ".join(f"{name} {found[name]}" for name in PEERS if name in found)


def written(document: str, lines: Sequence[str]) -> str:
    """A document with these lines between its marks."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the document has no lines {BEGIN} and {END}; put them where it shall be")
    return "\n".join([before + begin, "", *lines, "", end + after])


def draw(report: dict[str, Any], settled: float, path: Path) -> None:
    """The peers' times in parts of the provider's, a row a shape, on a logarithmic axis."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    found = list(rows(report, settled))
    with rc_context({"svg.hashsalt": "hal", "svg.fonttype": "none"}):
        picture = Figure(figsize=(9, 1.6 + 0.2 * len(found)), layout="constrained")
        panel = picture.subplots()
        for number, name in enumerate(PEERS):
            if points := list(_points(found, name, settled)):
                across, down = zip(*points, strict=True)
                panel.scatter(across, down, s=28, color=f"C{number}", label=name)
        panel.axvline(1.0, color="black", linewidth=1)
        names = [f"{ours['operation']}  {ours['shape']}" for ours, _ in found]
        panel.set_yticks(range(len(names)), names, fontsize=7)
        panel.set_ylim(len(names) - 0.5, -0.5)
        panel.set_xscale("log")
        ticks = (0.8, 1, 1.25, 1.5, 2, 3, 4, 6, 8, 10, 14)
        panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        picture.legend(loc="outside lower center", ncols=len(PEERS), fontsize=8)
        where = report["environment"]
        panel.set_title(
            f"{where['machine']}: time over hal's, cold medians; right of 1 hal is faster",
            fontsize=9,
        )
        picture.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _points(
    found: Sequence[tuple[Line, dict[str, Line]]], name: str, settled: float
) -> Iterator[tuple[float, int]]:
    for row, (ours, others) in enumerate(found):
        time = time_of(others[name], settled) if name in others else None
        if time is not None:
            yield time / float(ours["cold_us"]["median"]), row


def main() -> None:
    """Read the parts, write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", type=Path, nargs="+")
    parser.add_argument("--settled", type=float, default=0.1)
    parser.add_argument("--leave-out", action="append", default=[], metavar="PEER:OPERATION=WHY")
    for name in ("--out", "--table", "--plot"):
        parser.add_argument(name, type=Path)
    asked = parser.parse_args()
    read = [json.loads(part.read_text(encoding="utf-8")) for part in asked.parts]
    report = merged(read, asked.leave_out)
    lines = table(report, asked.settled)
    if asked.out:
        asked.out.write_text(json.dumps(report, separators=(",", ":")) + "\n", encoding="utf-8")
    if asked.table:
        asked.table.write_text(written(asked.table.read_text(encoding="utf-8"), lines), "utf-8")
    if asked.plot:
        draw(report, asked.settled, asked.plot)
    print("\n".join([*lines, "", versions(report)]))


if __name__ == "__main__":
    main()
