"""`hal generate` on the device gives the tokens of the CPU, or refuses before it loads anything."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import typer
from typer.testing import CliRunner, Result

from hal.cli.errors import REFUSED
from hal.cli.generate import generate
from support.models import DRIVEN, folder_of, make_model, save_model
from support.serving import prompts_of

pytestmark = pytest.mark.cuda
APP = typer.Typer(pretty_exceptions_enable=False)
APP.command()(generate)
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16}
SIZES: dict[str, dict[str, object]] = {
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid"), MAMBA),
    "bailing_hybrid": {"head_dim": 64},
    "kimi_linear": {
        "linear_attn_config": {
            "head_dim": 64,
            "num_heads": 2,
            "short_conv_kernel_size": 4,
            "full_attn_layers": [4],
            "kda_layers": [1, 2, 3],
        }
    },
    "mamba2": {"num_heads": 4, "head_dim": 32, "state_size": 16},
    "nemotron_h": {"mamba_head_dim": 32, "ssm_state_size": 16},
    "olmo_hybrid": {"linear_key_head_dim": 16},
    "zamba2": {"n_mamba_heads": 4, "mamba_d_state": 16},
}
"""Sizes that the device's providers offer, where a family's tiny ones are others."""

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


@pytest.mark.parametrize("name", sorted(DRIVEN))
def test_the_device_gives_the_tokens_of_the_cpu(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(2)
    folder = save_model(make_model(name, **SIZES.get(name, {})), tmp_path / name)
    wanted = tokens(run(folder, "cpu"))
    assert tokens(run(folder, "cuda")) == wanted
    recorded = run(folder, "cuda", "--graphs")
    assert tokens(recorded) == wanted
    assert replayed(recorded) > 0


def test_what_is_not_offered_is_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    folder = folder_of("mamba2", tmp_path)
    (folder / "model.safetensors").unlink()
    found = run(folder, "cuda")
    assert (found.exit_code, found.stdout) == (REFUSED, "")
    assert "needs head dims 16 x 16" in found.stderr
