"""The command line `hal`: one module a command, imported only when that command runs."""

import importlib
import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import typer

COMMANDS: Final[Mapping[str, str]] = {
    "check": "Say whether a model runs on a device.",
    "explain": "Show all candidates, their proofs, and the states.",
    "matrix": "Show which families run on which devices.",
    "plan": "Plan memory, requests that fit, and decode speed.",
    "doctor": "Show plugins, versions, faults and clashes.",
    "generate": "Generate text with real weights.",
    "verify": "Check that an engine serves a model consistently.",
    "bench": "Time providers beside installed peers.",
    "tune": "Make a table of block sizes for a card.",
    "new-provider": "Write a provider's distribution.",
}
"""Commands with their short help; the function of a command has the name of its module."""


def main() -> None:
    """Run the command that the arguments name, and exit with its status."""
    from hal.cli.ending import ended

    sys.exit(ended(partial(_run, sys.argv[1:])))


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["check"]:
        from hal.cli import quick

        if (status := quick.check(arguments[1:])) is not None:
            return status
    wanted = next((word for word in arguments if not word.startswith("-")), "")
    _app(wanted)(arguments, prog_name="hal")
    return 0


def _app(wanted: str) -> "typer.Typer":
    """The commands, of which only `wanted` is imported; the others are there for the help."""
    import typer

    app = typer.Typer(
        name="hal",
        help="The hardware layer under engines that serve hybrid linear-attention models.",
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    for name, text in COMMANDS.items():
        if name == wanted:
            app.command(name)(_load(name))
        else:
            app.command(name, help=text)(_listed)
    return app


def _load(name: str) -> Any:
    from hal.cli.errors import reporting

    with reporting(name):
        word = name.replace("-", "_")
        return getattr(importlib.import_module(f"hal.cli.{word}"), word)


def _listed() -> None:
    """Stand for a command that is not the one that runs."""
