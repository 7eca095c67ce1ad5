"""`hal bench`: the providers of a device beside installed peers, checked, then timed in turn."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hal.cli.errors import REFUSED, reporting
from hal.cli.options import AsJson, Debug
from hal.cli.question import installed, plugins_aside
from hal.device import Device
from hal_registry import DTYPES

if TYPE_CHECKING:
    from hal.bench.run import Report

Where = Annotated[str, typer.Option("--device", "-d", help='As "cpu" or "cuda:0".')]
Ops = Annotated[
    list[str] | None, typer.Option("--op", help="As conv.prefill; repeat for more. Default: all.")
]
Shapes = Annotated[
    list[str] | None, typer.Option("--shape", help="As B4-HV32; repeat. Default: the device's.")
]
Peers = Annotated[
    list[str] | None,
    typer.Option("--peer", help='As transformers, or "none"; repeat. Default: all installed.'),
]
Provider = Annotated[str, typer.Option(help="As cuda.triton. Default: all of the device.")]
OneDtype = Annotated[str, typer.Option(help="Default: float32 of a CPU, else bfloat16.")]
Rounds = Annotated[int, typer.Option(help="Readings of each, cold and warm.")]
Output = Annotated[Path | None, typer.Option("--out", help="Write JSON here, too.")]
Plot = Annotated[Path | None, typer.Option(help="Draw to this .svg, .png or .pdf.")]


def bench(
    device: Where = "cpu",
    op: Ops = None,
    shape: Shapes = None,
    peer: Peers = None,
    provider: Provider = "",
    dtype: OneDtype = "",
    rounds: Rounds = 15,
    out: Output = None,
    plot: Plot = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Time providers beside installed peers: exit status 0 done, 1 wrong or refused, 2 bad input.

    Each is first held to a float64 oracle; who is wrong is told so and not timed.
    """
    with reporting("bench", debug):
        _check(dtype, rounds, out, plot)
        place, text = Device.parse(device), (op or (), shape or (), peer or (), provider, dtype)
        found = _measured(place, text, rounds)
        _write(found, out, plot, as_json)
    if not found.sound:
        raise typer.Exit(REFUSED)


def _check(dtype: str, rounds: int, out: Path | None, plot: Path | None) -> None:
    """Refuse what is wrong on the command line before minutes are spent."""
    if dtype and dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}")
    if rounds < 1:
        raise ValueError(f"--rounds {rounds}: expected at least 1")
    writable("--out", out)
    writable("--plot", plot)
    if plot is not None:
        from hal.bench import plot as plots

        plots.check(plot)


def _measured(
    device: Device,
    names: tuple[Sequence[str], Sequence[str], Sequence[str], str, str],
    rounds: int,
) -> Report:
    """The report; a refusal is a no, without a table."""
    from hal.bench.refusal import NotMeasured
    from hal.bench.run import Asked, measure

    try:
        with plugins_aside():
            return measure(Asked(device, *names, rounds), installed(), _say)
    except NotMeasured as refusal:
        typer.echo(f"hal bench: {refusal}", err=True)
        raise typer.Exit(REFUSED) from None


def _write(found: Report, out: Path | None, plot: Path | None, as_json: bool) -> None:
    """Print the table or JSON, and write the files that were asked for."""
    from hal.cli import bench_report

    plain = json.dumps(bench_report.data(found), indent=1)
    if out is not None:
        out.write_text(plain + "\n", encoding="utf-8")
    if plot is not None:
        from hal.bench import plot as plots

        plots.draw(found, plot)
    text = plain if as_json else "\n".join(bench_report.lines(found))
    sys.stdout.write(text + "\n")


def writable(option: str, path: Path | None) -> None:
    """Refuse a file whose folder is not there before minutes are spent."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ValueError(f"{option} {path}: its folder does not exist; make it first")


def _say(text: str) -> None:
    """What is measured now, on stderr."""
    typer.echo(f"hal bench: {text}", err=True)
