"""Runs engines in processes of their own, one after the other, in the environment at hand."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hal.errors import HalError
from hal.integrations.verify.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hal.integrations.verify.prompts import Questions
    from hal.integrations.verify.record import Setup

WORKER: Final = "hal.integrations.verify.worker"
PLUGIN: Final = "hal"
SERVED: Final = re.compile(r"\bhal: (\d+ .*? are served by .*)")
"""The line with which the plugin of an engine says who serves which layers."""
ERROR: Final = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Unsupported): .*", re.MULTILINE)
OWN: Final = re.compile(r"\bhal\.(?:\w+\.)*(?:Unsupported|\w+Error): .*")
"""What `hal` says in any process of an engine; the one that was asked may say something else."""
TAIL: Final = 4000
"""Characters of an engine's output that are kept of one that stopped."""

GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "vllm": ("vllm.general_plugins", "vllm.platform_plugins"),
    "sglang": ("sglang.srt.plugins",),
}
FILTERS: Final = {"vllm": "VLLM_PLUGINS", "sglang": "SGLANG_PLUGINS"}
DEFAULTS: Final[Mapping[str, Mapping[str, str]]] = {
    "vllm": {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    "sglang": {"SGLANG_USE_CPU_ENGINE": "1"},
}
"""Environment of a small run, unless it is set already; SGLang's is for the CPU alone."""


class EngineStopped(HalError):
    """An engine that did not start or did not answer; `log` is the end of its output."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log[-TAIL:]


class EngineMissing(HalError, ValueError):
    """An engine that this environment does not have."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Which engine, without the plugin of `hal` if `stock`, and how long each run may take.

    `stateful`: the model has layers that `hal` would serve, so a plugin that says nothing of them
    did not load. vLLM logs that and goes on.
    """

    engine: str
    stock: bool
    timeout: float
    say: Callable[[str], None]
    stateful: bool = True


def check(
    launch: Launch, whole: Setup, again: Setup, asked: Questions
) -> tuple[Record, Record | str]:
    """Both records, or why there is no resumed one; `EngineStopped` without the fresh one.

    Prefixes are cached only where a chunk holds a whole block of the engine's cache.
    """
    if importlib.util.find_spec(launch.engine) is None:
        raise EngineMissing(
            f"{launch.engine} is not installed here; run hal verify in the environment that has it"
        )
    first = _record(launch, whole, asked)
    chunk, block = max(again.chunks), first.facts.block
    fits = block <= chunk
    try:
        second = _record(launch, replace(again, prefix=again.prefix and fits), asked)
    except EngineStopped as error:
        return first, str(error).partition("\n")[0]
    if again.prefix and not fits:
        why = f"a block of the cache holds {block} tokens: give --chunk {block} or more"
        second = replace(second, facts=replace(second.facts, no_prefix=why))
    return first, second


def _record(launch: Launch, setup: Setup, asked: Questions) -> Record:
    """One run of the worker."""
    fed = f"in chunks of {max(setup.chunks)}" if setup.chunks else "whole"
    launch.say(f"{launch.engine} starts, prompts are fed {fed}")
    with tempfile.TemporaryDirectory(prefix="hal-verify-") as name:
        where = Path(name)
        job = {
            "engine": launch.engine,
            "setup": asdict(setup),
            "prompts": asked.prompts,
            "new_tokens": asked.new_tokens,
        }
        (where / "job").write_text(json.dumps(job), encoding="utf-8")
        _run(launch, setup, where)
        log = (where / "log").read_text(encoding="utf-8", errors="replace")
        result = where / "result"
        if not result.exists():
            raise EngineStopped(f"{launch.engine} ended, {last_error(log)}", log)
        return _read(launch, json.loads(result.read_text(encoding="utf-8")), log)


def last_error(log: str) -> str:
    """The last error in the output of an engine and its processes; `hal`'s own before others."""
    found = OWN.findall(log) or ERROR.findall(log)
    return f"its last error is {found[-1].strip()}" if found else "without a word"


def _read(launch: Launch, result: Mapping[str, Any], log: str) -> Record:
    if "error" in result:
        if OWN.search(log) and not result["error"].startswith("hal."):
            raise EngineStopped(f"{launch.engine} ended, {last_error(log)}", log)
        refused = result["error"] in ("hal.refusal.Unsupported", "hal.Unsupported")
        named = "" if refused else f"{launch.engine} stopped with {result['error']}: "
        first = str(result["message"]).strip() or "no message"
        raise EngineStopped(f"{named}{first if refused else first.splitlines()[0]}", log)
    found = Record.from_json(result["record"])
    return replace(found, facts=replace(found.facts, served_by=tuple(served_by(launch, log))))


def served_by(launch: Launch, log: str) -> Iterator[str]:
    """Who served the linear layers: the plugin's lines, else the engine itself."""
    found = dict.fromkeys(match.strip() for match in SERVED.findall(log))
    if not found:
        if launch.stateful and not launch.stock and PLUGIN in plugins(launch.engine):
            raise EngineStopped(
                f"{launch.engine} ran without hal: its plugin is installed and serves no layer, "
                f"{last_error(log)}; mend it, or check the engine alone with --stock",
                log,
            )
        yield f"{launch.engine} alone: no provider of hal served it"
    yield from (f"hal: {line}" for line in found)


def _run(launch: Launch, setup: Setup, where: Path) -> None:
    """Run the worker to its end; it and its children end with us, whatever ends us."""
    command = [sys.executable, "-m", WORKER, str(where / "job"), str(where / "result")]
    with (where / "log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command,
            env=environment(launch, setup),
            stdin=subprocess.PIPE,  # closed by our end, whatever ends us
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(launch.timeout)
        except subprocess.TimeoutExpired as error:
            raise EngineStopped(
                f"{launch.engine} did not end within {launch.timeout:g} s; give a larger --timeout"
            ) from error
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the worker's process group, its engine's helpers too."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def environment(launch: Launch, setup: Setup) -> dict[str, str]:
    """The environment of the worker; without `hal` where the stock engine is asked for."""
    defaults = DEFAULTS[launch.engine]
    if launch.engine == "sglang" and setup.device != "cpu":
        defaults = {}
    filtered = {FILTERS[launch.engine]: others(launch.engine)} if launch.stock else {}
    return {**defaults, **os.environ, **filtered}


def others(engine: str) -> str:
    """The plugins of an engine but that of `hal`, as its filter takes them.

    None is a comma, since SGLang takes an empty filter for no filter.
    """
    return ",".join(sorted(plugins(engine) - {PLUGIN})) or ","


def plugins(engine: str) -> set[str]:
    """The names of an engine's installed plugins."""
    return {entry.name for group in GROUPS[engine] for entry in entry_points(group=group)}
