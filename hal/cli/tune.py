"""`hal tune`: sweep a provider's block sizes on the card that is here, and write a table."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Final

import typer

from hal.cli.bench import writable
from hal.cli.errors import REFUSED, reporting
from hal.cli.options import AsJson, Debug
from hal.cli.output import aligned
from hal.cli.question import installed, plugins_aside
from hal.device import Device
from hal_registry import Candidate, Code, Failure, Reason, attempt, load

if TYPE_CHECKING:
    from hal.tuner import Sweep, Tuned, Tuner

Where = Annotated[str, typer.Option("--device", "-d", help='As "cuda" or "cuda:1".')]
Names = Annotated[
    list[str] | None, typer.Option("--name", help="As delta_rule.decode; repeat. Default: all.")
]
Provider = Annotated[str, typer.Option(help="As cuda.hopper. Default: the portable one.")]
Rounds = Annotated[int, typer.Option(help="Readings of those that are left at the end.")]
Workers = Annotated[int, typer.Option(help="Processes that compile before anything is timed.")]
Output = Annotated[Path | None, typer.Option("--out", help="Write the table here.")]
AsCode = Annotated[bool, typer.Option("--code", help="Print what changed as Python, too.")]

MODULE: Final = "tuner"
"""The module beside a provider's that has its `TUNER`."""


def tune(
    device: Where,
    name: Names = None,
    provider: Provider = "",
    rounds: Rounds = 7,
    workers: Workers = 1,
    out: Output = None,
    code: AsCode = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Make a table for a card: exit status 0 done, 1 refused or ended early, 2 bad input.

    Candidates that spill, crash or give another result than what is shipped are dropped first.
    """
    with reporting("tune", debug):
        for option, count in (("--rounds", rounds), ("--workers", workers)):
            if count < 1:
                raise ValueError(f"{option} {count}: expected at least 1")
        writable("--out", out)
        found = _swept(Device.parse(device), provider, name or [], rounds, workers)
        plain = json.dumps(found.document, indent=1)
        if out is not None:
            out.write_text(plain + "\n", encoding="utf-8")
        text = plain if as_json else "\n".join((*_lines(found), *(found.code if code else ())))
        sys.stdout.write(text + "\n")
    if found.ended:
        typer.echo(f"hal tune: ended early, {found.ended}; start again for the rest", err=True)
        raise typer.Exit(REFUSED)


def _swept(device: Device, provider: str, names: list[str], rounds: int, workers: int) -> Sweep:
    """The sweep; a refusal is a no, without a table."""
    from hal.bench.present import presents
    from hal.bench.refusal import NotMeasured

    try:
        with plugins_aside():
            here = [each.candidate for each in presents(device, provider, installed())]
            tuner = _tuner(device, here)
            _known(names, tuner, here)
            return tuner.sweep(device, names, rounds, workers, _say)
    except NotMeasured as refusal:
        typer.echo(f"hal tune: {refusal}", err=True)
        raise typer.Exit(REFUSED) from None


def _known(names: list[str], tuner: Tuner, here: list[Candidate]) -> None:
    """Refuse a name that the tuner does not have."""
    for name in names:
        if name not in tuner.names:
            raise ValueError(f"--name {name}: {_why_not(name, tuner, here)}")


def _why_not(name: str, tuner: Tuner, here: list[Candidate]) -> str:
    """Whose name it is instead, or why it cannot be swept, or what the names are."""
    for candidate in here:
        other = tuner_of(candidate)
        if other is not None and name in other.names:
            return f"{candidate.name} reads it; add --provider {candidate.name}"
    return tuner.unswept.get(name) or f"expected one of {', '.join(tuner.names)}"


def _tuner(device: Device, candidates: list[Candidate]) -> Tuner:
    """The tuner of the last candidate that has one: specialists come first, and tune little."""
    from hal.bench.refusal import NotMeasured

    for candidate in reversed(candidates):
        if (tuner := tuner_of(candidate)) is not None:
            return tuner
    lacks = [
        Reason(
            Code.INTERFACE_MISSING,
            candidate.name,
            needed=f"a module {module_of(candidate)} with a TUNER",
            offered="none",
            fix="name another --device or --provider",
        )
        for candidate in candidates
    ]
    raise NotMeasured(f"nothing can be tuned on {device}", lacks)


def tuner_of(candidate: Candidate) -> Tuner | None:
    """The tuner beside a provider, None where it has none."""
    path = module_of(candidate)
    spec = attempt(partial(find_spec, path))
    if spec is None or isinstance(spec, Failure):
        return None
    found: Tuner = load(f"{path}:TUNER")
    return found


def module_of(candidate: Candidate) -> str:
    """Where a provider's tuner would be."""
    package = candidate.manifest.load.partition(":")[0].rpartition(".")[0]
    return f"{package}.{MODULE}" if package else MODULE


def _lines(found: Sweep) -> Iterator[str]:
    """What changed and by how much, then what stayed and what was dropped."""
    changed = [each for each in found.classes if each.changed]
    yield f"{found.document.get('arch')}: {len(changed)} of {len(found.classes)} classes changed"
    yield from aligned([_row(each) for each in found.classes], indent=2)
    for each in found.classes:
        yield from (f"  dropped of {each.where}: {c}: {why}" for c, why in each.dropped.items())


def _row(each: Tuned) -> tuple[str, ...]:
    """A class: shipped and best with their medians in microseconds, and the gain."""
    if not each.readings:
        return each.where, each.shipped, "-", "not swept: it does not run as shipped"
    before, after = (median(each.readings[name]) for name in (each.shipped, each.best))
    if not each.changed:
        return each.where, each.shipped, f"{before:.4g} us", "kept"
    gain = f"{100 * (1 - after / before):.1f}% less"
    return each.where, each.shipped, f"{before:.4g} us", each.best, f"{after:.4g} us", gain


def _say(text: str) -> None:
    """What is swept now, on stderr."""
    typer.echo(f"hal tune: {text}", err=True)
