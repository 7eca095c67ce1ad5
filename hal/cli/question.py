"""A command line's options as a question to the installed plugins; imports no typer."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from hal.decision import Question
from hal.device import Device
from hal.options import Shard, Speculative
from hal.selection import Explanation, judge_only, make_options
from hal_registry import Registry, default_registry


@contextmanager
def plugins_aside() -> Iterator[None]:
    """Send to stderr what plugins print: stdout is for the answer alone."""
    stdout = sys.stdout
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stdout = stdout


def installed() -> Registry:
    """The installed plugins, whatever they print while they load."""
    with plugins_aside():
        return default_registry()


def answered(asked: Question) -> Explanation:
    """The answer by manifests alone, whatever hooks and checks print."""
    with plugins_aside():
        return judge_only(asked)


def question(
    config: str,
    device: str,
    arch: str = "",
    *,
    dtype: str | None = None,
    state_dtype: str | None = None,
    tp: int = 1,
    speculative: int | None = None,
    tree: bool = False,
    prefix_cache: bool = False,
    graphs: bool = False,
    providers: Sequence[str] | None = None,
) -> Question:
    """The options of a command line as a question to the installed plugins."""
    if tree and speculative is None:
        raise ValueError("--tree needs --speculative WIDTH")
    options = make_options(
        dtype,
        state_dtype,
        Shard(0, tp),
        None if speculative is None else Speculative(speculative, tree),
        prefix_cache,
        graphs,
        dict(map(_pair, providers or ())),
    )
    return Question(_place(device, arch), config, options, installed())


def _place(device: str, arch: str) -> Device:
    place = Device.parse(device)
    if arch and place.arch not in ("", arch):
        raise ValueError(f"--arch {arch} is not the arch of --device {device}")
    return replace(place, arch=Device.parse(f"{place.type}:{arch}").arch) if arch else place


def _pair(text: str) -> tuple[str, str]:
    target, equals, name = text.partition("=")
    if not (target and equals and name):
        raise ValueError(f"--provider {text}: expected INTERFACE=NAME, as delta_rule=cuda.triton")
    return target, name
