"""The page on `hal generate` says what the command does."""

import inspect
import json
import re
from pathlib import Path

import pytest

from hal.cli.generate import generate
from hal.integrations.transformers import DRIVEN
from hal.integrations.transformers.families import LEFT_ALONE
from support.models import folder_of

PAGE = (Path(__file__).parents[2] / "docs" / "generate.md").read_text(encoding="utf-8")


def test_the_python_of_the_page_runs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(code.replace('"DIR"', repr(str(folder_of("lfm2", root)))), {})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("lfm2 runs on cpu")
    assert sum(line[:2] in ("0 ", "1 ") for line in lines) == 32


def test_every_option_is_in_the_table_and_no_other() -> None:
    rows = re.findall(r"^\| `(--[a-z-]+)", PAGE, re.MULTILINE)
    names = {"as_json": "json"}
    options = {names.get(p, p).replace("_", "-") for p in inspect.signature(generate).parameters}
    assert {row.removeprefix("--") for row in rows} == options - {"folder"}


def test_the_families_are_those_that_are_driven_and_those_that_are_left_alone() -> None:
    section = PAGE[PAGE.index("## Families") : PAGE.index("## From Python")]
    table = "\n".join(line for line in section.splitlines() if line.startswith("|"))
    assert families(table) - {"model_type", "hal"} == DRIVEN
    whole = {name.removesuffix("_text").removesuffix("_mm_model") for name in LEFT_ALONE}
    assert families(section) - families(table) == whole


def families(text: str) -> set[str]:
    return set(re.findall(r"`([a-z0-9_]+)`", text))


def test_the_json_of_the_page_is_json() -> None:
    (example,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert set(json.loads(example)) == {
        "index", "prompt", "prompt_ids", "ids", "text", "finish_reason", "timings",
    }  # fmt: skip
