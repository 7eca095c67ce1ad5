"""As much of SGLang as its plugin touches, with the same names, for tests without the engine.

The layers hold weights; what they leave out (loading, parallel projections, norms) is not the
plugin's. Hooks are applied as SGLang does it: a patch that fails is swallowed.
"""

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import wraps
from math import prod
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hal
from hal.model.spec import DeltaDims, ShortConvDims

RUNTIME = "sglang.srt."
LOGGER = "sglang.srt.plugins.hal"
UPDATER = RUNTIME + "model_executor.model_runner_components.weight_updater"


class HookType(Enum):
    """How a hook meets its function; the plugin only goes around."""

    AROUND = "around"
    REPLACE = "replace"


class HookRegistry:
    """Hooks by the dotted path of their target, and the targets that were patched."""

    _hooks: dict[str, list[tuple[HookType, Any, object]]] = {}  # noqa: RUF012 # as in the engine
    _patched: set[str] = set()  # noqa: RUF012

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: HookType) -> None:
        cls._hooks.setdefault(target, []).append((hook_type, hook, None))

    @classmethod
    def apply(cls) -> None:
        for target in sorted(cls._hooks.keys() - cls._patched):
            with suppress(Exception):
                _patch(target, cls._hooks[target])
                cls._patched.add(target)


def _patch(target: str, hooks: list[tuple[HookType, Any, object]]) -> None:
    owner, name = _owner(target)
    function = getattr(owner, name)
    for kind, hook, _ in hooks:
        function = _around(function, hook) if kind is HookType.AROUND else hook
    setattr(owner, name, function)


def _around(function: Any, hook: Any) -> Any:
    @wraps(function)
    def wrapper(*given: Any, **named: Any) -> Any:
        return hook(function, *given, **named)

    return wrapper


def _owner(target: str) -> tuple[Any, str]:
    path, _, name = target.rpartition(".")
    try:
        return importlib.import_module(path), name
    except ModuleNotFoundError:
        module, _, cls = path.rpartition(".")
        return getattr(importlib.import_module(module), cls), name


@dataclass(frozen=True)
class Shape:
    """What SGLang's pool holds of a layer."""

    conv: list[tuple[int, ...]]
    temporal: tuple[int, ...]


@dataclass(frozen=True)
class Types:
    """The dtypes of both."""

    conv: torch.dtype
    temporal: torch.dtype


@dataclass(frozen=True)
class Params:
    """The pool's parameters, as a config answers them."""

    shape: Shape
    dtype: Types
    layers: list[int]


class Config(dict[str, object]):
    """A model's config that answers for the pool in SGLang's own layout and dtypes."""

    hybrid = True

    @property
    def mamba2_cache_params(self) -> Params:
        layers = list(hal.model.read(self).stateful_layers())
        dims = layers[0].dims
        assert isinstance(dims, DeltaDims | ShortConvDims)
        if isinstance(dims, DeltaDims):
            channels, state = sum(size for _, size in dims.segments), (dims.HV, dims.V, dims.K)
        else:
            channels, state = dims.hidden, (1, dims.hidden, 0)
        types = Types(torch.bfloat16, torch.float32)
        shape = Shape([(channels, dims.W - 1)], state)
        return Params(shape, types, [layer.index for layer in layers])

    @property
    def full_attention_layer_ids(self) -> list[int]:
        layers = hal.model.read(self).layers
        return [each.index for each in layers if each.stateful is None]


def model_config(config: Config, dtype: torch.dtype = torch.float32) -> Any:
    return SimpleNamespace(hf_config=config, dtype=dtype)


FLAGS: dict[str, object] = {
    "device": "cpu",
    "tp_size": 1,
    "pp_size": 1,
    "attn_cp_size": 1,
    "dcp_size": 1,
    "max_running_requests": 8,
    "mamba_ssm_dtype": None,
    "mamba_radix_cache_strategy": "no_buffer",
    "speculative_algorithm": None,
    "disable_cuda_graph": True,
    "enable_torch_compile": False,
    "enable_dp_attention": False,
    "enable_two_batch_overlap": False,
    "enable_pdmux": False,
    "disaggregation_mode": "null",
    "enable_hierarchical_cache": False,
    "enable_int8_mamba_checkpoint": False,
    "enable_unified_memory": False,
    "enable_page_major_kv_layout": False,
    "enable_lora": False,
    "lora_paths": None,
    "enable_linear_replayssm": False,
    "enable_linear_replayssm_spec": False,
    "enable_mis": False,
}


