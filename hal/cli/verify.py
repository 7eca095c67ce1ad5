"""`hal verify`: does an engine serve a model as its own prefill says? A self-check, no oracle."""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from hal.cli.errors import REFUSED, reporting
from hal.cli.options import AsJson, Debug
from hal.cli.question import plugins_aside
from hal.errors import HalError

if TYPE_CHECKING:
    from hal.integrations.verify.judge import Judgement
    from hal.integrations.verify.prompts import Questions, Subject
    from hal.integrations.verify.record import Record, Setup

ENGINES: Final = ("transformers", "vllm", "sglang")
DTYPES: Final = ("float32", "bfloat16", "float16")
SMALL_CHUNK: Final = 2
"""Also fed by the transformers runner: chunks shorter than a conv's window."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line asks for."""

    folder: Path
    engine: str
    device: str
    dtype: str | None
    stock: bool
    new_tokens: int
    chunk: int
    max_batch: int
    threshold: float | None
    seed: int
    timeout: float
    options: dict[str, Any]


def verify(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of a Hugging Face model (safetensors).")
    ],
    engine: Annotated[str, typer.Option(help=f"One of {', '.join(ENGINES)}.")],
    device: Annotated[
        str, typer.Option("--device", "-d", help="Of transformers and sglang; vllm knows its own.")
    ] = "cpu",
    dtype: Annotated[str | None, typer.Option(help="Default: the config's.")] = None,
    stock: Annotated[
        bool, typer.Option("--stock", help="Run vllm or sglang without the plugin of hal.")
    ] = False,
    new_tokens: Annotated[int, typer.Option(help="New tokens of each prompt.")] = 8,
    chunk: Annotated[int, typer.Option(help="Tokens of a prompt fed at once to resume it.")] = 64,
    max_batch: Annotated[int, typer.Option(help="Prompts served at once.")] = 4,
    threshold: Annotated[
        float | None,
        typer.Option(help="Gap in nats that is allowed. Default: 0.001 in float32, else 0.2."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the prompts, which are random token ids.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds that one run of an engine may take.")] = (
        1800.0
    ),
    engine_option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=JSON", help="An option of vllm's or sglang's; repeat for more."),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Check that an engine serves a model consistently: exit status 0 yes, 1 no, 2 bad input.

    Decode is held against re-prefill, a batch against prompts served alone, and chunks and
    cached prefixes against prompts fed whole.
    """
    with reporting("verify", debug):
        settings = Settings(
            folder,
            engine,
            device,
            dtype,
            stock,
            new_tokens,
            chunk,
            max_batch,
            threshold,
            seed,
            timeout,
            _options(engine_option or []),
        )
        status = _ended(settings, as_json, debug)
    if status:
        raise typer.Exit(status)


def _ended(settings: Settings, as_json: bool, debug: bool) -> int:
    """Run, show and give the exit status; a refusal is a no, without a table."""
    _check(settings)
    try:
        with plugins_aside():
            found = _judged(settings)
    except HalError as error:
        if isinstance(error, ValueError):
            raise
        if debug:
            _trace(error)
        _say(str(error))
        return REFUSED
    from hal.cli import verify_report

    text = json.dumps(verify_report.data(found), indent=1) if as_json else None
    sys.stdout.write((text or "\n".join(verify_report.lines(found))) + "\n")
    return 0 if found.passed else REFUSED


def _trace(error: HalError) -> None:
    """What an engine printed before it stopped, and the traceback."""
    from hal.integrations.verify.launch import EngineStopped

    if isinstance(error, EngineStopped):
        typer.echo(error.log, err=True)
    traceback.print_exception(error)


def _check(settings: Settings) -> None:
    """Refuse what asks for nothing, or for an engine that is not there."""
    if settings.engine not in ENGINES:
        raise ValueError(f"--engine is {settings.engine!r}, expected one of {', '.join(ENGINES)}")
    if settings.dtype is not None and settings.dtype not in DTYPES:
        raise ValueError(f"--dtype is {settings.dtype!r}, expected one of {', '.join(DTYPES)}")
    for name, least in (("new_tokens", 1), ("chunk", 2), ("max_batch", 2), ("seed", 0)):
        if (value := getattr(settings, name)) < least:
            raise ValueError(f"--{name.replace('_', '-')} is {value}, expected at least {least}")
    for name in ("threshold", "timeout"):
        value = getattr(settings, name)
        if value is not None and not value > 0:
            raise ValueError(f"--{name} is {value:g}, expected more than 0")
    if settings.engine == "transformers" and (settings.stock or settings.options):
        raise ValueError("--stock and --engine-option are for vllm and sglang alone")


def _options(given: list[str]) -> dict[str, Any]:
    """Options of an engine; a value that is not JSON is text."""
    return dict(map(_option, given))


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals):
        raise ValueError(f"--engine-option {text}: expected NAME=JSON, as block_size=32")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _judged(settings: Settings) -> Judgement:
    from hal.integrations.verify.judge import judge
    from hal.integrations.verify.prompts import draw, subject_of, usable_ids

    subject = subject_of(settings.folder)
    usable = usable_ids(settings.folder, subject.vocab_size)
    asked = draw(subject, usable, settings.chunk, settings.new_tokens, settings.seed)
    whole, again = _records(settings, asked, subject)
    lengths = [len(prompt) for prompt in asked.prompts]
    return judge(subject.model_type, lengths, whole, again, settings.threshold)


def _records(settings: Settings, asked: Questions, subject: Subject) -> tuple[Record, Record | str]:
    whole, again = _setups(settings, asked.longest, subject.vocab_size)
    if settings.engine == "transformers":
        from hal.integrations.verify import by_transformers

        return by_transformers.check(whole, again, asked)
    from hal.integrations.verify import launch

    how = launch.Launch(settings.engine, settings.stock, settings.timeout, _say, subject.stateful)
    return launch.check(how, whole, again, asked)


def _setups(settings: Settings, longest: int, vocab_size: int) -> tuple[Setup, Setup]:
    """The engine that feeds prompts whole, and the one that cuts them and caches prefixes."""
    from hal.integrations.verify.record import Setup

    whole = Setup(
        str(settings.folder.absolute()),
        settings.device,
        settings.dtype,
        settings.max_batch,
        longest + 1,  # a re-prefill gets one token more
        vocab_size,
        options=settings.options,
    )
    small = (SMALL_CHUNK,) if settings.engine == "transformers" else ()
    chunks = tuple(dict.fromkeys((*small, settings.chunk)))
    return whole, replace(whole, chunks=chunks, prefix=True)


def _say(text: str) -> None:
    typer.echo(f"hal verify: {text}", err=True)
