"""Tiny random checkpoints that a stock engine answers for, and the model itself as the oracle."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

TINY = Path(__file__).parents[1] / "data" / "configs" / "tiny"
TOKENS = 8
SHORT = [[5], [6, 7], [11, 12, 13], [21, 22, 23, 24, 25]]
"""Shorter and longer than a conv's window, in one batch."""

Rounds = Sequence[Sequence[Sequence[int]]]


@dataclass(frozen=True)
class Checkpoint:
    """A tiny random model: its folder, and the model itself as the oracle."""

    folder: Path
    model: Any

    def greedy(self, prompt: Sequence[int]) -> tuple[list[int], list[float]]:
        """Tokens and log-probabilities by whole forwards, without any cache."""
        ids, found = list(prompt), []
        for _ in range(TOKENS):
            with torch.no_grad():
                logits = self.model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            scores = logits.float().log_softmax(-1)
            ids.append(int(scores.argmax()))
            found.append(float(scores.max()))
        return ids[len(prompt) :], found


def config_of(family: str, extra: Mapping[str, object]) -> Any:
    """A family's tiny config with an engine's entries; a variant is named behind a dash."""
    data = json.loads((TINY / f"{family.partition('-')[0]}.json").read_text())
    return AutoConfig.for_model(**data | extra | {"initializer_range": 0.2})


def saved(folder: Path, config: Any) -> Checkpoint:
    """A checkpoint of random weights, saved in float32."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(folder)
    return Checkpoint(folder, model)


def check(found: Any, oracle: Checkpoint, rounds: Rounds, bar: float) -> None:
    """Every row's tokens are the oracle's, and its log-probabilities within the bar."""
    assert "error" not in found, found.get("text", found["log"])[-3000:]
    for prompts, rows in zip(rounds, found["rounds"], strict=True):
        for prompt, row in zip(prompts, rows, strict=True):
            tokens, logprobs = oracle.greedy(prompt)
            assert row["tokens"] == tokens
            gaps = [abs(a - b) for a, b in zip(row["logprobs"], logprobs, strict=True)]
            assert max(gaps) < bar
