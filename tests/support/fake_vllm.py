"""As much of vLLM as its plugin touches, with the same names, for tests without the engine.

The layers hold weights and call the methods that the real ones call; what they leave out (loading,
parallel projections, norms) is not the plugin's.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

PATHS = (
    "vllm",
    "vllm.distributed",
    "vllm.distributed.parallel_state",
    "vllm.forward_context",
    "vllm.logger",
    "vllm.model_executor",
    "vllm.model_executor.custom_op",
    "vllm.model_executor.layers",
    "vllm.model_executor.layers.mamba",
    "vllm.model_executor.layers.mamba.abstract",
    "vllm.model_executor.layers.mamba.gdn",
    "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn",
    "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn",
    "vllm.model_executor.layers.mamba.mamba_mixer2",
    "vllm.model_executor.layers.mamba.short_conv",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.model_loader.base_loader",
    "vllm.model_executor.models",
    "vllm.model_executor.models.utils",
    "vllm.platforms",
    "vllm.v1",
    "vllm.v1.attention",
    "vllm.v1.attention.backend",
    "vllm.v1.attention.backends",
    "vllm.v1.attention.backends.registry",
    "vllm.v1.attention.backends.utils",
    "vllm.v1.attention.selector",
    "vllm.v1.worker",
    "vllm.v1.worker.gpu_worker",
)
NULL_BLOCK_ID = 0


class MambaType(Enum):
    """The metadata kinds."""

    GDN_ATTN = 1
    MAMBA2 = 2
    SHORT_CONV = 3


class MambaBase:
    """Slices a layer's states out of its pages, in the order in which they are declared."""

    prefix: str
    kv_cache: tuple[Tensor, ...] = ()

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        raise NotImplementedError

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config: object) -> object:
        return "stock spec"

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        states, offset = [], 0
        for shape, dtype in zip(self.get_state_shape(), self.get_state_dtype(), strict=True):
            size = torch.Size(shape).numel() * dtype.itemsize
            states.append(kv_cache[:, offset : offset + size].view(dtype).view(-1, *shape))
            offset += size
        self.kv_cache = tuple(states)


class PluggableLayer(nn.Module):
    """Looks a replacement up by the name of the class that is built."""

    registry: dict[str, type] = {}  # noqa: RUF012 # a registry, as in the engine

    def __new__(cls, *given: object, **named: object) -> Any:
        return super().__new__(cls.registry.get(cls.__name__, cls))

    @classmethod
    def register_oot(cls, layer: type, name: str) -> type:
        assert name not in cls.registry, f"Duplicate layer name: {name}"
        cls.registry[name] = layer
        return layer


def weights(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, torch.nan), requires_grad=False)


