"""The demo has teeth: a state that is lost when a request resumes makes it fail."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from hal.integrations.transformers import Engine, load, open_folder
from hal.runtime.backend import Backend
from hal.runtime.batch import Batch

if TYPE_CHECKING:
    from conftest import Example

LENGTH, SLOTS, BUDGET = 24, 3, 9


def rows_of(engine: Engine, example: "Example") -> list[dict[str, Any]]:
    """Serve the demo's prompts as the demo does; one row a prompt, as `hal generate` prints it."""
    ids: dict[int, list[int]] = {}
    asked = {engine.submit(given, LENGTH): given for given in example.prompt_ids}
    for event in engine.run():
        if event.token is not None:
            ids.setdefault(event.request, []).append(event.token)
    return [
        {"prompt": text, "prompt_ids": given, "ids": ids[request], "finish_reason": "length"}
        for text, (request, given) in zip(example.prompts, asked.items(), strict=True)
    ]


def forget(backend: Backend, name: str) -> None:
    """Zero one kind of state of every slot that a step resumes from."""
    begin = backend.begin

    def forgetful(batch: Batch) -> None:
        for spec in backend.pool.states:
            if spec.name == name:
                for slot in batch.src:
                    if slot >= 0:
                        backend.pool.tensors(spec.layer)[name][slot] = 0
        begin(batch)

    backend.begin = forgetful  # type: ignore[method-assign]


def differences(example: "Example", demo: ModuleType, lost: str | None) -> list[str]:
    """What the demo would print between the rule and the text, with a state lost on resume."""
    folder = open_folder(example.folder, "cpu")
    runner = load(folder, slots=SLOTS, max_batch=SLOTS, max_tokens=BUDGET, max_len=256)
    if lost is not None:
        forget(runner.backend, lost)
    made = rows_of(Engine(runner, max_batch=SLOTS, token_budget=BUDGET), example)
    guessed = [
        {"prompt": text, "prompt_ids": ids, "ids": example.predict(ids, LENGTH)}
        for text, ids in zip(example.prompts, example.prompt_ids, strict=True)
    ]
    found: list[str] = demo.compare(guessed, made)
    return found


@pytest.fixture(scope="module")
def demo(examples_dir: Path, load: Callable[[Path], ModuleType]) -> ModuleType:
    return load(examples_dir / "demo.py")


def test_the_demo_agrees_when_nothing_is_lost(example: "Example", demo: ModuleType) -> None:
    assert differences(example, demo, None) == []


def test_a_conv_state_lost_on_resume_fails_the_demo(example: "Example", demo: ModuleType) -> None:
    assert len(differences(example, demo, "conv")) >= 5


def test_a_recurrent_state_lost_on_resume_fails_the_demo(
    built: "dict[str, Example]", demo: ModuleType
) -> None:
    assert len(differences(built["induction-qwen3_5"], demo, "recurrent")) >= 5
