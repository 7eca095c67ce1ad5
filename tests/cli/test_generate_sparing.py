"""`hal generate --speculative N --prefix-cache`: the same tokens, and what was spared."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from hal.cli.errors import BAD_INPUT, REFUSED
from hal.cli.generate import generate
from hal.integrations.transformers import loading
from support.models import folder_of
from support.repeating import repeating_folder, shared_prompts

APP = typer.Typer(pretty_exceptions_enable=False)
APP.command()(generate)
SMALL = ("--max-batch", 3, "--token-budget", 12, "--max-new-tokens", 20, "--max-len", 64)
FAMILIES = ("lfm3", "qwen3_5_text", "bamba")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def prompts(root: Path) -> Path:
    file = root / "prompts.jsonl"
    file.write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in shared_prompts()))
    return file


def run(folder: Path, *options: object) -> Result:
    return CliRunner().invoke(APP, [str(folder), *map(str, options)])


def records(result: Result) -> list[dict[str, object]]:
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_the_same_and_the_statistics_come_last(
    root: Path, prompts: Path, name: str
) -> None:
    folder = repeating_folder(name, root)
    plain = records(run(folder, "--prompts", prompts, *SMALL, "--json"))
    spared = run(
        folder, "--prompts", prompts, *SMALL, "--json", "--speculative", 4,
        "--prefix-cache", "--prefix-slots", 2,
    )  # fmt: skip
    *found, last = records(spared)
    for name_of in ("index", "ids", "finish_reason"):
        assert [r[name_of] for r in found] == [r[name_of] for r in plain]
    speculation, prefixes = (last["statistics"][n] for n in ("speculation", "prefix_cache"))
    assert set(last) == {"statistics"}
    assert 0 < speculation["accepted"] <= speculation["drafted"]
    assert speculation["steps"] > 0
    assert prefixes["admitted"] == len(shared_prompts())
    assert all(prefixes[n] > 0 for n in ("hits", "saved", "stored", "evicted"))
    for key, total in (("saved", prefixes), ("drafted", speculation), ("accepted", speculation)):
        assert sum(record[key] for record in found) == total[key]


def table(result: Result) -> dict[str, str]:
    """The figures of the final table by their names."""
    assert result.exit_code == 0, result.stderr
    rows = [line for line in result.stderr.splitlines() if line.startswith("  ")]
    cells = [[cell.strip() for cell in row.split("  ") if cell.strip()] for row in rows]
    return {cell[-2]: cell[-1] for cell in cells}


def test_the_final_table_has_every_figure(root: Path, prompts: Path) -> None:
    folder = repeating_folder("lfm3", root)
    options = ("--speculative", 4, "--prefix-cache", "--prefix-slots", 2)
    *_, last = records(run(folder, "--prompts", prompts, *SMALL, *options, "--json"))
    drafts, prefixes = last["statistics"]["speculation"], last["statistics"]["prefix_cache"]
    shown = table(run(folder, "--prompts", prompts, *SMALL, *options))
    rate = f"{100 * drafts['accepted'] / drafts['drafted']:.0f} %"
    assert shown["verify steps"] == str(drafts["steps"])
    assert shown["accepted drafts"] == f"{drafts['accepted']} of {drafts['drafted']} ({rate})"
    assert shown["accepted drafts a step"] == f"{drafts['accepted'] / drafts['steps']:.2f}"
    assert shown["hits"] == f"{prefixes['hits']} of 8 prompts"
    fed = sum(map(len, shared_prompts()))
    share = f"{100 * prefixes['saved'] / fed:.0f} %"
    assert shown["prompt tokens saved"] == f"{prefixes['saved']} of {fed} ({share})"
    assert shown["states stored"] == str(prefixes["stored"])
    assert shown["states evicted"] == str(prefixes["evicted"])


@pytest.mark.parametrize(
    ("options", "there", "absent"),
    [
        (["--speculative", 3], "verify steps", "prefix cache"),
        (["--prefix-cache"], "prefix cache", "verify steps"),
    ],
)
def test_what_was_not_asked_for_is_not_in_the_table(
    root: Path, options: list[object], there: str, absent: str
) -> None:
    folder = repeating_folder("lfm3", root)
    given = ("--ids", "5 6 7", "--max-new-tokens", 4, *options)
    shown = run(folder, *given)
    assert shown.exit_code == 0
    assert there in shown.stderr and absent not in shown.stderr
    record, last = records(run(folder, *given, "--json"))
    assert len(last["statistics"]) == 1
    assert ("saved" in record) == (there == "prefix cache")
    assert ("drafted" in record) == ("accepted" in record) == (there == "verify steps")


def test_without_either_there_is_no_statistics_line(root: Path) -> None:
    (record,) = records(run(repeating_folder("lfm3", root), "--ids", "5", "--json"))
    assert "saved" not in record and "drafted" not in record


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--speculative", 1], "--speculative is 1, expected at least 2: a token and its draft"),
        (["--speculative", 0], "--speculative is 0, expected at least 2"),
        (["--prefix-cache", "--prefix-slots", 0], "--prefix-slots is 0, expected at least 1"),
    ],
)
def test_numbers_that_ask_for_nothing_are_one_line(
    root: Path, options: list[object], text: str
) -> None:
    result = run(repeating_folder("lfm3", root), "--ids", "5", *options)
    assert (result.exit_code, result.stdout) == (BAD_INPUT, "")
    assert text in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_slots_for_cached_states_without_a_cache_are_one_line(root: Path) -> None:
    result = run(repeating_folder("lfm3", root), "--ids", "5", "--prefix-slots", 4)
    assert (result.exit_code, result.stdout) == (BAD_INPUT, "")
    (line,) = result.stderr.splitlines()
    assert line.endswith("--prefix-slots is 4, but nothing is cached; add --prefix-cache")


def test_more_cached_states_than_the_prompts_can_leave_take_no_memory(
    root: Path, prompts: Path
) -> None:
    folder = repeating_folder("lfm3", root)
    options = ("--prompts", prompts, *SMALL, "--json", "--prefix-cache", "--prefix-slots")
    *_, enough = records(run(folder, *options, 200))
    *_, all_there_is = records(run(folder, *options, 10**12))
    assert all_there_is == enough
    assert enough["statistics"]["prefix_cache"]["evicted"] == 0


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(loading, "load_weights", fail)
    return fail


@pytest.mark.usefixtures("no_weights")
def test_a_width_that_no_provider_verifies_is_refused_before_the_weights(root: Path) -> None:
    result = run(repeating_folder("lfm3", root), "--ids", "5", "--speculative", 99)
    assert (result.exit_code, result.stdout) == (REFUSED, "")
    assert "99" in result.stderr and "conv.verify" in result.stderr


@pytest.mark.usefixtures("no_weights")
def test_a_family_whose_scans_have_no_verify_is_refused_before_the_weights(root: Path) -> None:
    result = run(folder_of("zamba", root), "--ids", "5", "--speculative", 4)
    assert (result.exit_code, result.stdout) == (REFUSED, "")
    (line,) = result.stderr.splitlines()
    assert "does not verify drafts of zamba" in line
    assert line.endswith("run it without speculation")
