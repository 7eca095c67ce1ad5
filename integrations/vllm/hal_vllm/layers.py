"""vLLM's linear layers with the providers' operations inside: projections and loading stay vLLM's.

Each class replaces the engine's class of the same name; it joins the session of the model that is
being built, answers for its states from the plan, and runs what `hal` bound.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.model_executor.models.utils import extract_layer_index

from hal.errors import HalError
from hal.model.spec import DeltaDims, Kind
from hal.runtime.layers import DeltaLayer, ShortConvLayer
from hal.runtime.params import DeltaParams, ScanParams, ShortConvParams
from hal.runtime.scan_layer import ScanLayer
from hal_vllm.metadata import HalMetadata
from hal_vllm.params import conv_weight, log_rates, model_gate
from hal_vllm.session import joining

if TYPE_CHECKING:
    from torch import Tensor

    from hal.integrations.engines.session import Session
    from hal.runtime.step import Step


class Served(MambaBase):  # type: ignore[misc] # vLLM is not there when types are checked
    """What the replaced layers share: states by the plan, the step, the session."""

    hal_kind: ClassVar[Kind]
    hal_session: Session
    hal_index: int

    def hal_join(self) -> None:
        """Join the session once the engine's layer is built; both sides have to see one layer."""
        engine = [prod(shape) for shape in super().get_state_shape()]
        self.hal_session = joining()
        self.hal_index = self.hal_layer_index()
        self.hal_session.join(self.hal_index, self.hal_kind, self)
        plan = [prod(spec.shape) for spec in self.hal_session.states(self.hal_index)]
        if len(plan) != len(engine) or plan[1:] != engine[1:]:
            raise HalError(
                f"layer {self.hal_index}: vLLM has states of {engine} elements, hal of {plan}"
            )

    def hal_layer_index(self) -> int:
        """The layer's number in the model's config."""
        return int(extract_layer_index(self.prefix))

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """The states' shapes in the chosen layouts, in the order of the page."""
        return tuple(spec.shape for spec in self.hal_session.states(self.hal_index))

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """The states' dtypes."""
        states = self.hal_session.states(self.hal_index)
        return tuple(getattr(torch, spec.dtype) for spec in states)

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """One state a block; no provider exports states from inside a step here."""
        return MambaBase.get_kv_cache_spec(self, vllm_config)

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Take the layer's pages; what was bound over other pages is bound anew."""
        super().bind_kv_cache(kv_cache)
        self.hal_session.forget()

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Bind anew after a load or a reload: a provider may lay weights out anew."""
        self.hal_session.forget()

    @property
    def hal_states(self) -> dict[str, Tensor]:
        """The layer's state tensors in the engine's pages, by the plan's names."""
        states = self.hal_session.states(self.hal_index)
        return {spec.name: t for spec, t in zip(states, self.kv_cache, strict=True)}

    def hal_step(self) -> Step | None:
        """This forward's step; None while the engine measures memory, without any state."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            return None
        own = metadata.get(self.prefix) if isinstance(metadata, dict) else metadata
        if own is None:
            return None
        if not isinstance(own, HalMetadata):
            raise HalError(f"{self.prefix} got {type(own).__name__}: hal's backend did not take")
        return own.step

    def hal_dims(self) -> Any:
        """The layer's dims by the model's config, not sharded."""
        layers = self.hal_session.selection.model.layers
        return next(layer.dims for layer in layers if layer.index == self.hal_index)


class HalGatedDeltaNet(Served, QwenGatedDeltaNetAttention):  # type: ignore[misc]
    """Gated DeltaNet of Qwen3-Next and Qwen3.5: conv and recurrence; the norm stays vLLM's."""

    hal_kind = Kind.GATED_DELTA_NET

    def __init__(
        self,
        config: Any,
        vllm_config: Any,
        prefix: str = "",
        gqa_interleaved_layout: bool = False,
        reduce_results: bool = True,
    ) -> None:
        QwenGatedDeltaNetAttention.__init__(
            self, config, vllm_config, prefix, gqa_interleaved_layout, reduce_results
        )
        self._forward_method = self.forward_cuda
        self.enable_fused_gdn_spec_decode = False
        self.hal_join()

    @property
    def hal_params(self) -> DeltaParams:
        """The conv's weight and the gate, as loaded."""
        gate = model_gate(cast(DeltaDims, self.hal_dims()), self.A_log, self.dt_bias)
        return DeltaParams(conv_weight(self.conv1d), None, gate)

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        """Fill core_attn_out `[T, HV, V]`, which comes as zeros, for the step's tokens."""
        step = self.hal_step()
        if step is None:
            return
        layer, n = cast(DeltaLayer, self.hal_session.run(self.hal_index, step)), step.tokens
        core_attn_out[:n] = layer(mixed_qkv[:n], a[:n], b[:n])


