"""docs/cli.md shows what the commands print, and docs/support-matrix.md what matrix prints.

HAL_SNAPSHOTS=write puts the real output into the blocks that have no "..." line.
"""

import doctest
import os
import re
import shlex
import subprocess
import sysconfig
from pathlib import Path

import pytest

from support.model_configs import CONFIGS
from support.snapshots import check_snapshot

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "cli.md"
BLOCK = re.compile(r"```console\n(.*?)```", flags=re.DOTALL)
HAL = str(Path(sysconfig.get_path("scripts")) / "hal")


def run(command: str) -> str:
    ran = subprocess.run(
        [HAL, *shlex.split(command)[1:]],
        capture_output=True,
        text=True,
        check=False,
        cwd=CONFIGS / "real",
        timeout=120,
    )
    return ran.stdout + ran.stderr


def real_block(block: str) -> str:
    """The block with its commands' outputs."""
    commands = re.findall(r"^\$ (.+)$", block, flags=re.MULTILINE)
    return "\n".join(f"$ {command}\n{run(command)}" for command in commands)


@pytest.mark.parametrize("index", range(len(BLOCK.findall(PAGE.read_text()))))
def test_the_documented_output_is_the_real_one(index: int) -> None:
    text = PAGE.read_text()
    block = BLOCK.findall(text)[index]
    real = real_block(block)
    if os.environ.get("HAL_SNAPSHOTS") == "write" and "..." not in block:
        PAGE.write_text(text.replace(f"```console\n{block}```", f"```console\n{real}```"))
        return
    assert doctest.OutputChecker().check_output(block, real, doctest.ELLIPSIS), real


def test_every_command_is_documented() -> None:
    from hal.cli import COMMANDS

    assert re.findall(r"^## hal (.+)$", PAGE.read_text(), flags=re.MULTILINE) == [*COMMANDS]


def test_the_support_matrix_is_the_one_of_the_installed_manifests() -> None:
    check_snapshot(ROOT / "docs" / "support-matrix.md", run("hal matrix --markdown"))
