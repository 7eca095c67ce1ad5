"""Bound layers for tests: a small backend a family, its weights, and the oracle of a whole run."""

from collections.abc import Callable

import torch
from torch import Tensor

from hal import reference
from hal.interfaces import Gate
from hal.model.spec import DeltaDims, GateKind, ShortConvDims
from hal.runtime.layers import DeltaLayer, ShortConvLayer
from hal.runtime.params import DeltaParams, ShortConvParams
from support.backends import Bound, backend_for, poison
from support.bound_scan import cca, lightning, mamba1, mamba2
from support.model_configs import tiny

__all__ = ["FAMILIES", "GDN_CONFIG", "Bound", "backend_for", "delta", "delta_params", "poison"]

GDN_CONFIG = {
    "model_type": "qwen3_5_text",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "vocab_size": 64,
}
LFM2_CONFIG = {
    "model_type": "lfm2",
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "conv_L_cache": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "vocab_size": 64,
}


def delta_params(dims: DeltaDims, seed: int = 0) -> DeltaParams:
    """Random weights of a delta layer, gates spread from slow to fast."""
    rng = torch.Generator().manual_seed(seed)
    channels = sum(size for _, size in dims.segments)
    bias = (dims.HV,) if dims.gate is GateKind.SCALAR else (dims.HV, dims.K)
    gate = Gate(
        dims.gate,
        torch.rand(dims.HV, generator=rng) * 2 - 1,
        torch.randn(bias, generator=rng),
        dims.lower_bound,
        dims.beta_scale,
    )
    weight = torch.randn(channels, dims.W, generator=rng)
    norm = torch.rand(dims.V, generator=rng) + 0.5
    return DeltaParams(weight, None, gate, norm, 1e-6)


def delta(config: dict[str, object] | None = None) -> Bound:
    """A Gated DeltaNet or Kimi Delta layer with its gated norm."""
    backend = backend_for(config or GDN_CONFIG)
    spec = next(backend.selection.model.stateful_layers())
    dims = spec.dims
    assert isinstance(dims, DeltaDims)
    params = delta_params(dims)
    layer = backend.layer(spec.index, params)
    assert isinstance(layer, DeltaLayer)
    sizes = [size for _, size in dims.segments]

    def inputs(tokens: int) -> list[Tensor]:
        return [
            torch.randn(tokens, sum(sizes)),
            torch.randn(tokens, *params.gate.dt_bias.shape),
            torch.randn(tokens, dims.HV),
            torch.randn(tokens, dims.HV, dims.V),
        ]

    def alone(given: list[Tensor]) -> Tensor:
        x, a, b, z = given
        tokens = x.shape[0]
        ends = torch.tensor([0, tokens], dtype=torch.int32)
        none, slot = torch.tensor([-1]), torch.tensor([1])
        window = torch.zeros(2, sum(sizes), dims.W - 1)
        mixed, _ = reference.conv_prefill(
            x, params.conv_weight, None, window, none, slot, none, ends, tokens, activation="silu"
        )
        q, k, v = mixed.split(sizes, dim=-1)
        o, _ = reference.delta_rule_prefill(
            q.reshape(tokens, dims.H, dims.K),
            k.reshape(tokens, dims.H, dims.K),
            v.reshape(tokens, dims.HV, dims.V),
            a,
            b,
            params.gate,
            torch.zeros(2, dims.HV, dims.V, dims.K),
            none,
            slot,
            ends,
            tokens,
        )
        assert params.norm_weight is not None
        activation = "silu" if dims.gate is GateKind.SCALAR else "sigmoid"
        return reference.gated_rms_norm(
            o, z, params.norm_weight, params.norm_eps, activation=activation
        )

    return Bound(backend, inputs, lambda given: layer(*given), alone)


def short_conv() -> Bound:
    """An LFM2 short-conv layer."""
    backend = backend_for(LFM2_CONFIG)
    spec = next(backend.selection.model.stateful_layers())
    dims = spec.dims
    assert isinstance(dims, ShortConvDims)
    weight = torch.randn(dims.hidden, dims.W)
    layer = backend.layer(spec.index, ShortConvParams(weight, None))
    assert isinstance(layer, ShortConvLayer)

    def alone(given: list[Tensor]) -> Tensor:
        B, C, x = given
        tokens = x.shape[0]
        ends = torch.tensor([0, tokens], dtype=torch.int32)
        none = torch.tensor([-1])
        window = torch.zeros(2, dims.hidden, dims.W - 1)
        y, _ = reference.conv_prefill(
            B * x, weight, None, window, none, none, none, ends, tokens, activation=None
        )
        return C.double() * y

    def inputs(tokens: int) -> list[Tensor]:
        return [torch.randn(tokens, dims.hidden) for _ in range(3)]

    return Bound(backend, inputs, lambda given: layer(*given), alone)


FAMILIES: dict[str, Callable[[], Bound]] = {
    "cca": cca,
    "falcon_h1": lambda: mamba2(tiny("falcon_h1")),
    "gated_delta_net": delta,
    "kimi_delta": lambda: delta(tiny("kimi_linear")),
    "lightning": lightning,
    "mamba1": mamba1,
    "mamba2": mamba2,
    "safe_delta": lambda: delta(tiny("bailing_hybrid")),
    "short_conv": short_conv,
    "zamba": lambda: mamba1("zamba"),
}
