"""Runs one program on one engine in a process of its own: `python -m … JOB.json RESULT.json`.

The result holds the record, or the error that the engine stopped with.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Final

from hal.integrations.verify.programs import fresh, resumed
from hal.integrations.verify.prompts import Questions
from hal.integrations.verify.record import Setup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hal.integrations.verify.record import Record, Served


def _vllm(setup: Setup) -> Served:
    from hal.integrations.verify.by_vllm import VllmServed

    return VllmServed(setup)


def _sglang(setup: Setup) -> Served:
    from hal.integrations.verify.by_sglang import SglangServed

    return SglangServed(setup)


ENGINES: Final[Mapping[str, Callable[[Setup], Served]]] = {"vllm": _vllm, "sglang": _sglang}


def run(job: Mapping[str, Any], engines: Mapping[str, Callable[[Setup], Served]]) -> Record:
    """Open the job's engine and run its program: `resumed` where it has chunks, else `fresh`."""
    setup = Setup(**{**job["setup"], "chunks": tuple(job["setup"]["chunks"])})
    asked = Questions(tuple(map(tuple, job["prompts"])), job["new_tokens"])
    served = engines[job["engine"]](setup)
    return resumed(served, asked, setup.chunks) if setup.chunks else fresh(served, asked)


def main(job_file: str, result_file: str) -> None:
    """Run the job and write its result, errors included."""
    result: dict[str, Any]
    try:
        job = json.loads(Path(job_file).read_text(encoding="utf-8"))
        result = {"record": run(job, ENGINES).to_json()}
    except BaseException as error:  # whatever stopped the engine is the result
        text = "".join(traceback.format_exception(error))
        named = f"{type(error).__module__}.{type(error).__qualname__}"
        result = {"error": named, "message": str(error), "text": text}
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


def end_with_starter() -> None:
    """End this process and its engine's helpers once the one that started it is gone.

    However that one ends, its side of our standard input closes.
    """
    Thread(target=_end_after_input, daemon=True).start()


def _end_after_input() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    end_with_starter()
    main(*sys.argv[1:])
