"""What a vLLM configuration asks of `hal`, and what of it is refused before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hal.errors import ConfigError
from hal.integrations.engines.refusals import mode, refuse
from hal.options import Options, Shard
from hal.refusal import Unsupported
from hal.selection import choose
from hal_registry import Code, Reason

if TYPE_CHECKING:
    from hal.selection import Selection

STATELESS: Final = frozenset({Code.FAMILY_UNKNOWN, Code.NOT_HYBRID})
"""What `hal` says of a model without linear layers; the engine then runs it by itself."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process runs the model: a device as `hal` names it, and its tensor-parallel part.

    `rank` is of `size`; pipeline stages have their own processes and the same plan.
    """

    device: str
    rank: int = 0
    size: int = 1


@dataclass(frozen=True, slots=True)
class Feature:
    """A way to run the engine that `hal` does not serve there, and how to see that it is on."""

    name: str
    wanted: Callable[[Any], bool]
    offered: str
    fix: str


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
    try:
        selection = choose(place.device, model.hf_config, options(config, place))
    except Unsupported as refused:
        if _has_state(model) or not {each.code for each in refused.reasons} <= STATELESS:
            raise
        return None
    except ConfigError:
        if _has_state(model):
            raise
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
    for feature in FEATURES:
        if feature.wanted(config):
            yield mode(feature.name, "by the engine's config", feature.offered, feature.fix)
    given, dtype = config.cache_config.mamba_cache_dtype, str(config.model_config.dtype)
    if given != "auto" and f"torch.{given}" != dtype:
        yield Reason(
            Code.DTYPE_UNSUPPORTED,
            "conv state",
            str(given),
            dtype.removeprefix("torch."),
            fix="start without --mamba-cache-dtype",
        )


def _has_state(model: Any) -> bool:
    """Whether vLLM keeps a recurrent or conv state for the model."""
    return bool(model.is_hybrid or model.has_inner_state)
