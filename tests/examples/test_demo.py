"""The demo ends with 0 when rule and engine agree on every word, and else says what went wrong."""

import copy
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

Answer = subprocess.CompletedProcess[str]
Row = dict[str, Any]
Load = Callable[[Path], ModuleType]
Change = Callable[[list[Row]], None]

GUESS = {"prompt": "the cat", "prompt_ids": [4, 24], "ids": [5, 6, 7], "text": "a one every"}
MADE = GUESS | {"index": 0, "finish_reason": "length", "timings": {}}


@pytest.fixture(scope="module")
def compare(load: Load, examples_dir: Path) -> Callable[[list[Row], list[Row]], list[str]]:
    found: Callable[[list[Row], list[Row]], list[str]] = load(examples_dir / "demo.py").compare
    return found


def test_equal_rows_have_no_difference(compare: Callable[..., list[str]]) -> None:
    assert compare([GUESS, GUESS], [MADE, MADE]) == []


@pytest.mark.parametrize(
    ("made", "difference"),
    [
        ({"ids": [5, 9, 7]}, "prompt 'the cat' differs at word 2"),
        ({"ids": [5, 6]}, "prompt 'the cat': 2 words generated, 3 predicted"),
        ({"ids": []}, "prompt 'the cat': 0 words generated, 3 predicted"),
        ({"ids": [5, 6, 7, 8]}, "prompt 'the cat': 4 words generated, 3 predicted"),
        ({"prompt_ids": [4]}, "prompt 'the cat' was read as other ids than the rule's"),
        ({"finish_reason": "eos"}, "prompt 'the cat' finished by eos, not by length"),
    ],
)
def test_a_difference_names_prompt_and_place(
    compare: Callable[..., list[str]], made: Row, difference: str
) -> None:
    assert compare([GUESS], [MADE | made]) == [difference]


@pytest.mark.parametrize(("guessed", "made"), [(2, 1), (1, 2), (6, 0)])
def test_a_missing_row_is_a_difference(
    compare: Callable[..., list[str]], guessed: int, made: int
) -> None:
    expected = [f"{guessed} prompts predicted, {made} generated"]
    assert compare([GUESS] * guessed, [MADE] * made) == expected


@given(row=st.integers(0, 5), word=st.integers(0, 23), wrong=st.integers(0, 63))
def test_any_single_wrong_word_is_found(
    compare: Callable[..., list[str]], row: int, word: int, wrong: int
) -> None:
    predicted = [GUESS | {"ids": [(r + w) % 64 for w in range(24)]} for r in range(6)]
    generated = copy.deepcopy([MADE | {"ids": guess["ids"]} for guess in predicted])
    changed = generated[row]["ids"][word] != wrong
    generated[row]["ids"][word] = wrong
    assert len(compare(predicted, generated)) == changed


class Engine:
    """A stand-in for the `hal` command: answers by the contract, with faults where asked for."""

    def __init__(self, demo: ModuleType) -> None:
        self.demo = demo
        self.calls: list[tuple[str, ...]] = []
        self.refused = {("tables-lfm2", "npu"): "refused: conv_state has no provider"}
        self.change: Change = lambda rows: None
        self.broken = ""

    def __call__(self, *arguments: str, allowed: tuple[int, ...] = (0,)) -> Answer:
        self.calls.append(arguments)
        args = ["python", "-m", "hal.cli", *arguments]
        if arguments[0] == "generate" and self.broken:
            return Answer(args, 0, self.broken, "")
        if arguments[0] == "generate":
            return Answer(args, 0, self.generate(*arguments[1:]), "")
        refusal = self.refused.get((Path(arguments[1]).name, arguments[3]))
        return Answer(args, int(refusal is not None), refusal or "fits\nmore", "")

    def generate(self, folder: str, *options: str) -> str:
        prompts = options[options.index("--prompts") + 1]
        script = str(self.demo.HERE / "predict.py")
        guesses = self.demo.python(script, folder, prompts, "--max-new-tokens", "24").stdout
        rows = [json.loads(line) for line in guesses.splitlines()]
        made = [row | {"index": i, "finish_reason": "length"} for i, row in enumerate(rows)]
        self.change(made)
        return "".join(json.dumps(row) + "\n" for row in reversed(made))


@pytest.fixture
def demo(load: Load, examples_dir: Path, tmp_path: Path) -> ModuleType:
    """The demo in a copy of its folder, so that its models go there."""
    here = tmp_path / "examples"
    shutil.copytree(examples_dir, here, ignore=shutil.ignore_patterns("models", "__pycache__"))
    return load(here / "demo.py")


