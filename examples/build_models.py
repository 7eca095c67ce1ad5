"""Write two language models whose weights were compiled by hand, as Hugging Face folders.

Nothing is trained or downloaded: every number below follows from the rule that the model obeys.

induction-qwen3_5 (a gated delta net layer, then an attention layer that adds nothing)
    The convolution hands the delta rule the word of two steps ago as key, the word of one step ago
    as query and the present word as value. The memory so answers: what came two words after the
    last time the previous word was seen? An unknown word reads zeros, and the head falls back on
    the habit of the present word.
tables-lfm2 (a short convolution of width 3, then an attention layer that adds nothing)
    The convolution puts the last three words side by side, and each votes for its own next word.

`rule.json` holds the rule's parameters for `predict.py`, which needs no model to say what comes.
"""

import json
import sys
from math import exp, sqrt
from pathlib import Path

import layouts
import numpy as np
from layouts import EPS, Array, Config
from safetensors.numpy import save
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from words import SPECIAL, VOCABULARY, table

Weights = dict[str, Array]

N = len(VOCABULARY)
HABIT = table(step=1, factor=3, shift=1)

LAG = 2
LOUD = 8.0
"""An input at which silu is all but the identity: silu(8) = 7.997, silu(0) = 0."""
RECALL = 2.0
"""How loud the memory speaks; habit speaks at 1, so what was seen wins over what is usual."""

WEIGHTS = (2.0, 3.0, 4.0)
"""The older word has the louder vote, so that a lost window is heard; any two outvote the third."""
TABLES = (HABIT, table(step=2, factor=7, shift=3), table(step=3, factor=9, shift=4))
VOTE = 16.0
"""How loud one vote is in the residual stream, where the word itself stands at 1."""


def induction() -> tuple[Config, Weights, Config]:
    """Compile the memory of pairs at lag 2: config, weights, rule.

    The stream is [present word, answer], both one-hot; the head reads both halves.
    """
    layout = layouts.qwen3_5(N, hidden=2 * N)
    weights = layout.zeros()
    word, answer = slice(0, N), slice(N, 2 * N)
    query, key, value = (slice(part * N, (part + 1) * N) for part in range(3))
    mixer = "model.layers.0.linear_attn."
    weights["model.embed_tokens.weight"][:, word] = np.eye(N)
    weights["model.layers.0.input_layernorm.weight"][:] = _unit_norm(2 * N) - 1
    for part, age in ((query, LAG - 1), (key, LAG), (value, 0)):
        weights[mixer + "in_proj_qkv.weight"][part, word] = np.eye(N)
        weights[mixer + "conv1d.weight"][part, 0, -1 - age] = LOUD
    weights[mixer + "in_proj_b.weight"][:, word] = 30  # beta = 1: a new value replaces the old one
    weights[mixer + "A_log"][:] = -30  # no decay: a pair is kept for good
    weights[mixer + "in_proj_z.weight"][:, word] = LOUD
    weights[mixer + "norm.weight"][:] = 1
    gain = sqrt(N) * LOUD / (1 + exp(-LOUD))  # the gated norm of a one-hot row, its gate at LOUD
    weights[mixer + "out_proj.weight"][answer] = np.eye(N) * RECALL / gain
    weights["lm_head.weight"][HABIT, np.arange(N)] = 1
    weights["lm_head.weight"][:, answer] = np.eye(N)
    return layout.config, weights, {"rule": "memory", "lag": LAG, "habit": HABIT}


def tables() -> tuple[Config, Weights, Config]:
    """Compile the vote of the last three words: config, weights, rule.

    The stream is [word and votes, nothing, nothing]; the head is the embedding, as LFM2 ties them.
    """
    layout = layouts.lfm2(N, hidden=len(TABLES) * N, width=len(TABLES))
    weights = layout.zeros()
    for name in weights:
        if name.endswith("norm.weight"):
            weights[name][:] = 1
    word = slice(0, N)
    mixer = "model.layers.0.conv."
    weights["model.embed_tokens.weight"][:, word] = np.eye(N)
    weights["model.layers.0.operator_norm.weight"][:] = _unit_norm(len(TABLES) * N)
    gate_b, gate_c, copies = np.split(weights[mixer + "in_proj.weight"], 3)
    gate_b[:, word] = gate_c[:, word] = 1
    for age, (leads_to, weight) in enumerate(zip(TABLES, WEIGHTS, strict=True)):
        block = slice(age * N, (age + 1) * N)
        copies[block, word] = np.eye(N)
        weights[mixer + "conv.weight"][block, 0, -1 - age] = 1
        weights[mixer + "out_proj.weight"][word, block][leads_to, np.arange(N)] = VOTE * weight
    return layout.config, weights, {"rule": "tables", "weights": WEIGHTS, "tables": TABLES}


def _unit_norm(hidden: int) -> float:
    """Scale of an RMS norm that gives a one-hot vector back as it is."""
    return sqrt(1 / hidden + EPS)


def write(folder: Path, config: Config, weights: Weights, rule: Config) -> None:
    """Write one model folder: config, weights, tokenizer and the rule that `predict.py` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder)
    _write_json(folder / "config.json", config)
    _write_json(folder / "rule.json", rule)
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))


def _write_tokenizer(folder: Path) -> None:
    vocabulary = {word: number for number, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    names: Config = {f"{token.strip('<>')}_token": token for token in SPECIAL}
    names |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    _write_json(folder / "tokenizer_config.json", names)


def _write_json(path: Path, content: Config) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Build both models into the folder that the one argument names."""
    if len(arguments) != 1:
        print("usage: build_models.py OUT_DIR", file=sys.stderr)
        return 2
    for name, compiled in (("induction-qwen3_5", induction()), ("tables-lfm2", tables())):
        write(Path(arguments[0]) / name, *compiled)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
