"""`hal verify` on a stock vLLM: what is silently wrong there is flagged; needs `make test-engines`.

ZAYA1's convolution has no state in vLLM's generic fallback; LFM2's q and k are mis-rotated by the
CPU's rotary operator.
"""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("HAL_ENGINES", "")) / "vllm" / "bin" / "python"
ROTARY_OFF = ("--engine-option", 'compilation_config={"custom_ops": ["none"]}')
DECODE, BATCH, RESUME = "decode vs re-prefill", "batch vs solo", "resumed vs fresh"

EXTRA: Mapping[str, Mapping[str, object]] = {
    "qwen3_next": {"head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 64},
    "zaya": {"head_dim": 32},
    "lfm2": {
        "hidden_size": 128,
        "head_dim": 32,
        "conv_dim": 128,
        "block_dim": 128,
        "block_ff_dim": 96,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "conv_bias": False,
    },
}
"""Entries that vLLM reads and the tiny configs leave out; its CPU kernels take heads of 32."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "HAL_ENGINES" not in os.environ, reason="needs an engine: make test-engines"
    ),
]


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint of a family in float32."""
    made = tmp_path_factory.mktemp(request.param)
    tiny = ROOT / "tests" / "data" / "configs" / "tiny" / f"{request.param}.json"
    data = json.loads(tiny.read_text()) | EXTRA[request.param] | {"initializer_range": 0.2}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**data))
    model.float().save_pretrained(made)
    return made


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PYTHON.absolute(), "-m", "hal.cli", "verify", folder, "--engine", "vllm", *options],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=1800,
        check=False,
    )


def verified(folder: Path, status: int, *options: str) -> Any:
    """The JSON of a run that came to a verdict."""
    ran = run(folder, *options, "--json")
    assert ran.returncode == status, ran.stdout + ran.stderr
    return json.loads(ran.stdout)


def gaps(found: Any, check: str) -> list[float]:
    return [row["gap"] for row in found["rows"] if row["check"] == check and row["prompts"]]


@pytest.mark.parametrize("folder", ["zaya"], indirect=True)
def test_zaya_on_the_stock_engine_is_flagged(folder: Path) -> None:
    found = verified(folder, 1, "--stock")
    assert found["passed"] is False
    assert found["served_by"] == ["vllm alone: no provider of hal served it"]
    assert max(gaps(found, DECODE)) > 1


@pytest.mark.parametrize("folder", ["zaya"], indirect=True)
def test_zaya_is_refused_by_hal_before_an_answer(folder: Path) -> None:
    ran = run(folder)
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert "hal verify: zaya cannot run on cpu in" in ran.stderr


@pytest.mark.parametrize("folder", ["lfm2"], indirect=True)
def test_lfm2_on_the_stock_engine_is_flagged_by_its_rotary_operator_alone(folder: Path) -> None:
    found = verified(folder, 1, "--stock", "--dtype", "float32")
    assert max(gaps(found, DECODE)) > 0.1
    assert max(gaps(found, BATCH)) > 0.1
    assert verified(folder, 0, "--stock", "--dtype", "float32", *ROTARY_OFF)["passed"] is True


@pytest.mark.parametrize("folder", ["lfm2"], indirect=True)
def test_lfm2_through_hal_passes_without_that_operator(folder: Path) -> None:
    found = verified(folder, 0, "--dtype", "float32", *ROTARY_OFF)
    assert any("short-conv layers of lfm2 on cpu" in line for line in found["served_by"])
    assert all("cpu.torch" in line for line in found["served_by"])


@pytest.mark.parametrize("folder", ["qwen3_next"], indirect=True)
def test_gated_delta_net_through_hal_passes_from_cached_prefixes_too(folder: Path) -> None:
    found = verified(folder, 0, "--dtype", "float32", "--chunk", "128")
    ways = {row["way"]: row["verdict"] for row in found["rows"]}
    assert set(ways.values()) == {"ok"}
    assert {"in chunks of 128", "from its own prefix"} <= set(ways)
    assert "Gated DeltaNet layers of qwen3_next on cpu" in found["served_by"][0]
