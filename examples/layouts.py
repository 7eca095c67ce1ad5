"""The two Hugging Face layouts: a config and the shape of every tensor, nothing filled in."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Config = dict[str, object]
Shapes = dict[str, tuple[int, ...]]

EPS = 1e-6
HEADS, HEAD_DIM, MLP = 2, 32, 16
CONV = 4
"""Width of Qwen3.5's convolution."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A model folder's `config.json` and tensor shapes."""

    config: Config
    shapes: Shapes

    def zeros(self) -> dict[str, Array]:
        """Return every tensor in float32, all zero."""
        return {name: np.zeros(shape, np.float32) for name, shape in self.shapes.items()}


def qwen3_5(N: int, hidden: int) -> Layout:
    """Lay out a gated delta net layer with one head of N x N and a full-attention layer."""
    config: Config = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        **_shared_config(N, hidden),
        "rms_norm_eps": EPS,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_conv_kernel_dim": CONV,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 1,
        "linear_key_head_dim": N,
        "linear_value_head_dim": N,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": False,
    }
    shapes = {"lm_head.weight": (N, hidden), "model.norm.weight": (hidden,)}
    shapes |= _embedding(N, hidden) | _delta_net("model.layers.0.linear_attn.", N, hidden)
    attention = "model.layers.1.self_attn."
    shapes |= _attention(attention, hidden, norm="norm", out="o_proj")
    shapes[attention + "q_proj.weight"] = (2 * HEADS * HEAD_DIM, hidden)  # query and output gate
    for layer in ("model.layers.0.", "model.layers.1."):
        shapes[layer + "input_layernorm.weight"] = (hidden,)
        shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
        shapes |= _mlp(layer + "mlp.", hidden, ("gate_proj", "up_proj", "down_proj"))
    return Layout(config, shapes)


def lfm2(N: int, hidden: int, width: int) -> Layout:
    """Lay out a short-conv layer and a full-attention layer; the head is the embedding."""
    config: Config = {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        **_shared_config(N, hidden),
        "norm_eps": EPS,
        "layer_types": ["conv", "full_attention"],
        "conv_L_cache": width,
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
    }
    conv = "model.layers.0.conv."
    shapes: Shapes = {
        "model.embedding_norm.weight": (hidden,),
        conv + "in_proj.weight": (3 * hidden, hidden),
        conv + "conv.weight": (hidden, 1, width),
        conv + "out_proj.weight": (hidden, hidden),
    }
    shapes |= _embedding(N, hidden)
    shapes |= _attention("model.layers.1.self_attn.", hidden, norm="layernorm", out="out_proj")
    for layer in ("model.layers.0.", "model.layers.1."):
        shapes[layer + "operator_norm.weight"] = (hidden,)
        shapes[layer + "ffn_norm.weight"] = (hidden,)
        shapes |= _mlp(layer + "feed_forward.", hidden, ("w1", "w3", "w2"))
    return Layout(config, shapes)


def _shared_config(N: int, hidden: int) -> Config:
    return {
        "dtype": "float32",
        "vocab_size": N,
        "hidden_size": hidden,
        "intermediate_size": MLP,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _embedding(N: int, hidden: int) -> Shapes:
    return {"model.embed_tokens.weight": (N, hidden)}


def _delta_net(prefix: str, N: int, hidden: int) -> Shapes:
    return {
        prefix + "in_proj_qkv.weight": (3 * N, hidden),
        prefix + "in_proj_z.weight": (N, hidden),
        prefix + "in_proj_b.weight": (1, hidden),
        prefix + "in_proj_a.weight": (1, hidden),
        prefix + "conv1d.weight": (3 * N, 1, CONV),
        prefix + "A_log": (1,),
        prefix + "dt_bias": (1,),
        prefix + "norm.weight": (N,),
        prefix + "out_proj.weight": (hidden, N),
    }


def _attention(prefix: str, hidden: int, norm: str, out: str) -> Shapes:
    return {
        prefix + "q_proj.weight": (HEADS * HEAD_DIM, hidden),
        prefix + "k_proj.weight": (HEAD_DIM, hidden),
        prefix + "v_proj.weight": (HEAD_DIM, hidden),
        prefix + f"{out}.weight": (hidden, HEADS * HEAD_DIM),
        prefix + f"q_{norm}.weight": (HEAD_DIM,),
        prefix + f"k_{norm}.weight": (HEAD_DIM,),
    }


def _mlp(prefix: str, hidden: int, names: tuple[str, str, str]) -> Shapes:
    gate, up, down = (f"{prefix}{name}.weight" for name in names)
    return {gate: (MLP, hidden), up: (MLP, hidden), down: (hidden, MLP)}
