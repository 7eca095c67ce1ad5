"""The entry point: SGLang calls `register` in every one of its processes.

SGLang swallows what a plugin raises and goes on without it. So whatever goes wrong here is kept,
and raised where SGLang cannot go on: before it checks its arguments, and before it loads a model.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final, NoReturn

GATES: Final = (
    ("sglang.srt.server_args", "ServerArgs", "check_server_args"),
    ("sglang.srt.model_executor.model_runner", "ModelRunner", "load_model"),
)
"""Methods that every start passes: by module, class and name."""


def register() -> None:
    """Take hold of SGLang, or leave an engine that cannot start."""
    try:
        importlib.import_module("hal_sglang.seams").register()
    except Exception as error:
        close(error)
        raise


def close(error: Exception) -> None:
    """Let every start end in the error."""
    for module, owner, method in GATES:
        setattr(getattr(importlib.import_module(module), owner), method, _raising(error))


def _raising(error: Exception) -> Callable[..., NoReturn]:
    def refuse(*given: Any, **named: Any) -> NoReturn:
        raise error

    return refuse
