"""Every command of the workflows is a Makefile target, so that it runs locally too."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commands(path: Path) -> list[str]:
    return re.findall(r"- run: (.*)", path.read_text())


def test_there_are_workflows() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "conformance.yml"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_job_runs_make_targets_or_says_why_it_does_not_run(path: Path) -> None:
    for command in commands(path):
        words = command.split()
        assert words[0] in ("make", "echo"), command
        assert words[0] == "echo" or words[1] in TARGETS, command


def test_each_device_names_a_runner_and_why_it_waits() -> None:
    text = WORKFLOWS[0].read_text()
    for provider in ("cuda.triton", "rocm.triton", "npu.ascend"):
        block = text[text.index(f"provider: {provider}") :]
        assert re.search(r"labels: '\[\"self-hosted\", \"\w+\"\]'", block)
        assert re.search(r"enabled: false\n\s+reason: no self-hosted runner .*\n", block)


def test_what_lands_has_passed_the_command_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    assert {"make test", "make demo"} <= set(script)