class Linear(nn.Module):
    """A projection that gives its result and no bias, as vLLM's do."""

    def __init__(self, *shape: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = weights(*shape)
        self.bias = weights(shape[0]) if bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x @ self.weight.T, None


class QwenGatedDeltaNetAttention(PluggableLayer, MambaBase):
    """Gated DeltaNet."""

    def __init__(
        self,
        config: Any,
        vllm_config: object,
        prefix: str = "",
        gqa_interleaved_layout: bool = False,
        reduce_results: bool = True,
    ) -> None:
        super().__init__()
        self.prefix, self.config = prefix, config
        dims = config.dims
        channels = sum(size for _, size in dims.segments)
        self.conv1d = Linear(channels, 1, dims.W)
        self.A_log, self.dt_bias = weights(dims.HV), weights(dims.HV)
        self._forward_method: Callable[[], str] = lambda: "cpu"

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        dims = self.config.dims
        channels = sum(size for _, size in dims.segments)
        return (dims.W - 1, channels), (dims.HV, dims.V, dims.K)

    def forward_cuda(self) -> str:
        return "core"

    def _forward_core(self, *given: object) -> None:
        raise AssertionError("the stock recurrence ran")


class KimiGatedDeltaNetAttention(QwenGatedDeltaNetAttention):
    """Kimi Delta Attention, whose dt_bias is flat and whose norm has a weight of its own."""

    def __init__(self, config: Any, vllm_config: object, prefix: str = "") -> None:
        super().__init__(config, vllm_config, prefix)
        self.local_num_heads, self.head_dim = config.dims.HV, config.dims.K
        self.dt_bias = weights(config.dims.HV * config.dims.K)
        self.o_norm = nn.Module()
        self.o_norm.weight, self.o_norm.eps = weights(config.dims.V), 1e-6

    def _forward(self, *given: object) -> None:
        raise AssertionError("the stock recurrence ran")


class MambaMixer2(PluggableLayer, MambaBase):
    """Mamba-2, which keeps A = -exp(A_log)."""

    def __init__(
        self,
        hidden_size: int,
        ssm_state_size: int,
        conv_kernel_size: int,
        intermediate_size: int,
        use_conv_bias: bool,
        use_bias: bool,
        n_groups: int = 1,
        num_heads: int = 128,
        head_dim: int = 64,
        rms_norm_eps: float = 1e-5,
        activation: str = "silu",
        use_rms_norm: bool = True,
        model_config: object = None,
        cache_config: object = None,
        quant_config: object = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self.tped_intermediate_size, self.tped_dt_size = intermediate_size, num_heads
        self.tped_conv_size = intermediate_size + 2 * n_groups * ssm_state_size
        self.conv1d = Linear(self.tped_conv_size, 1, conv_kernel_size, bias=use_conv_bias)
        self.A, self.D, self.dt_bias = weights(num_heads), weights(num_heads), weights(num_heads)
        self._shapes = (
            (conv_kernel_size - 1, self.tped_conv_size),
            (num_heads, head_dim, ssm_state_size),
        )

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return self._shapes

    def conv_ssm_forward(self, *given: object) -> None:
        raise AssertionError("the stock scan ran")


class ShortConv(PluggableLayer, MambaBase):
    """LFM2's short convolution between two projections."""

    def __init__(
        self,
        config: Any,
        dim: int,
        layer_idx: int,
        model_config: object = None,
        cache_config: object = None,
        quant_config: object = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.prefix, self._width = prefix, config.dims.W
        self.conv = Linear(dim, 1, self._width)
        self.in_proj, self.out_proj = Linear(3 * dim, dim), Linear(dim, dim)

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return ((self._width - 1, self.conv.weight.shape[0]),)

    def forward_native(self, *given: object) -> None:
        raise AssertionError("the stock convolution ran")

    def forward_cuda(self, *given: object) -> None:
        raise AssertionError("the stock convolution ran")


class AttentionMetadataBuilder:
    """Keeps what vLLM hands to every builder."""

    def __init__(self, spec: object, names: list[str], vllm_config: object, device: object) -> None:
        self.kv_cache_spec, self.layer_names = spec, names
        self.vllm_config, self.device = vllm_config, device


class BaseModelLoader:
    """Builds the model that a test asks for."""

    def create_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        return vllm_config.build()

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        return self.create_model(vllm_config, model_config, prefix)


class OtherLoader(BaseModelLoader):
    """Builds its model past `create_model`, as Tensorizer's does."""

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        return vllm_config.build()


class Worker:
    """Changes weights under the layers of a model."""

    def reload_weights(self, change: Callable[[], object]) -> object:
        return change()

    def update_weights(self, change: Callable[[], object]) -> object:
        return change()

    def finish_weight_update(self) -> None:
        return None


@dataclass
class Engine:
    """What a test sees and sets of the fake engine."""

    version: str = "0.32.0+cpu"
    metadata: dict[str, object] | None = None
    lines: list[str] = field(default_factory=list)
    overrides: dict[MambaType, str] = field(default_factory=dict)
    backend: type | None = None
    """What the selector answers with, where a test makes it ignore the override."""

    def select(self, kind: MambaType) -> type:
        if self.backend is not None:
            return self.backend
        module, _, name = self.overrides[kind].rpartition(".")
        found: type = getattr(__import__(module, fromlist=[name]), name)
        return found


def _attributes(engine: Engine) -> dict[str, dict[str, object]]:
    def register(member: MambaType, path: str, is_mamba: bool = False) -> None:
        assert is_mamba
        engine.overrides[member] = path

    mamba, attention = "vllm.model_executor.layers.mamba.", "vllm.v1.attention."
    platform = SimpleNamespace(device_type="cpu", is_rocm=lambda: False)
    return {
        "vllm": {"__version__": engine.version},
        "vllm.distributed.parallel_state": {
            "get_tensor_model_parallel_world_size": lambda: 1,
            "get_tensor_model_parallel_rank": lambda: 0,
        },
        "vllm.forward_context": {
            "get_forward_context": lambda: SimpleNamespace(attn_metadata=engine.metadata)
        },
        "vllm.logger": {"init_logger": lambda name: SimpleNamespace(info=engine.lines.append)},
        "vllm.model_executor.custom_op": {
            "PluggableLayer": PluggableLayer,
            "op_registry_oot": PluggableLayer.registry,
        },
        mamba + "abstract": {"MambaBase": MambaBase},
        mamba + "gdn.kimi_gdn_linear_attn": {
            "KimiGatedDeltaNetAttention": KimiGatedDeltaNetAttention
        },
        mamba + "gdn.qwen_gdn_linear_attn": {
            "QwenGatedDeltaNetAttention": QwenGatedDeltaNetAttention
        },
        mamba + "mamba_mixer2": {"MambaMixer2": MambaMixer2},
        mamba + "short_conv": {"ShortConv": ShortConv},
        "vllm.model_executor.model_loader": {"get_model_loader": None},
        "vllm.model_executor.model_loader.base_loader": {"BaseModelLoader": BaseModelLoader},
        "vllm.model_executor.models.utils": {
            "extract_layer_index": lambda prefix: int(prefix.split(".")[1])
        },
        "vllm.platforms": {"current_platform": platform},
        attention + "backend": {
            "AttentionBackend": object,
            "AttentionMetadata": object,
            "AttentionMetadataBuilder": AttentionMetadataBuilder,
        },
        attention + "backends.registry": {
            "MambaAttentionBackendEnum": MambaType,
            "register_backend": register,
        },
        attention + "backends.utils": {
            "NULL_BLOCK_ID": NULL_BLOCK_ID,
            "mamba_get_block_table_tensor": lambda table, lens, spec, mode: table,
        },
        attention + "selector": {"get_mamba_attn_backend": engine.select},
        "vllm.v1.worker.gpu_worker": {"Worker": Worker},
    }


@contextmanager
def installed(version: str = "0.32.0+cpu") -> Iterator[Engine]:
    """Let `import vllm` find the fake; everything is as before afterwards."""
    engine = Engine(version)
    attributes = _attributes(engine)
    BaseModelLoader.__module__ = "vllm.model_executor.model_loader.base_loader"
    with pytest.MonkeyPatch.context() as patch:
        for path in PATHS:
            module = ModuleType(path)
            module.__path__ = []
            vars(module).update(attributes.get(path, {}))
            patch.setitem(sys.modules, path, module)
        patch.setattr(BaseModelLoader, "create_model", BaseModelLoader.create_model)
        patch.setattr(OtherLoader, "load_model", OtherLoader.load_model)
        for name in ("reload_weights", "update_weights", "finish_weight_update"):
            patch.setattr(Worker, name, vars(Worker)[name])
        _forget()
        yield engine
        _forget()


def _forget() -> None:
    """The plugin's modules hold classes of the engine that they were imported with."""
    PluggableLayer.registry.clear()
    for name in ("hal_vllm.layers", "hal_vllm.metadata"):
        sys.modules.pop(name, None)


def config(model: object, build: Callable[[], object], **changes: object) -> Any:
    """A vLLM config of a hybrid model in float32; `changes` name entries as "part.entry"."""
    parts: dict[str, Any] = {
        "model_config": SimpleNamespace(
            hf_config=model, dtype=torch.float32, is_hybrid=True, has_inner_state=True
        ),
        "cache_config": SimpleNamespace(
            mamba_ssm_cache_dtype="auto",
            mamba_cache_dtype="auto",
            mamba_cache_mode="none",
            use_replayssm=False,
        ),
        "parallel_config": SimpleNamespace(
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            use_ubatching=False,
        ),
        "scheduler_config": SimpleNamespace(max_num_seqs=8),
        "load_config": SimpleNamespace(load_format="auto"),
        "speculative_config": None,
        "kv_transfer_config": None,
        "lora_config": None,
        "additional_config": {"theirs": 1},
        "build": build,
    }
    for path, value in changes.items():
        part, _, entry = path.partition(".")
        if entry:
            setattr(parts[part], entry, value)
        else:
            parts[part] = value
    return SimpleNamespace(**parts)