@pytest.fixture
def engine(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Engine:
    stand_in = Engine(demo)
    monkeypatch.setattr(demo, "hal", stand_in)
    return stand_in


def failure(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the demo, which must fail: its reason, one line."""
    assert demo.main() == 1
    message = capsys.readouterr().err
    assert message.startswith("demo failed: ") and message.count("\n") == 1
    return message.removeprefix("demo failed: ").rstrip("\n")


def test_agreement_ends_with_zero_and_shows_both_texts(
    demo: ModuleType, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main() == 0
    lines = capsys.readouterr().out.splitlines()
    guessed = [line[11:] for line in lines if line.startswith("predicted  ")]
    made = [line[11:] for line in lines if line.startswith("generated  ")]
    assert len(guessed) == 12 and guessed == made
    assert sum(line.startswith("hal check --device") for line in lines) == 8
    assert lines[-1] == "Every word is the one that the rule predicts."


def test_the_engine_is_asked_as_the_contract_says(demo: ModuleType, engine: Engine) -> None:
    demo.main()
    folder = str(demo.HERE / "models" / "tables-lfm2")
    prompts = str(demo.HERE / "prompts" / "tables-lfm2.jsonl")
    serving = ("--max-batch", "3", "--token-budget", "9", "--max-new-tokens", "24", "--json")
    asked = ("generate", folder, "--device", "cpu", "--prompts", prompts, *serving)
    assert engine.calls[-1] == asked
    assert engine.calls[-2] == ("check", folder, "--device", "npu")


def test_a_wrong_word_fails_the_demo(
    demo: ModuleType, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(rows: list[Row]) -> None:
        rows[2]["ids"][6] ^= 1

    engine.change = change
    reason = failure(demo, capsys)
    where = "prompt 'my tired sailor waits below until my tired' differs at word 7"
    assert reason == f"induction-qwen3_5: {where}"


def test_a_lost_row_fails_the_demo(
    demo: ModuleType, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.change = lambda rows: rows.pop() and None
    assert failure(demo, capsys) == "induction-qwen3_5: 6 prompts predicted, 5 generated"


def test_a_row_without_ids_fails_the_demo(
    demo: ModuleType, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.change = lambda rows: rows[1].pop("ids") and None
    assert failure(demo, capsys) == "hal generate printed a row without ids"


def test_output_that_is_not_json_fails_the_demo(
    demo: ModuleType, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.broken = "loading weights"
    assert failure(demo, capsys) == "hal generate printed a line that is not JSON"


def test_a_cpu_that_refuses_fails_the_demo(
    demo: ModuleType, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.refused["induction-qwen3_5", "cpu"] = "no provider"
    assert failure(demo, capsys) == "hal check of induction-qwen3_5 on cpu: no provider"


@pytest.mark.parametrize("answer", [None, "refused: head dim 64"])
def test_an_npu_that_does_not_refuse_lfm2_for_its_state_fails_the_demo(
    demo: ModuleType, engine: Engine, capsys: pytest.CaptureFixture[str], answer: str | None
) -> None:
    del engine.refused["tables-lfm2", "npu"]
    if answer is not None:
        engine.refused["tables-lfm2", "npu"] = answer
    expected = "hal check does not refuse tables-lfm2 on npu for conv_state"
    assert failure(demo, capsys) == expected


@pytest.mark.parametrize("device", ["cuda", "rocm"])
def test_an_accelerator_may_refuse(demo: ModuleType, engine: Engine, device: str) -> None:
    engine.refused["induction-qwen3_5", device] = "no library"
    assert demo.main() == 0


def test_a_script_that_fails_is_named_with_its_last_words(
    demo: ModuleType, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    (demo.HERE / "build_models.py").write_text("import sys; sys.exit('first\\ndisk full')")
    assert failure(demo, capsys) == "build_models.py ended with 1: disk full"


def test_a_command_that_fails_is_named(demo: ModuleType) -> None:
    with pytest.raises(demo.Failed, match=r"^hal no-such-command ended with \d+: "):
        demo.hal("no-such-command")


def test_a_status_outside_the_allowed_ones_fails(demo: ModuleType, tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text("import sys; print('why'); sys.exit(3)")
    assert demo.python(str(script), allowed=(0, 3)).returncode == 3
    with pytest.raises(demo.Failed, match=r"^ends\.py ended with 3: why$"):
        demo.python(str(script), allowed=(0, 1))


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        ("the cat", "the cat"),
        ("a b c d e f g h", "a b c d e f g h"),
        ("a b c d e f g h i", "... b c d e f g h i"),
    ],
)
def test_a_long_prompt_is_shown_by_its_end(demo: ModuleType, prompt: str, shown: str) -> None:
    assert demo.shorten(prompt) == shown
