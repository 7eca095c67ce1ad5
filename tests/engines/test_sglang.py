"""A stock SGLang answers through `hal`, or stops with its refusal; needs `make test-engines`."""

import json
import os
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from support.engine_models import SHORT, TOKENS, Checkpoint, Rounds, check, config_of, saved

PYTHON = Path(os.environ.get("HAL_ENGINES", "")) / "sglang" / "bin" / "python"
DRIVER = Path(__file__).parent / "sglang_driver.py"
ENGINE = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "skip_tokenizer_init": True,
    "log_level": "info",
    "context_length": 512,
    "max_total_tokens": 4096,
    "max_running_requests": 4,
    "max_mamba_cache_size": 32,
}
CPU_ENGINE = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "0",
}

EXTRA: Mapping[str, Mapping[str, object]] = {
    "qwen3_next": {"full_attention_interval": 4},
    "lfm2": {
        "conv_dim": 64,
        "block_dim": 64,
        "block_auto_adjust_ff_dim": False,
        "conv_bias": False,
    },
    "mamba2": {},
    "kimi_linear": {},
}
"""Entries that SGLang reads and the tiny configs leave out."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "HAL_ENGINES" not in os.environ, reason="needs an engine: make test-engines"
    ),
]


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The checkpoint of a family, saved in float32."""
    folder = tmp_path_factory.mktemp(request.param)
    made = saved(folder, config_of(request.param, EXTRA[request.param]))
    write_extra(folder, request.param)
    return made


