"""The rule alone: hand-worked continuations, and a process that runs no model."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

if TYPE_CHECKING:
    from conftest import Example

# A habit of ten less one: nothing here is a word that a test remembers.
MEMORY = {"rule": "memory", "lag": 2, "habit": [90 + i for i in range(10)] + [0] * 90}
TABLES = {
    "rule": "tables",
    "weights": [2, 3, 4],
    "tables": [[10, 11, 12, 13], [20, 21, 10, 13], [30, 11, 10, 30]],
}
PROMPT_IDS = st.lists(st.integers(4, 12), min_size=1, max_size=30)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        pytest.param([7], [97], id="one word: its habit"),
        pytest.param([7, 8], [98], id="nothing came two words after the 7 yet: the habit of 8"),
        pytest.param([1, 2, 3, 1, 5], [3], id="a 3 came two words after the 1"),
        pytest.param([1, 2, 3, 1, 5, 4, 1, 9], [4], id="the newest pair of 1 is the 4"),
        pytest.param([1, 2, 3, 1, 2], [3, 1, 2, 3, 1], id="a passage begins again"),
        pytest.param([5, 5, 5], [5, 5], id="a word two words after itself"),
        pytest.param([5, 5], [95, 95, 0], id="no pair yet; then 5 leads to 95, then 95 to nothing"),
    ],
)
def test_the_memory_answers(predict: ModuleType, ids: list[int], expected: list[int]) -> None:
    assert predict.continue_by_memory(MEMORY, ids, len(expected)) == expected


def test_a_lag_of_one_is_what_followed_the_present_word(predict: ModuleType) -> None:
    rule = MEMORY | {"lag": 1}
    assert predict.continue_by_memory(rule, [1, 2, 3, 1], 4) == [2, 3, 1, 2]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        pytest.param([0], 10, id="one word has the only vote"),
        pytest.param([0, 0], 20, id="the older of two wins"),
        pytest.param([0, 0, 0], 30, id="the oldest of three wins"),
        pytest.param([0, 1, 1], 30, id="4 votes for 30 against 3 for 21 and 2 for 11"),
        pytest.param([3, 0, 1], 30, id="4 votes for 30 against 3 for 20 and 2 for 11"),
        pytest.param([0, 2, 0], 10, id="3 and 2 votes for 10 outweigh 4 for 30"),
        pytest.param([2, 0, 0], 10, id="4 and 2 votes for 10"),
        pytest.param([0, 0, 0, 0, 2, 0], 10, id="a fourth word has no vote"),
    ],
)
def test_the_tables_vote(predict: ModuleType, ids: list[int], expected: int) -> None:
    assert predict.continue_by_tables(TABLES, ids, 1) == [expected]


@given(ids=PROMPT_IDS, first=st.integers(0, 12), rest=st.integers(0, 12))
def test_a_continuation_can_be_taken_up_anywhere(
    example: "Example", ids: list[int], first: int, rest: int
) -> None:
    whole = example.predict(ids, first + rest)
    assert len(whole) == first + rest
    assert whole[first:] == example.predict([*ids, *whole[:first]], rest)


@given(ids=PROMPT_IDS)
def test_the_prompt_is_left_as_it_was(example: "Example", ids: list[int]) -> None:
    before = list(ids)
    example.predict(ids, 5)
    assert ids == before


@given(ids=PROMPT_IDS)
def test_a_special_token_is_never_predicted(example: "Example", ids: list[int]) -> None:
    assert min(example.predict(ids, 40)) >= 4


def run(examples_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(examples_dir / "predict.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_process_prints_a_row_for_each_prompt(examples_dir: Path, example: "Example") -> None:
    prompts = str(examples_dir / "prompts" / f"{example.name}.jsonl")
    answer = run(examples_dir, str(example.folder), prompts, "--max-new-tokens", "5")
    rows: list[dict[str, Any]] = [json.loads(line) for line in answer.stdout.splitlines()]
    assert (answer.returncode, answer.stderr) == (0, "")
    assert [row["prompt"] for row in rows] == example.prompts
    assert [row["prompt_ids"] for row in rows] == example.prompt_ids
    assert [row["ids"] for row in rows] == [example.predict(i, 5) for i in example.prompt_ids]
    assert [row["text"] for row in rows] == [example.tokenizer.decode(row["ids"]) for row in rows]


def test_an_unknown_word_is_read_as_the_tokenizer_reads_it(
    predict: ModuleType, example: "Example"
) -> None:
    (row,) = predict.predict(example.folder, ["the xylophone"], 3)
    assert row["prompt_ids"] == example.tokenizer("the xylophone").input_ids


def test_an_empty_prompt_is_refused_in_one_line(
    examples_dir: Path, example: "Example", tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": " "}\n', encoding="utf-8")
    answer = run(examples_dir, str(example.folder), str(prompts))
    assert (answer.returncode, answer.stdout) == (1, "")
    assert answer.stderr == ("predict.py: a prompt is empty; the rule needs at least one word\n")


def test_the_process_imports_nothing_that_runs_a_model(
    examples_dir: Path, example: "Example"
) -> None:
    script = (
        "import runpy, sys\n"
        "before = set(sys.modules)\n"
        "sys.argv = sys.argv[1:]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "tops = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "sys.exit(' '.join(sorted(tops - sys.stdlib_module_names)) or 0)\n"
    )
    prompts = str(examples_dir / "prompts" / f"{example.name}.jsonl")
    arguments = [str(examples_dir / "predict.py"), str(example.folder), prompts]
    command = [sys.executable, "-c", script, *arguments]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.count("\n") == 6


def test_the_prompts_are_six_of_unequal_length_in_known_words(example: "Example") -> None:
    lengths = [len(ids) for ids in example.prompt_ids]
    assert len(set(lengths)) == len(lengths) == 6
    assert (min(lengths), max(lengths)) == (1, 39)
    assert min(min(ids) for ids in example.prompt_ids) >= 4
