"""Every block of the README runs, and prints what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
CONSOLE = re.findall(r"```console\n(.*?)```", README, re.DOTALL)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run from the repository root, as the README assumes."""
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.splitlines()[0])
def test_a_python_block_runs_as_it_stands(block: str) -> None:
    done = run(sys.executable, "-W", "error", "-c", block)
    assert done.returncode == 0, done.stderr


def test_make_targets_of_the_readme_exist() -> None:
    targets = re.findall(r"\$ make (\w+)", README)
    assert targets == ["demo", "test"]
    assert all(re.search(rf"^{target}:", MAKEFILE, re.MULTILINE) for target in targets)


def test_hal_commands_of_the_readme_print_what_it_shows() -> None:
    shown = [block.splitlines() for block in CONSOLE if block.startswith("$ hal ")]
    assert shown
    for command, *output in shown:
        done = run(sys.executable, "-m", "hal.cli", *command.split()[2:])
        printed = done.stdout + done.stderr
        assert all(line in printed for line in output), printed
