"""Prompts under way in `hal generate`: how they are run, shown and interrupted."""

from __future__ import annotations

import json
import signal
import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

import typer

from hal.cli.output import aligned
from hal.runtime.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import Progress

    from hal.integrations.transformers import Engine, Folder
    from hal.integrations.transformers.prompts import Prompt, Tokenizer
    from hal.runtime.plan import Event


@dataclass(slots=True)
class Output:
    """A prompt with what came of it."""

    prompt: Prompt
    prompt_ids: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    reason: FinishReason | None = None


@dataclass(slots=True)
class Job:
    """Prompts under way: the engine, the outputs in input order, and how they are shown."""

    max_new_tokens: int
    folder: Folder
    tokenizer: Tokenizer | None
    engine: Engine
    outputs: list[Output]
    began: float = field(default_factory=perf_counter)

    def text(self, output: Output) -> str | None:
        """An output's text, None without a tokenizer."""
        if self.tokenizer is None:
            return None
        return self.tokenizer.decode(output.ids, skip_special_tokens=True)

    def record(self, index: int) -> dict[str, object]:
        """What `--json` prints of a prompt."""
        output = self.outputs[index]
        return {
            "index": index,
            "prompt": output.prompt.text,
            "prompt_ids": list(output.prompt_ids),
            "ids": output.ids,
            "text": self.text(output),
            "finish_reason": output.reason,
            "timings": self.engine.clocks[index].timings(),
            **self._spared(index),
        }

    def statistics(self) -> dict[str, dict[str, object]]:
        """What speculation, the prefix cache and graphs did; empty where none was asked for."""
        drafts, prefixes = self.engine.drafts, self.engine.prefixes
        found: dict[str, dict[str, object]] = {}
        if drafts is not None:
            found["speculation"] = asdict(drafts)
        if prefixes is not None:
            found["prefix_cache"] = asdict(prefixes)
        if (decodes := self.engine.runner.decodes) is not None:
            found["graphs"] = {"recorded": decodes.sizes, "replayed": decodes.replays}
        return found

    def _spared(self, index: int) -> dict[str, int]:
        """A prompt's own part of the statistics."""
        counts = asdict(self.engine.scheduler.counts[index])
        names = () if self.engine.prefixes is None else ("saved",)
        drafts = () if self.engine.drafts is None else ("drafted", "accepted")
        return {name: counts[name] for name in (*names, *drafts)}

    def report(self) -> None:
        """Speed, statistics and providers, on stderr."""
        seconds = perf_counter() - self.began
        new = sum(len(output.ids) for output in self.outputs)
        fed = sum(len(output.prompt_ids) for output in self.outputs)
        speed = new / max(seconds, 1e-9)
        prompts = "1 prompt" if len(self.outputs) == 1 else f"{len(self.outputs)} prompts"
        typer.echo(
            f"{prompts}, {fed} prompt tokens, {new} new tokens in {seconds:.2f} s "
            f"({speed:.1f} new tokens/s)",
            err=True,
        )
        for line in aligned(list(self._table()), indent=2):
            typer.echo(line, err=True)
        typer.echo(self.folder.selection.explain(), err=True)

    def _table(self) -> Iterator[tuple[str, ...]]:
        """What was spared, a row a figure."""
        drafts, prefixes = self.engine.drafts, self.engine.prefixes
        if drafts is not None:
            rate = _share(drafts.accepted, drafts.drafted)
            mean = drafts.accepted / max(drafts.steps, 1)
            yield "speculation", "verify steps", str(drafts.steps)
            yield "", "accepted drafts", f"{drafts.accepted} of {drafts.drafted} ({rate})"
            yield "", "accepted drafts a step", f"{mean:.2f}"
        if prefixes is not None:
            fed = sum(len(output.prompt_ids) for output in self.outputs)
            yield "prefix cache", "hits", f"{prefixes.hits} of {prefixes.admitted} prompts"
            saved = f"{prefixes.saved} of {fed} ({_share(prefixes.saved, fed)})"
            yield "", "prompt tokens saved", saved
            yield "", "states stored", str(prefixes.stored)
            yield "", "states evicted", str(prefixes.evicted)
        if (decodes := self.engine.runner.decodes) is not None:
            yield "graphs", "decodes recorded", ", ".join(map(str, decodes.sizes)) or "none"
            yield "", "decodes replayed", str(decodes.replays)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.0f} %"


@dataclass(slots=True)
class Flag:
    """Whether an interrupt came in."""

    raised: bool = False


@contextmanager
def noted_interrupt() -> Iterator[Flag]:
    """Note the first Ctrl-C, so that the step under way ends whole; a second one acts at once."""
    flag = Flag()
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: object) -> None:
        flag.raised = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)


def serve(job: Job, as_json: bool) -> bool:
    """Run all prompts and show them on stdout; whether an interrupt ended it early."""
    for output in job.outputs:
        job.engine.submit(output.prompt_ids, job.max_new_tokens)
    with noted_interrupt() as flag:
        events = _events(job, flag)
        if as_json:
            _show_json(job, _with_bar(job, events))
        elif len(job.outputs) == 1:
            _show_stream(job, events)
        else:
            _show_texts(job, _with_bar(job, events))
    return flag.raised


def _events(job: Job, flag: Flag) -> Iterator[Event]:
    """The engine's events, booked; after an interrupt or an error the slots are free again."""
    try:
        while not flag.raised and (events := job.engine.step()) is not None:
            yield from [_book(job, event) for event in events]
    finally:
        cancelled = [_book(job, event) for event in job.engine.cancel()]
    yield from cancelled


def _book(job: Job, event: Event) -> Event:
    output = job.outputs[event.request]
    if event.token is not None:
        output.ids.append(event.token)
    output.reason = event.reason
    return event


def _show_json(job: Job, events: Iterator[Event]) -> None:
    """One object a prompt, in input order, each as soon as those before it are out."""
    out = 0
    for _ in events:
        while out < len(job.outputs) and job.outputs[out].reason is not None:
            _write(json.dumps(job.record(out), ensure_ascii=False) + "\n")
            out += 1
    if statistics := job.statistics():
        _write(json.dumps({"statistics": statistics}) + "\n")


def _show_stream(job: Job, events: Iterator[Event]) -> None:
    """The tokens of one prompt as they come."""
    from hal.integrations.transformers.prompts import TextStream

    stream = None if job.tokenizer is None else TextStream(job.tokenizer)
    for event in events:
        if event.token is not None:
            _write(f"{event.token} " if stream is None else stream.push(event.token))
    _write("\n" if stream is None else stream.end() + "\n")


def _show_texts(job: Job, events: Iterator[Event]) -> None:
    """Each prompt as it ends, under its number."""
    for event in events:
        if event.reason is not None:
            output = job.outputs[event.request]
            text = job.text(output)
            shown = " ".join(map(str, output.ids)) if text is None else text
            _write(f"[{event.request}] {output.reason}: {shown}\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _with_bar(job: Job, events: Iterator[Event]) -> Iterator[Event]:
    """Pass the events on, counting tokens on stderr where that is a terminal."""
    if not _is_terminal():
        yield from events
        return
    with _bar() as bar:
        task = bar.add_task("tokens", total=len(job.outputs) * job.max_new_tokens)
        for event in events:
            # A prompt that ends early has no more to come.
            left = job.max_new_tokens - len(job.outputs[event.request].ids)
            steps = (event.token is not None) + (left if event.reason is not None else 0)
            bar.advance(task, steps)
            yield event


def _is_terminal() -> bool:
    return sys.stderr.isatty()


def _bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    return Progress(
        "tokens",
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
    )
