"""What an SGLang configuration asks of `hal`, and what is refused before anything is built."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from hal.decision import Question
from hal.device import Device
from hal.errors import ConfigError
from hal.integrations.engines.question import Feature, conv_dtype, features, selected
from hal.integrations.engines.refusals import mode, refuse
from hal.model.spec import Kind
from hal.options import Options, Shard
from hal.refusal import Unsupported
from hal.selection import judge_only
from hal.sharding import LABELS
from hal_registry import default_registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hal.model.spec import ModelSpec
    from hal.selection import Selection
    from hal_registry import Reason

ENGINE: Final = "SGLang"
DISTRIBUTION: Final = "hybrid-hal-sglang"
SERVED: Final = frozenset({Kind.GATED_DELTA_NET, Kind.SHORT_CONV})
"""Layer kinds that the plugin puts on a provider."""

CONV_DTYPE: Final = "SGLANG_MAMBA_CONV_DTYPE"
STATE_DTYPE: Final = "SGLANG_MAMBA_SSM_DTYPE"
_NO_GRAPHS: Final = "start with --disable-cuda-graph"


@dataclass(frozen=True, slots=True)
class Ask:
    """One model of one process: `flags` are SGLang's resolved arguments, read by name.

    `hybrid` says whether SGLang keeps a state for the model; `config` and `dtype` are its own.
    """

    config: Any
    dtype: Any
    flags: Any
    hybrid: bool
    device: str
    rank: int = 0
    size: int = 1


FEATURES: Final = (
    Feature(
        "speculative decoding",
        lambda flags: flags.speculative_algorithm is not None,
        "one token a row and step",
        "start without --speculative-algorithm",
    ),
    Feature(
        "graphs",
        lambda flags: not flags.disable_cuda_graph,
        "linear layers that run eagerly",
        _NO_GRAPHS,
    ),
    Feature(
        "torch.compile",
        lambda flags: bool(flags.enable_torch_compile),
        "linear layers that run eagerly",
        "start without --enable-torch-compile",
    ),
    Feature(
        "states tracked inside a step",
        lambda flags: str(flags.mamba_radix_cache_strategy).startswith("extra_buffer"),
        "prefix caching by copies between steps",
        "start with --mamba-radix-cache-strategy no_buffer",
    ),
    Feature(
        "pipeline parallelism",
        lambda flags: flags.pp_size > 1,
        "all layers in one process",
        "use tensor parallelism",
    ),
    Feature(
        "context parallelism",
        lambda flags: flags.attn_cp_size > 1 or flags.dcp_size > 1,
        "whole rows in one process",
        "use tensor parallelism",
    ),
    Feature(
        "data-parallel attention",
        lambda flags: bool(flags.enable_dp_attention),
        "one tensor-parallel group for all layers",
        "start without --enable-dp-attention",
    ),
    Feature(
        "micro-batching",
        lambda flags: bool(flags.enable_two_batch_overlap or flags.enable_pdmux),
        "one batch a step",
        "start without --enable-two-batch-overlap and --enable-pdmux",
    ),
    Feature(
        "state transfer between engines",
        lambda flags: str(flags.disaggregation_mode) not in ("null", "None"),
        "states of one engine",
        "start without --disaggregation-mode",
    ),
    Feature(
        "state tiers",
        lambda flags: bool(
            flags.enable_hierarchical_cache
            or flags.enable_int8_mamba_checkpoint
            or flags.enable_unified_memory
            or flags.enable_page_major_kv_layout
        ),
        "states in SGLang's plain pool",
        "start without hierarchical cache, int8 checkpoints, unified memory and page-major layout",
    ),
    Feature(
        "LoRA adapters",
        lambda flags: bool(flags.enable_lora or flags.lora_paths),
        "the checkpoint's own projections",
        "merge the adapter into the checkpoint",
    ),
    Feature(
        "ReplaySSM",
        lambda flags: bool(flags.enable_linear_replayssm or flags.enable_linear_replayssm_spec),
        "one state a row and layer",
        "start without --enable-linear-replayssm",
    ),
    Feature(
        "multi-item scoring",
        lambda flags: bool(flags.enable_mis),
        "rows that end in one state",
        "start without --enable-mis",
    ),
)
"""What is refused whatever the provider offers."""


def decided(asked: Ask, choose: Callable[[str, Any, Options], Selection]) -> Selection | None:
    """The selection by `choose`; None for a model in which neither side sees linear layers.

    Raises `hal.Unsupported` where linear layers are there and cannot be served as asked.
    """
    question = partial(choose, asked.device, asked.config, options(asked))
    selection = selected(question, asked.hybrid)
    if selection is None:
        return None
    if reasons := (*unserved_layers(selection.model), *unserved(asked)):
        raise refuse(selection.model.model_type, f"{selection.device} in {ENGINE}", *reasons)
    return selection


def judged(device: str, config: Any, options: Options) -> Selection:
    """The selection by manifests alone: neither the device nor a vendor's library is touched."""
    found = judge_only(Question(Device.parse(device), config, options, default_registry()))
    if found.selection is None:
        raise Unsupported(found.refusal) if found.refusal else ConfigError("no answer")
    return found.selection


def options(asked: Ask, environ: Mapping[str, str] = os.environ) -> Options:
    """The run's options: the model's dtype, the recurrent state's where SGLang was given one.

    Prefix caching needs nothing of a provider: SGLang copies slots itself, between steps.
    """
    state = asked.flags.mamba_ssm_dtype or environ.get(STATE_DTYPE)
    return Options(
        dtype=str(asked.dtype),
        state_dtype=None if state is None else str(state),
        tp=Shard(asked.rank, asked.size),
    )


def unserved_layers(model: ModelSpec) -> Iterator[Reason]:
    """A reason for each layer kind of the model that the plugin leaves alone."""
    kinds = [layer.stateful for layer in model.stateful_layers() if layer.stateful is not None]
    served = ", ".join(sorted(LABELS[kind] for kind in SERVED))
    for kind in dict.fromkeys(kinds):
        if kind not in SERVED:
            needed = f"{kinds.count(kind)} layers of {model.model_type}"
            fix = f"serve the model with another engine, or leave {DISTRIBUTION} out"
            yield mode(f"{LABELS[kind]} in {ENGINE}", needed, served, fix)


def unserved(asked: Ask, environ: Mapping[str, str] = os.environ) -> Iterator[Reason]:
    """Why this way to run the engine is refused; nothing where it is served."""
    yield from features(FEATURES, asked.flags, "by the engine's arguments")
    given, dtype = environ.get(CONV_DTYPE), str(asked.dtype).removeprefix("torch.")
    if given is not None:
        yield from conv_dtype(given, dtype, f"start without {CONV_DTYPE}")