class ServerArgs:
    """SGLang's arguments, resolved, beside the model that they are for."""

    def __init__(self, config: Config, **flags: object) -> None:
        self.config = config
        vars(self).update(FLAGS | flags)

    def check_server_args(self) -> str:
        return "checked"


class RadixLinearAttention(nn.Module):
    """Gated DeltaNet between the projections and the norm."""

    def __init__(self, layer_id: int, dims: DeltaDims) -> None:
        super().__init__()
        self.layer_id, self.num_v_heads, self.head_v_dim = layer_id, dims.HV, dims.V
        channels = sum(size for _, size in dims.segments)
        self.conv_weights, self.bias = torch.full((channels, dims.W), torch.nan), None
        self.A_log, self.dt_bias = (
            torch.full((dims.HV,), torch.nan),
            torch.full((dims.HV,), torch.nan),
        )


class Linear(nn.Module):
    """A projection that gives its result and no bias, as SGLang's do."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, torch.nan), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x @ self.weight.T, None


class Lfm2ShortConv(nn.Module):
    """LFM2's short convolution between two projections."""

    def __init__(self, layer_idx: int, dims: ShortConvDims) -> None:
        super().__init__()
        hidden = dims.hidden
        self.layer_idx, self.conv_bias = layer_idx, None
        self.conv_weight = torch.full((hidden, dims.W), torch.nan)
        self.in_proj, self.out_proj = Linear(3 * hidden, hidden), Linear(hidden, hidden)

    def forward(self, hidden_states: Tensor, forward_batch: object) -> Tensor:
        raise AssertionError("SGLang's own kernel ran")


class Pool:
    """Slots of states, shaped as the model's config answers; slot 0 is for pads."""

    def __init__(self, params: Params, slots: int) -> None:
        self.layers = {
            layer: SimpleNamespace(
                conv=[
                    torch.full((slots, *shape), torch.nan, dtype=params.dtype.conv)
                    for shape in params.shape.conv
                ],
                temporal=torch.full(
                    (slots, *params.shape.temporal), torch.nan, dtype=params.dtype.temporal
                ),
            )
            for layer in params.layers
        }
        conv = next(iter(self.layers.values())).conv
        self.mamba_pool = SimpleNamespace(mamba_cache=SimpleNamespace(conv=conv))

    def mamba2_layer_cache(self, layer: int) -> Any:
        return self.layers[layer]


class ModelRunner:
    """Builds a model by the loader; weights are filled by what a test gives as `fill`."""

    gpu_id = 0
    device = "cpu"
    is_draft_worker = False

    def __init__(self, arguments: ServerArgs, fill: Callable[[nn.Module], None]) -> None:
        self.server_args, self.fill = arguments, fill
        self.model_config = model_config(arguments.config)
        self.model: Any = None
        self.loaded = False

    def load_model(self) -> None:
        loader = sys.modules[RUNTIME + "model_loader.loader"]
        self.model = loader._initialize_model(self.model_config, "load config")
        self.fill(self.model)
        self.loaded = True

    def start(self, slots: int) -> Any:
        """Load, allocate the pool, and build the backend, in SGLang's order."""
        self.load_model()
        self.req_to_token_pool = Pool(self.server_args.config.mamba2_cache_params, slots)
        registry = sys.modules[RUNTIME + "layers.attention.attention_registry"]
        return registry.attn_backend_wrapper(self, "full")


def initialize_model(config: Any, load_config: object) -> nn.Module:
    """A model of the config's stateful layers, by SGLang's class names."""
    layers = []
    for layer in hal.model.read(config.hf_config).stateful_layers():
        if isinstance(layer.dims, DeltaDims):
            layers.append(RadixLinearAttention(layer.index, layer.dims))
        elif isinstance(layer.dims, ShortConvDims):
            layers.append(Lfm2ShortConv(layer.index, layer.dims))
    return nn.ModuleList(layers)


class MambaAttnBackendBase:
    """Makes the metadata of a batch, as its batch carries it."""

    def __init__(self, runner: Any) -> None:
        self.req_to_token_pool = runner.req_to_token_pool
        self.forward_metadata: Any = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.forward_metadata = forward_batch.metadata


class HybridLinearAttnBackend:
    """Full attention and the linear side."""

    def __init__(self, full: object, linear: Any, layers: list[int]) -> None:
        self.full_attn_backend, self.linear_attn_backend = full, linear
        self.full_attn_layers = layers