@pytest.fixture
def weightless(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with a config alone: what refuses here refused before any weight was read."""
    config = config_of(request.param, EXTRA[request.param])
    config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
    config.save_pretrained(tmp_path)
    write_extra(tmp_path, request.param)
    return tmp_path


def write_extra(folder: Path, family: str) -> None:
    """transformers drops the entries that it does not know."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(EXTRA[family])))


def run(
    folder: Path,
    where: Path,
    rounds: Rounds = (SHORT,),
    environ: Mapping[str, str] | None = None,
    broken: str = "",
    **engine: object,
) -> Any:
    """What one engine did with its rounds of prompts: the driver's result, the records, the log."""
    job, result = where / "job.json", where / "result.json"
    settings = {**ENGINE, **engine}
    asked = {"model": str(folder), "tokens": TOKENS, "rounds": rounds, "engine": settings}
    job.write_text(json.dumps(asked))
    own = {**CPU_ENGINE, "HAL_TEST_RECORDS": str(where), "HAL_TEST_BROKEN": broken}
    with (where / "log").open("w") as log:
        subprocess.run(
            [PYTHON.absolute(), DRIVER, job, result],
            cwd=where,
            env={**os.environ, **own, **(environ or {})},
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=900,
            check=False,
        )
    found = json.loads(result.read_text()) if result.exists() else {"error": "killed"}
    calls, report = where / "calls", where / "report"
    return found | {
        "log": (where / "log").read_text(),
        "calls": Counter(calls.read_text().split()) if calls.exists() else Counter(),
        "report": json.loads(report.read_text()) if report.exists() else [],
    }


def refused(found: Any, code: str) -> str:
    """The refusal's text, raised by `Engine()` itself; no provider was called before it."""
    assert found.get("error") == "hal.Unsupported", found.get("text", found["log"])[-3000:]
    assert f"[{code}]" in found["text"]
    assert not found["calls"]
    assert "Load weight" not in found["log"]
    return str(found["text"])


CONV = {"conv.prefill", "conv.decode"}
GDN = CONV | {"delta_rule.prefill", "delta_rule.decode"}
LONG = [[(7 * i + s) % 150 + 3 for i in range(n)] for s, n in ((0, 150), (1, 90))]
"""Prompts of several chunks of prefill."""


@pytest.mark.parametrize("checkpoint", ["lfm2"], indirect=True)
def test_short_conv_answers_and_says_who_serves(checkpoint: Checkpoint, tmp_path: Path) -> None:
    rounds = [SHORT, LONG, [[*prompt, 9, 8] for prompt in LONG]]
    found = run(checkpoint.folder, tmp_path, rounds, chunked_prefill_size=64)
    check(found, checkpoint, rounds, 1e-3)
    assert set(found["calls"]) == CONV
    line = "hal: 3 short-conv layers of lfm2 on cpu are served by cpu.torch"
    assert found["log"].count(line) == 1
    assert found["log"].index(line) < found["log"].index("Load weight end")
    (report,) = found["report"]
    assert set(report["layers"].values()) == {"short_conv"}
    assert report["calls"]["short_conv DECODE"] >= 3 * (TOKENS - 1)
    assert all(row["cached"] > 0 for row in found["rounds"][2])


@pytest.mark.parametrize("checkpoint", ["qwen3_next"], indirect=True)
def test_gated_deltanet_answers(checkpoint: Checkpoint, tmp_path: Path) -> None:
    rounds = [SHORT, LONG, [[*prompt, 9, 8] for prompt in LONG]]
    found = run(checkpoint.folder, tmp_path, rounds, chunked_prefill_size=64)
    check(found, checkpoint, rounds, 1e-3)
    assert set(found["calls"]) == GDN
    (report,) = found["report"]
    assert set(report["layers"].values()) == {"gated_delta_net"}


@pytest.mark.parametrize("checkpoint", ["lfm2"], indirect=True)
def test_decodes_among_extends_answer(checkpoint: Checkpoint, tmp_path: Path) -> None:
    found = run(
        checkpoint.folder, tmp_path, [LONG], chunked_prefill_size=64, enable_mixed_chunk=True
    )
    check(found, checkpoint, [LONG], 1e-3)


@pytest.mark.parametrize("checkpoint", ["lfm2"], indirect=True)
def test_two_ranks_answer(checkpoint: Checkpoint, tmp_path: Path) -> None:
    cores = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    found = run(checkpoint.folder, tmp_path, environ=cores, tp_size=2)
    check(found, checkpoint, [SHORT], 1e-3)
    assert found["log"].count("hal: 3 short-conv layers of lfm2 on cpu are served by") == 2


@pytest.mark.parametrize("weightless", ["lfm2"], indirect=True)
def test_without_its_provider_the_engine_stops_before_weights(
    weightless: Path, tmp_path: Path
) -> None:
    found = run(weightless, tmp_path, environ={"HAL_BLOCK": "cpu.torch"})
    refused(found, "plugin-blocked")


@pytest.mark.parametrize("weightless", ["mamba2", "kimi_linear"], indirect=True)
def test_a_pair_that_sglang_lets_through_is_refused_before_weights(
    weightless: Path, tmp_path: Path
) -> None:
    assert "in SGLang" in refused(run(weightless, tmp_path), "mode-unsupported")


@pytest.mark.parametrize("weightless", ["lfm2"], indirect=True)
def test_graphs_are_refused_with_the_reason(weightless: Path, tmp_path: Path) -> None:
    found = run(weightless, tmp_path, disable_cuda_graph=False)
    assert "--disable-cuda-graph" in refused(found, "mode-unsupported")


@pytest.mark.parametrize("weightless", ["lfm2"], indirect=True)
def test_a_provider_that_cannot_be_built_stops_the_engine_before_weights(
    weightless: Path, tmp_path: Path
) -> None:
    found = run(weightless, tmp_path, broken="provider")
    assert found["error"] == "killed"
    assert "hal.Unsupported" in found["log"]
    assert "[plugin-broken]" in found["log"]
    assert "Load weight begin" not in found["log"]


@pytest.mark.parametrize("checkpoint", ["lfm2"], indirect=True)
def test_a_broken_provider_stops_the_engine_and_nothing_takes_over(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    found = run(checkpoint.folder, tmp_path, broken="conv.decode")
    assert found["error"] == "killed"
    assert "ProviderError" in found["log"]
    assert "conv.decode was broken by the test" in found["log"]
    assert found["calls"]["conv.decode"] == 1


@pytest.mark.parametrize("checkpoint", ["lfm2"], indirect=True)
def test_without_the_plugin_stock_sglang_dies_in_the_first_conv(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    found = run(checkpoint.folder, tmp_path, environ={"SGLANG_PLUGINS": "none"})
    assert found["error"] == "killed"
    assert not found["calls"]
