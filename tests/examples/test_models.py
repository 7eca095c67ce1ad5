"""The model folders: what is in them, and that their words and ids go both ways."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from conftest import Example

FILES = {"config.json", "model.safetensors", "rule.json", "tokenizer.json", "tokenizer_config.json"}
SPECIAL = 4
WORDS = 64


def build(examples_dir: Path, *arguments: str, seed: str = "0") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(examples_dir / "build_models.py"), *arguments]
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_two_builds_write_the_same_bytes(examples_dir: Path, tmp_path: Path) -> None:
    for seed in ("1", "2"):
        assert build(examples_dir, str(tmp_path / seed), seed=seed).returncode == 0
    assert len(contents(tmp_path / "1")) == 2 * len(FILES)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_a_second_build_into_the_same_folder_changes_nothing(
    examples_dir: Path, tmp_path: Path
) -> None:
    build(examples_dir, str(tmp_path))
    first = contents(tmp_path)
    assert build(examples_dir, str(tmp_path)).returncode == 0
    assert contents(tmp_path) == first


def test_a_build_without_a_folder_says_how_to_call_it(examples_dir: Path) -> None:
    answer = build(examples_dir)
    assert answer.returncode == 2
    assert answer.stderr == "usage: build_models.py OUT_DIR\n"


def test_the_build_does_not_import_torch(examples_dir: Path, tmp_path: Path) -> None:
    script = (
        "import runpy, sys; sys.argv = ['build_models.py', sys.argv[2]]\n"
        f"sys.path.insert(0, {str(examples_dir)!r})\n"
        "import build_models; build_models.main(sys.argv[1:])\n"
        "sys.exit(' '.join({'torch', 'transformers', 'hal'} & set(sys.modules)) or 0)"
    )
    command = [sys.executable, "-c", script, "-", str(tmp_path)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert contents(tmp_path)


def test_a_folder_holds_safetensors_in_float32_and_nothing_else(example: "Example") -> None:
    assert {path.name for path in example.folder.iterdir()} == FILES
    with safe_open(example.folder / "model.safetensors", framework="pt") as tensors:
        found = [tensors.get_tensor(name) for name in tensors.keys()]
    assert {tensor.dtype for tensor in found} == {torch.float32}
    assert 100_000 <= sum(tensor.numel() for tensor in found) <= 300_000
    assert all(torch.isfinite(tensor).all() for tensor in found)


def test_transformers_finds_every_weight_and_no_other(example: "Example") -> None:
    _, info = AutoModelForCausalLM.from_pretrained(example.folder, output_loading_info=True)
    assert {key: value for key, value in info.items() if value} == {}


def test_the_attention_layer_and_the_mlps_add_nothing(example: "Example") -> None:
    silent = [
        parameter
        for name, parameter in example.model.named_parameters()
        if "self_attn.o" in name or "down_proj" in name or "feed_forward.w2" in name
    ]
    assert len(silent) == 3
    assert not any(parameter.any() for parameter in silent)


def test_the_layers_are_one_linear_and_one_full(built: dict[str, "Example"]) -> None:
    layers = {name: example.model.config.layer_types for name, example in built.items()}
    assert layers == {
        "induction-qwen3_5": ["linear_attention", "full_attention"],
        "tables-lfm2": ["conv", "full_attention"],
    }


def test_lfm2_ties_its_head_and_stores_it_once(built: dict[str, "Example"]) -> None:
    model = built["tables-lfm2"].model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with safe_open(built["tables-lfm2"].folder / "model.safetensors", framework="pt") as tensors:
        assert "lm_head.weight" not in tensors.keys()


@given(ids=st.lists(st.integers(SPECIAL, WORDS - 1), min_size=1, max_size=50))
def test_text_and_ids_go_both_ways(example: "Example", ids: list[int]) -> None:
    text = example.tokenizer.decode(ids)
    assert len(text.split()) == len(ids)
    assert example.tokenizer(text).input_ids == ids


def test_spaces_and_line_ends_only_separate(example: "Example") -> None:
    plain = example.tokenizer("the small cat").input_ids
    assert example.tokenizer("  the\tsmall \n cat ").input_ids == plain


def test_a_word_outside_the_vocabulary_reads_as_unknown(example: "Example") -> None:
    tokenizer = example.tokenizer
    assert tokenizer("the xylophone").input_ids == [SPECIAL, tokenizer.unk_token_id]


def test_the_tokenizer_knows_the_special_ids_of_the_config(example: "Example") -> None:
    tokenizer, config = example.tokenizer, example.model.config
    special = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert special == (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)
    assert len(tokenizer) == config.vocab_size == WORDS


def test_no_table_leads_to_a_special_token(example: "Example") -> None:
    rule: dict[str, Any] = example.rule
    leads = rule["tables"] if rule["rule"] == "tables" else [rule["habit"]]
    assert all(len(table) == WORDS for table in leads)
    assert min(min(table) for table in leads) >= SPECIAL


def test_no_two_votes_of_the_tables_weigh_the_same(built: dict[str, "Example"]) -> None:
    a, b, c = built["tables-lfm2"].rule["weights"]
    sums = [a, b, c, a + b, a + c, b + c, a + b + c]
    assert len(set(sums) - {a + b + c}) >= 5
    assert {a, b} & {c} == set() and a + b != c and a + c != b and b + c != a and a != b


def test_the_words_differ_and_every_kind_has_as_many(words: ModuleType) -> None:
    assert len(set(words.VOCABULARY)) == len(words.VOCABULARY) == WORDS
    assert {len(kind) for kind in words.KINDS} == {10}


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_table_steps_through_the_kinds(words: ModuleType, step: int) -> None:
    kind_of = {word: number for number, kind in enumerate(words.KINDS) for word in kind}
    leads = words.table(step, factor=3, shift=1)
    for word, number in zip(words.VOCABULARY[SPECIAL:], leads[SPECIAL:], strict=True):
        assert kind_of[words.VOCABULARY[number]] == (kind_of[word] + step) % len(words.KINDS)
