"""How the command line ends: a reader that left and Ctrl-C have statuses, and no traceback."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from hal.cli.errors import BAD_INPUT

INTERRUPTED: Final = 130
"""Exit status after Ctrl-C, as shells have it."""
BROKEN_PIPE: Final = 141
"""Exit status where the reader of stdout left, as shells have it."""


def ended(run: Callable[[], int]) -> int:
    """Run a command until its output is written, and give the exit status."""
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")
    if sys.stdout is None:
        return _unwritten("it is closed")
    try:
        status = _status(run)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        # Nothing may be written any more, not even by the flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE if isinstance(error, BrokenPipeError) else _unwritten(str(error))
    return status


def _status(run: Callable[[], int]) -> int:
    """The status of a command; typer hides a broken pipe behind an exit of its own."""
    try:
        return run()
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):
            raise end.__context__ from None
        return end.code if isinstance(end.code, int) else BAD_INPUT


def _unwritten(why: str) -> int:
    sys.stderr.write(f"hal: stdout cannot be written: {why}\n")
    return BAD_INPUT