class HalKimiDelta(Served, KimiGatedDeltaNetAttention):  # type: ignore[misc]
    """Kimi Delta Attention: conv, recurrence and the sigmoid-gated norm."""

    hal_kind = Kind.KIMI_DELTA

    def __init__(self, config: Any, vllm_config: Any, prefix: str = "") -> None:
        KimiGatedDeltaNetAttention.__init__(self, config, vllm_config, prefix)
        self.hal_join()

    @property
    def hal_params(self) -> DeltaParams:
        """The packed conv's weight, the gate and the norm, as loaded."""
        bias = self.dt_bias.view(self.local_num_heads, self.head_dim)
        gate = model_gate(cast(DeltaDims, self.hal_dims()), self.A_log, bias)
        weight = conv_weight(self.conv1d)
        return DeltaParams(weight, None, gate, self.o_norm.weight, self.o_norm.eps)

    def _forward(
        self, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor
    ) -> None:
        """Fill core_attn_out `[1, T, H, D]`; g1 is the raw decay, g2 the output gate."""
        core_attn_out.zero_()
        step = self.hal_step()
        if step is None:
            return
        layer, n = cast(DeltaLayer, self.hal_session.run(self.hal_index, step)), step.tokens
        z = g2.reshape(-1, *core_attn_out.shape[2:])
        core_attn_out[0, :n] = layer(mixed_qkv[:n], g1[0, :n], beta[0, :n], z[:n])


class HalMamba2(Served, MambaMixer2):  # type: ignore[misc]
    """Mamba-2: conv and scan; gate and grouped norm stay vLLM's."""

    hal_kind = Kind.MAMBA2

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
        model_config: Any = None,
        cache_config: Any = None,
        quant_config: Any = None,
        prefix: str = "",
    ) -> None:
        MambaMixer2.__init__(
            self,
            hidden_size,
            ssm_state_size,
            conv_kernel_size,
            intermediate_size,
            use_conv_bias,
            use_bias,
            n_groups,
            num_heads,
            head_dim,
            rms_norm_eps,
            activation,
            use_rms_norm,
            model_config,
            cache_config,
            quant_config,
            prefix,
        )
        self.hal_join()

    @property
    def hal_params(self) -> ScanParams:
        """Conv, rates, skip and dt bias, as loaded; vLLM keeps A = -exp(A_log)."""
        conv = self.conv1d
        return ScanParams(conv_weight(conv), conv.bias, log_rates(self.A), self.D, self.dt_bias)

    def hal_layer_index(self) -> int:
        """The number in the config; Falcon-H1's mixers are numbered on from its attentions."""
        return super().hal_layer_index() % len(self.hal_session.selection.model.layers)

    def conv_ssm_forward(self, projected_states: Tensor, output: Tensor) -> None:
        """Fill output `[T, I]` from z, x, B, C and dt side by side."""
        output.zero_()
        step = self.hal_step()
        if step is None:
            return
        layer, n = cast(ScanLayer, self.hal_session.run(self.hal_index, step)), step.tokens
        sizes = (self.tped_intermediate_size, self.tped_conv_size, self.tped_dt_size)
        _, mixed, dt = projected_states[:n].split_with_sizes(sizes, dim=-1)
        output[:n] = layer(mixed, dt)


class HalShortConv(Served, ShortConv):  # type: ignore[misc]
    """The gated short convolution of LFM2 between its two projections."""

    hal_kind = Kind.SHORT_CONV

    def __init__(
        self,
        config: Any,
        dim: int,
        layer_idx: int,
        model_config: Any = None,
        cache_config: Any = None,
        quant_config: Any = None,
        prefix: str = "",
    ) -> None:
        ShortConv.__init__(
            self, config, dim, layer_idx, model_config, cache_config, quant_config, prefix
        )
        self.hal_join()

    @property
    def hal_params(self) -> ShortConvParams:
        """The conv's weight and bias, as loaded."""
        return ShortConvParams(conv_weight(self.conv), self.conv.bias)

    def forward_native(self, hidden_states: Tensor, output: Tensor) -> None:
        """Fill output `[T, hidden]`; the engine calls it by this name on CPUs."""
        output.zero_()
        step = self.hal_step()
        if step is None:
            return
        layer, n = cast(ShortConvLayer, self.hal_session.run(self.hal_index, step)), step.tokens
        B, C, x = self.in_proj(hidden_states[:n])[0].chunk(3, dim=-1)
        output[:n] = self.out_proj(layer(B, C, x))[0]

    def forward_cuda(self, hidden_states: Tensor, output: Tensor) -> None:
        """Fill output; the engine calls it by this name on every other device."""
        self.forward_native(hidden_states, output)
