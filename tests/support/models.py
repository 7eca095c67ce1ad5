"""Tiny Hugging Face models with weights that make every mixer count."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

CONFIGS = Path(__file__).parents[1] / "data" / "configs" / "tiny"

DRIVEN = (
    "lfm2",
    "lfm2_moe",
    "lfm2_vl",
    "olmo_hybrid",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
)
"""Every tiny config that the transformers runner drives."""

RANGES = {"A_log": (-1.5, 1.0), "dt_bias": (-2.0, 1.0)}


def config_of(name: str) -> dict[str, object]:
    """The tiny config of a family as plain data."""
    return json.loads((CONFIGS / f"{name}.json").read_text())


def make_model(
    name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object
) -> PreTrainedModel:
    """A family's model with fan-in weights; `changes` go over the text config's entries."""
    entries = config_of(name)
    text = entries.get("text_config", entries)
    text.update(changes)
    cls = getattr(transformers, entries["architectures"][0])
    config = cls.config_class.from_dict(entries)
    torch.manual_seed(seed)
    model = cls(config)
    fan_in(model, seed)
    return model.to(dtype).eval()


def save_model(model: PreTrainedModel, folder: Path, **options: object) -> Path:
    """Write a model as a Hugging Face folder with safetensors weights."""
    model.save_pretrained(folder, **options)
    return folder


@torch.no_grad()
def fan_in(model: nn.Module, seed: int) -> None:
    """Weights at the scale of their fan-in, so that a wrong state moves the logits by much."""
    generator = torch.Generator().manual_seed(seed)
    for path, parameter in model.named_parameters():
        name = path.rpartition(".")[2]
        noise = torch.randn(parameter.shape, generator=generator)
        if name in RANGES:
            low, high = RANGES[name]
            parameter.copy_(low + (high - low) * torch.rand(parameter.shape, generator=generator))
        elif "conv" in path and parameter.ndim == 3 and parameter.shape[1] == 1:
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        elif parameter.ndim > 1:
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        elif "norm" in path:
            parameter.add_(0.1 * noise)
        else:
            parameter.copy_(0.1 * noise)


@cache
def folder_of(name: str, root: Path, seed: int = 0) -> Path:
    """The folder of a family's seeded model beneath `root`, written once a process."""
    return save_model(make_model(name, seed), root / f"{name}-{seed}")


def solo(
    model: PreTrainedModel, prompt: Sequence[int], count: int
) -> tuple[list[int], torch.Tensor]:
    """What transformers alone generates greedily: the tokens, and their logits `[n, vocab]`."""
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).float()
