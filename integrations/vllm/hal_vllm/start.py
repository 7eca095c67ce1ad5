"""Take hold of vLLM: its backends, its layers and its loader."""

from __future__ import annotations

from typing import Any

from hal_vllm import loader, seams
from hal_vllm.question import Place
from hal_vllm.versions import PIN

LOGGER = "vllm.plugins.hal"
"""Beneath vLLM's own logger, so that its handlers show the line."""


def register() -> None:
    """Take hold of vLLM, or raise: an exception from here stops the engine, as it should."""
    PIN.check(str(seams.find("vllm", "__version__")))
    seams.override_backends()
    seams.override_layers(seams.find("hal_vllm.layers"))
    announce = seams.find("vllm.logger", "init_logger")(LOGGER).info
    loader.wrap_loaders(announce, place)


def place(vllm_config: Any) -> Place:
    """The device of this process as `hal` names it, and its part of the tensor-parallel group."""
    platform = seams.find("vllm.platforms", "current_platform")
    parallel = seams.find("vllm.distributed.parallel_state")
    size = parallel.get_tensor_model_parallel_world_size()
    return Place(device_name(platform), parallel.get_tensor_model_parallel_rank(), size)


def device_name(platform: Any) -> str:
    """A device type with the index of this process's device, as "cuda:1"; AMD is "rocm".

    vLLM calls AMD's devices "cuda", as torch does.
    """
    kind = "rocm" if platform.is_rocm() else str(platform.device_type)
    if kind == "cpu":
        return kind
    return f"{kind}:{seams.find('torch').accelerator.current_device_index()}"
