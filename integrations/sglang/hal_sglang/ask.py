"""SGLang's configuration in the words of `hal_sglang.question`."""

from __future__ import annotations

import importlib
from typing import Any, Final

from hal_sglang.question import Ask

MAX_BATCH: Final = 4096
"""Rows of a step where SGLang was given no bound; it may run that many requests at once."""


def of_arguments(arguments: Any) -> Ask:
    """The question of the process that starts the others: no rank and no device index yet."""
    flags = flags_of(arguments)
    model = _module("sglang.srt.configs.model_config").ModelConfig.from_server_args(arguments)
    return _asked(model, flags, device_name(str(flags.device)), 0, int(flags.tp_size))


def of_runner(runner: Any) -> Ask:
    """The question of the process that runs the model."""
    parallel = _module("sglang.srt.runtime_context").get_parallel()
    name = device_name(str(runner.device))
    place = name if name == "cpu" else f"{name}:{runner.gpu_id}"
    flags, rank, size = flags_of(runner.server_args), parallel.tp_rank, parallel.tp_size
    return _asked(runner.model_config, flags, place, int(rank), int(size))


def _asked(model: Any, flags: Any, device: str, rank: int, size: int) -> Ask:
    hybrid = state_config(model) is not None
    return Ask(model.hf_config, model.dtype, flags, hybrid, device, rank, size)


def flags_of(arguments: Any) -> Any:
    """The arguments as SGLang resolved them, by name."""
    return _module("sglang.srt.arg_groups.overrides").resolved_view(arguments)


def state_config(model: Any) -> Any:
    """The config for whose layers SGLang keeps states; None for a model without any."""
    return _module("sglang.srt.configs.hybrid_arch").mambaish_config(model)


def device_name(kind: str) -> str:
    """A device type as `hal` names it: SGLang calls AMD's devices "cuda", as torch does."""
    hip = _module("torch").version.hip is not None
    return "rocm" if kind == "cuda" and hip else kind


def _module(name: str) -> Any:
    return importlib.import_module(name)