class WeightUpdater:
    """Replaces weights in place."""

    def update_weights_from_disk(self, change: Callable[[], None]) -> str:
        change()
        return "updated"

    load_weights_from_distributed = update_weights_from_disk
    update_weights_from_tensor = update_weights_from_disk
    update_weights_from_ipc = update_weights_from_disk
    end_weight_update = update_weights_from_disk


def mode(name: str) -> Any:
    """A forward mode that answers as SGLang's does."""
    return SimpleNamespace(
        name=name,
        is_idle=lambda: name == "IDLE",
        is_decode=lambda: name == "DECODE",
        is_target_verify=lambda: name == "TARGET_VERIFY",
        is_draft_extend_v2=lambda: name == "DRAFT_EXTEND_V2",
    )


class Lines(logging.Handler):
    """Keeps what the plugin says."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@dataclass
class Engine:
    """What a test sees and sets of the fake engine."""

    backend: Any = None
    """The running backend."""

    lines: list[str] = field(default_factory=list)
    stock: list[str] = field(default_factory=list)
    """What SGLang's own code was asked for."""


def _classes() -> dict[str, type]:
    """Fresh subclasses, so that patches of one test are gone in the next."""
    return {
        each.__name__: type(
            each.__name__,
            (each,),
            {"__module__": each.__module__}
            | {name: vars(each)[name] for name in vars(each) if callable(vars(each)[name])},
        )
        for each in (ServerArgs, ModelRunner, WeightUpdater)
    }


def _attributes(engine: Engine, version: str) -> dict[str, dict[str, object]]:
    made = _classes()

    def wrapper(runner: object, full: object) -> str:
        engine.stock.append("attn_backend_wrapper")
        return "stock backend"

    attention = RUNTIME + "layers.attention."
    return {
        "sglang": {"__version__": version},
        RUNTIME + "plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
        RUNTIME + "server_args": {"ServerArgs": made["ServerArgs"]},
        RUNTIME + "arg_groups.overrides": {"resolved_view": lambda arguments: arguments},
        RUNTIME + "configs.model_config": {
            "ModelConfig": SimpleNamespace(from_server_args=lambda args: model_config(args.config))
        },
        RUNTIME + "configs.hybrid_arch": {
            "mambaish_config": lambda model: model.hf_config if model.hf_config.hybrid else None
        },
        RUNTIME + "runtime_context": {
            "get_parallel": lambda: SimpleNamespace(tp_rank=0, tp_size=1)
        },
        RUNTIME + "model_executor.model_runner": {"ModelRunner": made["ModelRunner"]},
        RUNTIME + "model_executor.forward_context": {"get_attn_backend": lambda: engine.backend},
        UPDATER: {"WeightUpdater": made["WeightUpdater"]},
        RUNTIME + "model_loader.loader": {"_initialize_model": initialize_model},
        attention + "attention_registry": {"attn_backend_wrapper": wrapper},
        attention + "hybrid_linear_attn_backend": {
            "HybridLinearAttnBackend": HybridLinearAttnBackend,
            "MambaAttnBackendBase": MambaAttnBackendBase,
        },
    }


def _paths(names: Iterator[str]) -> set[str]:
    parts = [name.split(".") for name in names]
    return {".".join(each[: i + 1]) for each in parts for i in range(len(each))}


@contextmanager
def installed(version: str = "0.5.23") -> Iterator[Engine]:
    """Let `import sglang` find the fake; everything is as before afterwards."""
    engine = Engine()
    attributes = _attributes(engine, version)
    with pytest.MonkeyPatch.context() as patch:
        for path in sorted(_paths(iter(attributes))):
            module = ModuleType(path)
            module.__path__ = []
            vars(module).update(attributes.get(path, {}))
            patch.setitem(sys.modules, path, module)
        patch.setattr(Config, "mamba2_cache_params", vars(Config)["mamba2_cache_params"])
        logger, handler = logging.getLogger(LOGGER), Lines(engine.lines)
        patch.setattr(logger, "level", logging.INFO)
        logger.addHandler(handler)
        _forget()
        yield engine
        _forget()
        logger.removeHandler(handler)


def _forget() -> None:
    """The plugin's modules hold classes of the engine that they were imported with."""
    HookRegistry._hooks.clear()
    HookRegistry._patched.clear()
    for name in ("hal_sglang.backend",):
        sys.modules.pop(name, None)
    importlib.import_module("hal_sglang.pool")._ORIGINALS.clear()


def elements(pool: Pool) -> int:
    """Elements of one slot of one layer."""
    cache = next(iter(pool.layers.values()))
    return sum(prod(t.shape[1:]) for t in (*cache.conv, cache.temporal))
