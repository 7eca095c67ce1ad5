"""Tiny Hugging Face models with weights that make every mixer count."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from torch import nn

from hal.integrations.transformers import families

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

CONFIGS = Path(__file__).parents[1] / "data" / "configs" / "tiny"

DRIVEN = tuple(sorted(families.DRIVEN))
"""Every tiny config that the transformers runner drives, named by its model_type."""

RANGES = {
    "A_log": (-1.5, 1.0),
    "dt_bias": (-2.0, 1.0),
    "dt_proj.bias": (-3.0, 0.0),
    "dt_proj_bias": (-3.0, 0.0),
    "temp": (0.3, 0.3),
}
"""Uniform ranges by the end of a name; ZAYA's key temperature starts at 0, so no key counts."""

ONES = ("norm", "scale")
"""Vectors that are ones but for noise, by a part of their name."""


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
        noise = torch.randn(parameter.shape, generator=generator)
        low_high = next((r for name, r in RANGES.items() if path.endswith(name)), None)
        if low_high is not None:
            low, high = low_high
            parameter.copy_(low + (high - low) * torch.rand(parameter.shape, generator=generator))
        elif path.endswith(".D"):
            parameter.copy_(0.5 * noise)
        elif parameter.ndim > 1:
            inputs = parameter[0].numel() if "conv" in path else parameter.shape[-1]
            parameter.copy_(noise / inputs**0.5)
        elif any(part in path for part in ONES):
            parameter.add_(0.1 * noise)
        else:
            parameter.copy_(0.1 * noise)


@cache
def folder_of(name: str, root: Path, seed: int = 0) -> Path:
    """The folder of a family's seeded model beneath `root`, written once a process."""
    return save_model(make_model(name, seed), root / f"{name}-{seed}")


def solo(
    model: PreTrainedModel, prompt: Sequence[int], count: int, forced: Sequence[int] | None = None
) -> tuple[list[int], torch.Tensor]:
    """What transformers alone generates greedily: the tokens, and their logits `[n, vocab]`.

    `forced` tokens are taken in place of the best ones; the logits stay the model's own.
    """
    ids = torch.tensor([list(prompt)])
    force = [] if forced is None else [_Forced(len(prompt), forced)]
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            logits_processor=force,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).float()


def whole(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """The logits `[T, vocab]` of one forward over a whole sequence, without any cache."""
    with torch.inference_mode():
        out = model(input_ids=torch.tensor([list(tokens)]), use_cache=False)
    return out.logits[0].float()


class _Forced(transformers.LogitsProcessor):
    """Leaves one token a step."""

    def __init__(self, begin: int, tokens: Sequence[int]) -> None:
        self._begin, self._tokens = begin, tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        only = torch.full_like(scores, float("-inf"))
        only[:, self._tokens[input_ids.shape[1] - self._begin]] = 0
        return only
