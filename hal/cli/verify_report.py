"""A judgement as text and as plain data."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any

from hal.cli.output import aligned

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hal.integrations.verify.judge import Gap, Judgement, Row


def lines(found: Judgement) -> Iterator[str]:
    """The verdict first, then who served, then a row for each way of serving."""
    yield headline(found)
    for line in found.facts.served_by:
        yield f"  {line}"
    header = ("check", "way", "prompts", "tokens", "largest gap", "where", "verdict")
    yield from aligned([header, *(_cells(found, row) for row in found.rows)], indent=2)


def headline(found: Judgement) -> str:
    """One line: what was checked and whether it passed."""
    facts = found.facts
    gaps = [row.worst[1].nats for row in found.rows if row.worst]
    return (
        f"{found.model} on {facts.engine} {facts.version}, {facts.device}, {facts.dtype}: "
        f"{_verdict(found)}; largest gap {_nats(max(gaps))} nats, allowed {found.bar:g}"
    )


def _verdict(found: Judgement) -> str:
    if found.passed:
        return "PASS"
    wrong = dict.fromkeys(row.check for row in found.rows if row.verdict == "WRONG")
    text = [f"FAIL in {', '.join(wrong)}"] if wrong else ["FAIL"]
    if found.missing:
        text.append(f"not run: {', '.join(found.missing)}")
    return "; ".join(text)


def _cells(found: Judgement, row: Row) -> tuple[str, ...]:
    if row.worst is None:
        return row.check, row.way, "", "", "", "", f"{row.verdict}: {row.why_not}"
    index, gap = row.worst
    where = f"new token {gap.token + 1} behind {found.lengths[index]}"
    tokens = sum(each.compared for each in row.gaps.values())
    return (
        row.check,
        row.way,
        str(len(row.gaps)),
        str(tokens),
        _nats(gap.nats),
        where,
        row.verdict,
    )


def _nats(gap: float) -> str:
    return f"{gap:.2g}" if isfinite(gap) else "not finite"


def data(found: Judgement) -> dict[str, Any]:
    """Everything, with every prompt's gap; a gap that is not finite is null."""
    facts = found.facts
    return {
        "model": found.model,
        "engine": {"name": facts.engine, "version": facts.version},
        "device": facts.device,
        "dtype": facts.dtype,
        "served_by": list(facts.served_by),
        "passed": found.passed,
        "missing": list(found.missing),
        "allowed": found.bar,
        "rows": [_row(found, row) for row in found.rows],
    }


def _row(found: Judgement, row: Row) -> dict[str, Any]:
    worst = None if row.worst is None else row.worst[1]
    return {
        "check": row.check,
        "way": row.way,
        "verdict": row.verdict,
        "why_not": row.why_not or None,
        "gap": None if worst is None else _finite(worst),
        "prompts": [
            {
                "prompt": index,
                "length": found.lengths[index],
                "gap": _finite(gap),
                "token": gap.token,
                "compared": gap.compared,
                "parted": gap.parted,
            }
            for index, gap in row.gaps.items()
        ],
    }


def _finite(gap: Gap) -> float | None:
    return gap.nats if isfinite(gap.nats) else None
