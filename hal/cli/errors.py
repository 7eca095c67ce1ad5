"""Bad input becomes one line on stderr and exit status 2, without a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

REFUSED: Final = 1
"""Exit status where the answer is no."""
BAD_INPUT: Final = 2

EXTRAS: Final = {
    "torch": "cpu",
    "transformers": "hf",
    "safetensors": "hf",
    "tokenizers": "hf",
    "matplotlib": "bench",
}
"""The extra of hybrid-hal that brings a library."""


@contextmanager
def reporting(command: str, debug: bool = False) -> Iterator[None]:
    """Report what goes wrong as `hal COMMAND: what and fix` and end the command."""
    import typer

    try:
        yield
    except (typer.Exit, BrokenPipeError):
        raise
    except Exception as error:
        if debug:
            import traceback

            traceback.print_exc()
        typer.echo(f"hal {command}: {line(error)}", err=True)
        raise typer.Exit(BAD_INPUT) from error


def line(error: Exception) -> str:
    """An error on one line, with the fix where it is known."""
    text = " ".join(str(error).split())
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        extra = EXTRAS[error.name]
        return f"{error.name} is not installed; install hybrid-hal with its extra [{extra}]"
    if isinstance(error, (ValueError, OSError)):
        return text
    return f"{type(error).__name__}: {text}; run with --debug for the traceback"
