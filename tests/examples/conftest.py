"""The demo's scripts as modules, and its models built once."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MODELS = ("induction-qwen3_5", "tables-lfm2")


def load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True, slots=True)
class Example:
    """A demo model: its folder, its rule as a function, its prompts as text and as ids."""

    name: str
    folder: Path
    model: Any
    tokenizer: Any
    rule: dict[str, Any]
    continue_by: Callable[[dict[str, Any], list[int], int], list[int]]
    prompts: list[str]

    def predict(self, ids: list[int], count: int) -> list[int]:
        return self.continue_by(self.rule, ids, count)

    @property
    def prompt_ids(self) -> list[list[int]]:
        return [self.tokenizer(prompt).input_ids for prompt in self.prompts]


@pytest.fixture(scope="session")
def examples_dir() -> Path:
    return EXAMPLES


@pytest.fixture(scope="session")
def load() -> Callable[[Path], ModuleType]:
    return load_module


@pytest.fixture(scope="session")
def predict() -> ModuleType:
    return load_module(EXAMPLES / "predict.py")


@pytest.fixture(scope="session")
def words() -> ModuleType:
    return load_module(EXAMPLES / "words.py")


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models")
    subprocess.run([sys.executable, str(EXAMPLES / "build_models.py"), str(out)], check=True)
    return out


def read_prompts(name: str) -> list[str]:
    lines = (EXAMPLES / "prompts" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]


@pytest.fixture(scope="session")
def built(models_dir: Path, predict: ModuleType) -> dict[str, Example]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    found = {}
    for name in MODELS:
        folder = models_dir / name
        rule = json.loads((folder / "rule.json").read_text(encoding="utf-8"))
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        found[name] = Example(
            name,
            folder,
            model,
            AutoTokenizer.from_pretrained(folder),
            rule,
            predict.RULES[rule["rule"]],
            read_prompts(name),
        )
    return found


@pytest.fixture(params=MODELS, scope="session")
def example(request: pytest.FixtureRequest, built: dict[str, Example]) -> Example:
    return built[request.param]
