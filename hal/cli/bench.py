"""`hal bench`: the providers of a device beside installed peers, checked, then timed in turn."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from hal.cli.errors import REFUSED, reporting
from hal.cli.options import AsJson, Debug
from hal.cli.question import installed, plugins_aside
from hal.device import Device
from hal_registry import DTYPES

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
        if dtype and dtype not in DTYPES:
            raise ValueError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}")
        if rounds < 1:
            raise ValueError(f"--rounds {rounds}: expected at least 1")
        writable("--out", out)
        if plot is not None:
            from hal.bench import plot as plots

            writable("--plot", plot)
            plots.check(plot)
        from hal.bench.refusal import NotMeasured
        from hal.bench.run import Asked, measure

        asked = Asked(
            Device.parse(device), op or (), shape or (), peer or (), provider, dtype, rounds
        )
        try:
            with plugins_aside():
                found = measure(asked, installed(), _say)
        except NotMeasured as refusal:
            typer.echo(f"hal bench: {refusal}", err=True)
            raise typer.Exit(REFUSED) from None
        from hal.cli import bench_report as report

        plain = json.dumps(report.data(found), indent=1)
        if out is not None:
            out.write_text(plain + "\n", encoding="utf-8")
        if plot is not None:
            plots.draw(found, plot)
        sys.stdout.write((plain if as_json else "\n".join(report.lines(found))) + "\n")
    if not found.sound:
        raise typer.Exit(REFUSED)


def writable(option: str, path: Path | None) -> None:
    """Refuse a file whose folder is not there before minutes are spent."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ValueError(f"{option} {path}: its folder does not exist; make it first")


def _say(text: str) -> None:
    """What is measured now, on stderr."""
    typer.echo(f"hal bench: {text}", err=True)
