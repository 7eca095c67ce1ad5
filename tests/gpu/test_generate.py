"""`hal generate` on the device gives the tokens of the CPU, or refuses before it loads anything."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import typer
from typer.testing import CliRunner, Result

import hal
from hal.cli.errors import REFUSED
from hal.cli.generate import generate
from support.models import DRIVEN, config_of, folder_of
from support.serving import prompts_of

pytestmark = pytest.mark.cuda
APP = typer.Typer(pretty_exceptions_enable=False)
APP.command()(generate)
SMALL = ("--dtype", "float32", "--max-batch", 3, "--token-budget", 9, "--max-new-tokens", 8)


def run(folder: Path, device: str, *options: str) -> Result:
    """Six prompts in chunks, three at a time."""
    prompts = [part for ids in prompts_of() for part in ("--ids", " ".join(map(str, ids)))]
    args = [folder, "--device", device, "--json", *SMALL, *options, *prompts]
    return CliRunner().invoke(APP, [str(arg) for arg in args])


def tokens(result: Result) -> list[list[int]]:
    assert result.exit_code == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    return [line["ids"] for line in lines if "ids" in line]


def replayed(result: Result) -> int:
    """Decode steps that ran as a graph."""
    return int(json.loads(result.stdout.splitlines()[-1])["statistics"]["graphs"]["replayed"])


@pytest.mark.parametrize("name", DRIVEN)
def test_the_device_gives_the_tokens_of_the_cpu(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(2)
    folder = folder_of(name, tmp_path)
    found = run(folder, "cuda")
    if not hal.explain("cuda", config_of(name), dtype="float32").fits:
        assert found.exit_code == REFUSED
        assert found.stdout == ""
        return
    wanted = tokens(run(folder, "cpu"))
    assert tokens(found) == wanted
    recorded = run(folder, "cuda", "--graphs")
    assert tokens(recorded) == wanted
    assert replayed(recorded) > 0
