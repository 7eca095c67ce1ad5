"""`hal generate`: real weights through the selected providers, several prompts at once."""

from __future__ import annotations

import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from hal.cli.ending import INTERRUPTED
from hal.cli.errors import REFUSED, reporting
from hal.cli.generate_job import Job, Output, serve
from hal.cli.question import plugins_aside
from hal.errors import HalError
from hal.refusal import Unsupported
from hal.runtime.request import FinishReason, RequestError, check_request
from hal_registry import Code

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hal.integrations.transformers import Folder
    from hal.integrations.transformers.prompts import Prompt

NO_PLUGIN: Final = frozenset(
    {
        Code.API_MISMATCH,
        Code.DEVICE_ABSENT,
        Code.NAME_CONFLICT,
        Code.PLUGIN_BLOCKED,
        Code.PLUGIN_BROKEN,
    }
)
"""Reasons that say nothing of the model: its headline and the fix are the whole story."""

COUNTS: Final = (
    "max_batch",
    "token_budget",
    "max_new_tokens",
    "max_len",
    "threads",
    "prefix_slots",
)
"""Settings that have to be at least 1 where they are given."""


CACHED: Final = 16
"""How many states a prefix cache keeps by default."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line asks for beside the prompts."""

    folder: Path
    device: str
    dtype: str | None
    max_batch: int
    token_budget: int
    max_new_tokens: int
    max_len: int | None
    threads: int | None
    speculative: int | None
    prefix_cache: bool
    prefix_slots: int | None
    graphs: bool
    as_json: bool


