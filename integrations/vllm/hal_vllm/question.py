"""What a vLLM configuration asks of `hal`, and what of it is refused before anything is built."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from hal.integrations.engines.question import Feature, conv_dtype, features, selected
from hal.integrations.engines.refusals import refuse
from hal.options import Options, Shard
from hal.selection import choose

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hal.selection import Selection
    from hal_registry import Reason


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process runs the model: a device as `hal` names it, and its tensor-parallel part.

    `rank` is of `size`; pipeline stages have their own processes and the same plan.
    """

    device: str
    rank: int = 0
    size: int = 1


FEATURES: Final = (
    Feature(
        "speculative decoding",
        lambda config: config.speculative_config is not None,
        "one token a row and step",
        "start without a speculative config",
    ),
    Feature(
        "pipeline parallelism",
        lambda config: config.parallel_config.pipeline_parallel_size > 1,
        "all layers in one process",
        "use tensor parallelism",
    ),
    Feature(
        "context parallelism",
        lambda config: (
            config.parallel_config.decode_context_parallel_size > 1
            or config.parallel_config.prefill_context_parallel_size > 1
        ),
        "whole rows in one process",
        "use tensor parallelism",
    ),
    Feature(
        "micro-batching",
        lambda config: bool(config.parallel_config.use_ubatching),
        "one batch a step",
        "start without dual-batch overlap",
    ),
    Feature(
        "state transfer between engines",
        lambda config: config.kv_transfer_config is not None,
        "states of one engine",
        "start without a KV connector",
    ),
    Feature(
        "LoRA adapters",
        lambda config: config.lora_config is not None,
        "the checkpoint's own projections",
        "merge the adapter into the checkpoint",
    ),
    Feature(
        "ReplaySSM",
        lambda config: bool(config.cache_config.use_replayssm),
        "one state a row and layer",
        "start without --use-replayssm",
    ),
)
"""What is refused whatever the provider offers."""


def ask(config: Any, place: Place) -> Selection | None:
    """The selection for a vLLM config; None for a model in which neither side sees linear layers.

    Raises `hal.Unsupported` where linear layers are there and cannot be served as asked. A model
    whose states the engine does not know of (ZAYA1 in its generic fallback) is refused later, when
    its layers are not found.
    """
    model = config.model_config
    asked = partial(choose, place.device, model.hf_config, options(config, place))
    selection = selected(asked, _has_state(model))
    if selection is None:
        return None
    if reasons := tuple(unserved(config)):
        raise refuse(selection.model.model_type, str(selection.device), *reasons)
    return selection


def options(config: Any, place: Place) -> Options:
    """The run's options: the model's dtype, the recurrent state's where vLLM was given one.

    Prefix caching needs nothing of a provider: the engine ends steps at block ends and copies
    blocks itself.
    """
    state = config.cache_config.mamba_ssm_cache_dtype
    return Options(
        dtype=str(config.model_config.dtype),
        state_dtype=None if state == "auto" else str(state),
        tp=Shard(place.rank, place.size),
    )


def unserved(config: Any) -> Iterator[Reason]:
    """Why this way to run the engine is refused; nothing where it is served."""
    yield from features(FEATURES, config, "by the engine's config")
    given, dtype = config.cache_config.mamba_cache_dtype, str(config.model_config.dtype)
    if given != "auto":
        fix = "start without --mamba-cache-dtype"
        yield from conv_dtype(str(given), dtype.removeprefix("torch."), fix)


def _has_state(model: Any) -> bool:
    """Whether vLLM keeps a recurrent or conv state for the model."""
    return bool(model.is_hybrid or model.has_inner_state)
