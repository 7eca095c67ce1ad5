"""`hal check` without its parser: typer and what it imports cost more than the whole answer.

Admission and CI call `check` often. Only command lines that are plainly right are taken here; help,
errors and all else are left to typer, and a test holds the two against each other.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from hal.cli.errors import BAD_INPUT, REFUSED, line
from hal.cli.question import answered, question
from hal.decision import Question

TEXTS: Final = {
    "--device": "device",
    "-d": "device",
    "--arch": "arch",
    "--dtype": "dtype",
    "--state-dtype": "state_dtype",
}
NUMBERS: Final = {"--tp": "tp", "--speculative": "speculative"}
FLAGS: Final = {
    "--tree": "tree",
    "--prefix-cache": "prefix_cache",
    "--graphs": "graphs",
    "--json": "as_json",
}
REPEATED: Final = {"--provider": "providers"}


def show(asked: Question, as_json: bool) -> int:
    """Print the answer and give the exit status."""
    answer = answered(asked)
    text = json.dumps(answer.to_dict(), indent=1) if as_json else str(answer)
    sys.stdout.write(text + "\n")
    return 0 if answer.fits else REFUSED


def check(arguments: Sequence[str]) -> int | None:
    """Answer and give the exit status, or None where the parser has to look."""
    options = parse(arguments)
    if options is None:
        return None
    as_json = bool(options.pop("as_json", False))
    try:
        return show(question(**options), as_json)
    except BrokenPipeError:
        raise
    except Exception as error:
        sys.stderr.write(f"hal check: {line(error)}\n")
        return BAD_INPUT


def parse(arguments: Sequence[str]) -> dict[str, Any] | None:
    """The options by name, or None unless every argument is one that is known and complete."""
    options: dict[str, Any] = {}
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if word in FLAGS:
            options[FLAGS[word]] = True
        elif not word.startswith("-") and "config" not in options:
            options["config"] = word
        elif name in _VALUED and (equals == "" or name.startswith("--")):
            if not _take(options, name, value if equals else next(words, "")):
                return None
        else:
            return None
    return options if {"config", "device"} <= options.keys() else None


_VALUED: Final[Mapping[str, str]] = {**TEXTS, **NUMBERS, **REPEATED}


def _take(options: dict[str, Any], name: str, value: str) -> bool:
    """Set an option; False where its value is not plainly one."""
    if not value or (name in NUMBERS and not (value.isdecimal() and len(value) < 10)):
        return False
    if name in REPEATED:
        options.setdefault(REPEATED[name], []).append(value)
    else:
        options[_VALUED[name]] = int(value) if name in NUMBERS else value
    return True