def generate(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of a Hugging Face model (safetensors).")
    ],
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", help="A prompt; repeat for more.")
    ] = None,
    ids: Annotated[
        list[str] | None, typer.Option("--ids", help='Token ids, as "1 2 3"; repeat for more.')
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help='A prompt a line, or JSON lines with "prompt" or "ids".'),
    ] = None,
    device: Annotated[str, typer.Option("--device", "-d", help='As "cpu" or "cuda:0".')] = "cpu",
    dtype: Annotated[str | None, typer.Option(help="Default: the config's.")] = None,
    max_batch: Annotated[int, typer.Option(help="Prompts served at once.")] = 8,
    token_budget: Annotated[int, typer.Option(help="Tokens a step takes at most.")] = 512,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens a prompt gets at most.")] = 64,
    max_len: Annotated[
        int | None,
        typer.Option(help="Tokens of prompt and output together. Default: the model's bound."),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    speculative: Annotated[
        int | None,
        typer.Option(help="Tokens a row verifies at once: the newest one, and drafts behind it."),
    ] = None,
    prefix_cache: Annotated[
        bool, typer.Option("--prefix-cache", help="Start from states that earlier prompts left.")
    ] = False,
    prefix_slots: Annotated[
        int | None,
        typer.Option(
            help=f"States that --prefix-cache keeps beside those that run. Default: {CACHED}."
        ),
    ] = None,
    graphs: Annotated[
        bool, typer.Option("--graphs", help="Record a decode once for each size, then replay it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a prompt.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Generate text greedily with continuous batching, and say who computed it.

    Results go to stdout, all else to stderr.
    Prompts are numbered from 0: first those of --prompt, then --ids, then --prompts.
    """
    settings = Settings(
        folder,
        device,
        dtype,
        max_batch,
        token_budget,
        max_new_tokens,
        max_len,
        threads,
        speculative,
        prefix_cache,
        prefix_slots,
        graphs,
        as_json,
    )
    with reporting("generate", debug), _ending(debug):
        status = _run(settings, prompt or [], ids or [], prompts)
    if status:
        raise typer.Exit(status)


@contextmanager
def _ending(debug: bool) -> Iterator[None]:
    """Turn a refusal or an interrupt into an exit status."""
    try:
        yield
    except KeyboardInterrupt as error:
        _say("interrupted")
        raise typer.Exit(INTERRUPTED) from error
    except HalError as error:
        if isinstance(error, ValueError):
            raise
        if debug:
            traceback.print_exc()
        _say(_refusal(error) if isinstance(error, Unsupported) else " ".join(str(error).split()))
        raise typer.Exit(REFUSED) from error


def _refusal(error: Unsupported) -> str:
    """The whole text and its notes, or one line where only the plugin is at fault."""
    if {reason.code for reason in error.reasons} <= NO_PLUGIN:
        return f"{error.refusal.headline()}; fix: {error.refusal.fix()}"
    return "\n".join((str(error), *vars(error).get("__notes__", ())))


def _say(text: str) -> None:
    typer.echo(f"hal generate: {text}", err=True)


def _run(settings: Settings, texts: list[str], ids: list[str], file: Path | None) -> int:
    _check(settings)
    given = list(_given(texts, ids, file))
    if not given:
        raise RequestError("there is no prompt; give --prompt, --ids or --prompts")
    with plugins_aside():
        job = _prepare(settings, given)
    interrupted = serve(job, settings.as_json)
    job.report()
    if interrupted:
        done = sum(o.reason is not FinishReason.CANCELLED for o in job.outputs)
        _say(f"interrupted, {done} of {len(job.outputs)} prompts had ended")
    return INTERRUPTED if interrupted else 0


def _check(settings: Settings) -> None:
    """Refuse numbers that ask for nothing."""
    for name in COUNTS:
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise RequestError(f"--{name.replace('_', '-')} is {value}, expected at least 1")
    if settings.speculative is not None and settings.speculative < 2:
        raise RequestError(
            f"--speculative is {settings.speculative}, expected at least 2: a token and its draft"
        )
    if settings.prefix_slots is not None and not settings.prefix_cache:
        raise RequestError(
            f"--prefix-slots is {settings.prefix_slots}, but nothing is cached; add --prefix-cache"
        )


def _given(texts: list[str], ids: list[str], file: Path | None) -> Iterator[Prompt]:
    from hal.integrations.transformers.prompts import Prompt, parse_ids, read_prompts

    for number, text in enumerate(texts, 1):
        yield Prompt(text, None, f"--prompt {number}")
    for number, text in enumerate(ids, 1):
        yield parse_ids(text, f"--ids {number}")
    if file is not None:
        yield from read_prompts(file)


def _prepare(settings: Settings, given: list[Prompt]) -> Job:
    """Decide, encode and check every prompt, and only then load the weights."""
    _quiet(settings.threads)
    from hal.integrations.transformers import Engine, load, open_folder
    from hal.integrations.transformers.prompts import encode, load_tokenizer

    folder = open_folder(
        settings.folder,
        settings.device,
        settings.dtype,
        speculative=settings.speculative,
        prefix_cache=settings.prefix_cache,
        graphs=settings.graphs,
    )
    _check_graphs(settings, folder)
    tokenizer = load_tokenizer(settings.folder, any(p.ids is None for p in given))
    outputs = [Output(prompt, encode(prompt, tokenizer)) for prompt in given]
    max_len = _max_len(settings, folder, outputs)
    rows = min(settings.max_batch, len(outputs))
    runner = load(
        folder,
        slots=rows + _cached(settings, outputs),
        max_batch=rows,
        max_tokens=settings.token_budget,
        max_len=max_len,
    )
    engine = Engine(
        runner,
        max_batch=rows,
        token_budget=settings.token_budget,
        stop=folder.stop_ids(),
    )
    return Job(settings.max_new_tokens, folder, tokenizer, engine, outputs)


def _check_graphs(settings: Settings, folder: Folder) -> None:
    """A whole decode can be recorded where the device records what torch launches."""
    device = folder.selection.device
    if settings.graphs and device.torch_name.partition(":")[0] != "cuda":
        raise RequestError(
            f"--graphs needs a device that records whole decodes, {device} does not; leave it out"
        )


def _cached(settings: Settings, outputs: list[Output]) -> int:
    """How many cached states to make room for: no prompt leaves more of them than it has tokens."""
    if not settings.prefix_cache:
        return 0
    asked = CACHED if settings.prefix_slots is None else settings.prefix_slots
    return min(asked, sum(len(output.prompt_ids) for output in outputs))


def _max_len(settings: Settings, folder: Folder, outputs: list[Output]) -> int:
    """The bound of a sequence; prompts beyond it, or beyond the vocabulary, are refused by name."""
    from hal.integrations.transformers.engine import check_ids

    longest = max(len(output.prompt_ids) for output in outputs) + settings.max_new_tokens
    bounds = [n for n in (settings.max_len, folder.max_positions) if n is not None]
    max_len = min(bounds, default=longest)
    for output in outputs:
        try:
            check_ids(output.prompt_ids, folder.vocab_size)
            check_request(len(output.prompt_ids), settings.max_new_tokens, max_len)
        except RequestError as error:
            raise RequestError(f"{output.prompt.origin}: {error}") from error
    return min(max_len, longest) if settings.graphs else max_len  # whose memory is all of it


def _quiet(threads: int | None) -> None:
    """Keep transformers' own bars and reports off stderr: what they warn of is an error here."""
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(threads)
