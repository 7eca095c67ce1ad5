"""`hal verify`: the table, the status, and an engine in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from hal.cli.errors import BAD_INPUT, REFUSED
from hal.cli.verify import verify
from hal.integrations.verify import launch
from hal.integrations.verify.record import Setup
from hal_cpu.conv import TorchConv
from hal_cpu.delta_rule import TorchDeltaRule
from support.faulty_engine import VOCAB
from support.models import folder_of

APP = typer.Typer(pretty_exceptions_enable=False)
APP.command()(verify)
TESTS = Path(__file__).parents[1]
STAND_INS = TESTS / "support" / "stand_ins"
QUICK = ("--new-tokens", 4, "--chunk", 16)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that the stand-ins take: they read nothing of it."""
    entries = {"vocab_size": VOCAB}
    tiny = json.loads((TESTS / "data" / "configs" / "tiny" / "lfm2.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(tiny | entries))
    return tmp_path


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that cost nothing, in this process and in those that it starts."""
    monkeypatch.syspath_prepend(str(STAND_INS))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(STAND_INS), str(TESTS))))


def run(folder: Path, engine: str, *options: object) -> Result:
    words = [str(folder), "--engine", engine, *map(str, options)]
    return CliRunner().invoke(APP, words)


def complaint(result: Result, status: int = BAD_INPUT) -> str:
    """The last line on stderr of a call that left nothing on stdout."""
    assert result.exit_code == status, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr.splitlines()[-1]


def verdicts(result: Result) -> dict[str, str]:
    """The verdict of each way, by the JSON."""
    rows = json.loads(result.stdout)["rows"]
    return {f"{row['check']}, {row['way']}": row["verdict"] for row in rows}


def wrong(result: Result) -> set[str]:
    return {
        way.partition(",")[0] for way, verdict in verdicts(result).items() if verdict == "WRONG"
    }


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next", "zaya", "mamba2"])
def test_the_runner_of_hal_passes_with_its_providers(family: str, root: Path) -> None:
    result = run(folder_of(family, root), "transformers", *QUICK, "--json")
    assert result.exit_code == 0, result.output
    assert set(verdicts(result).values()) == {"ok"}
    found = json.loads(result.stdout)
    assert found["passed"] is True
    assert found["allowed"] == 1e-3
    assert found["missing"] == []
    assert all("cpu.torch" in line for line in found["served_by"])
    ways = [row["way"] for row in found["rows"]]
    assert {"in chunks of 2", "in chunks of 16", "from its own prefix"} <= set(ways)


def test_in_bfloat16_the_runner_is_within_the_bar_of_bfloat16(root: Path) -> None:
    result = run(folder_of("lfm2", root), "transformers", *QUICK, "--dtype", "bfloat16", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["allowed"] == 0.2


def spoil(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, spoiled: str) -> None:
    """Let an operation of the provider find its state empty."""
    original = getattr(owner, name)

    @wraps(original)
    def without_state(*given: Any, **named: Any) -> Any:
        state = next(t for t in given if isinstance(t, torch.Tensor) and t.dim() == int(spoiled))
        state.zero_()
        return original(*given, **named)

    monkeypatch.setattr(owner, name, without_state)


@pytest.mark.parametrize(
    ("owner", "dims", "family"), [(TorchConv, 3, "lfm2"), (TorchDeltaRule, 4, "qwen3_next")]
)
def test_a_provider_that_loses_its_state_in_decode_is_flagged(
    owner: Any, dims: int, family: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, owner, "decode", str(dims))
    result = run(folder_of(family, root), "transformers", *QUICK, "--json")
    assert result.exit_code == REFUSED
    assert "decode vs re-prefill" in wrong(result)


def test_the_verdict_is_the_first_line_and_the_providers_follow(root: Path) -> None:
    result = run(folder_of("lfm2", root), "transformers", *QUICK)
    assert result.exit_code == 0
    first, second, header, *rows = result.stdout.splitlines()
    assert first.startswith("lfm2 on transformers ")
    assert ": PASS; largest gap " in first
    assert first.endswith(" nats, allowed 0.001")
    assert second.strip().startswith("hal: conv_state.step, conv.prefill, conv.decode by cpu.torch")
    assert header.split() == "check way prompts tokens largest gap where verdict".split()
    assert all(row.endswith("  ok") for row in rows)


def test_a_threshold_below_rounding_fails(root: Path) -> None:
    result = run(folder_of("lfm2", root), "transformers", *QUICK, "--threshold", "1e-12")
    assert result.exit_code == REFUSED
    assert ": FAIL in decode vs re-prefill" in result.stdout.splitlines()[0]


def test_a_family_that_the_runner_does_not_drive_is_refused(tmp_path: Path) -> None:
    tiny = TESTS / "data" / "configs" / "tiny" / "recurrent_gemma.json"
    (tmp_path / "config.json").write_text(tiny.read_text())
    result = run(tmp_path, "transformers")
    assert "recurrent_gemma" in result.stderr
    assert complaint(result, REFUSED)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_in_a_process_of_its_own_passes(engine: str, model: Path) -> None:
    result = run(model, engine, *QUICK, "--json")
    assert result.exit_code == 0, result.output
    assert set(verdicts(result).values()) == {"ok"}
    assert json.loads(result.stdout)["engine"]["name"] == engine
    starts = [line for line in result.stderr.splitlines() if " starts, " in line]
    assert starts == [
        f"hal verify: {engine} starts, prompts are fed whole",
        f"hal verify: {engine} starts, prompts are fed in chunks of 16",
    ]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("fault", "checks"),
    [
        ("decode loses the window", {"decode vs re-prefill"}),
        ("rows leak", {"batch vs solo", "resumed vs fresh"}),
        ("a cached prefix is a token old", {"resumed vs fresh"}),
    ],
)
def test_a_wrong_engine_in_a_process_of_its_own_is_flagged(
    engine: str, fault: str, checks: set[str], model: Path
) -> None:
    result = run(model, engine, *QUICK, "--engine-option", f"fault={fault}", "--json")
    assert result.exit_code == REFUSED
    assert wrong(result) == checks


@pytest.mark.usefixtures("stand_ins")
def test_a_gap_that_is_not_finite_is_null_in_json_and_named_in_the_table(model: Path) -> None:
    options = (*QUICK, "--engine-option", "fault=decode is not finite")
    rows = json.loads(run(model, "vllm", *options, "--json").stdout)["rows"]
    assert rows[0]["gap"] is None
    assert rows[0]["verdict"] == "WRONG"
    assert "not finite" in run(model, "vllm", *options).stdout


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_it_says_who_served(engine: str, model: Path) -> None:
    ours = json.loads(run(model, engine, *QUICK, "--json").stdout)
    assert ours["served_by"] == ["hal: 3 X layers of m on cpu are served by cpu.torch (d 1)"]
    stock = json.loads(run(model, engine, *QUICK, "--stock", "--json").stdout)
    assert stock["served_by"] == [f"{engine} alone: no provider of hal served it"]


@pytest.mark.usefixtures("stand_ins")
def test_a_plugin_that_did_not_load_is_no_pass_of_the_engine_alone(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unloaded = (*QUICK, "--engine-option", "fault=does not load hal")
    monkeypatch.setattr(launch, "plugins", lambda engine: {"hal", "other"})
    assert complaint(run(model, "vllm", *unloaded), REFUSED) == (
        "hal verify: vllm ran without hal: its plugin is installed and serves no layer, its last "
        "error is TypeError: Pin takes 5 arguments; mend it, or check the engine alone with --stock"
    )
    assert run(model, "vllm", *unloaded, "--stock").exit_code == 0
    monkeypatch.setattr(launch, "plugins", lambda engine: {"other"})
    assert run(model, "vllm", *unloaded).exit_code == 0


@pytest.mark.usefixtures("stand_ins")
def test_a_model_without_linear_layers_is_the_engines_with_the_plugin_too(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": VOCAB}))
    monkeypatch.setattr(launch, "plugins", lambda engine: {"hal"})
    assert run(model, "vllm", *QUICK, "--engine-option", "fault=does not load hal").exit_code == 0


@pytest.mark.usefixtures("stand_ins")
def test_a_block_that_no_chunk_holds_leaves_prefixes_out_and_says_how_to_have_them(
    model: Path,
) -> None:
    result = run(model, "vllm", *QUICK, "--engine-option", "block=17", "--json")
    assert result.exit_code == 0
    (row,) = (r for r in json.loads(result.stdout)["rows"] if r["verdict"] == "not run")
    assert row["why_not"] == "a block of the cache holds 17 tokens: give --chunk 17 or more"


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("raises", "hal verify: vllm stopped with builtins.RuntimeError: no kernel"),
        ("dies", "hal verify: vllm ended, without a word"),
        ("fails in a child", "hal verify: vllm ended, its last error is mod.OddError: no memory"),
        (
            "refuses in a child",
            "hal verify: vllm ended, its last error is hal.Unsupported: m cannot run on cpu: cpu",
        ),
    ],
)
def test_an_engine_that_stops_is_a_no_with_its_own_words(
    fault: str, text: str, model: Path
) -> None:
    result = run(model, "vllm", *QUICK, "--engine-option", f"fault={fault}")
    assert complaint(result, REFUSED).startswith(text)
    debug = run(model, "vllm", *QUICK, "--engine-option", f"fault={fault}", "--debug")
    assert "Traceback" in debug.stderr
    assert debug.stderr.splitlines()[-1].startswith(text)


@pytest.mark.usefixtures("stand_ins")
def test_a_refusal_by_hal_inside_the_engine_is_shown_whole(model: Path) -> None:
    result = run(model, "vllm", *QUICK, "--engine-option", "fault=refused")
    complaint(result, REFUSED)
    assert "hal verify: lfm2 cannot run on gpu" in result.stderr


@pytest.mark.usefixtures("stand_ins")
def test_an_engine_that_hangs_is_ended_with_its_children(model: Path) -> None:
    result = run(model, "vllm", *QUICK, "--engine-option", "fault=hangs", "--timeout", 3)
    assert complaint(result, REFUSED) == (
        "hal verify: vllm did not end within 3 s; give a larger --timeout"
    )


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("sign", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)],
    ids=["ctrl-c", "terminated", "killed"],
)
def test_the_engine_ends_with_whoever_asked_it(
    sign: signal.Signals, status: int, model: Path
) -> None:
    words = [sys.executable, "-m", "hal.cli", "verify", str(model), "--engine", "vllm"]
    hangs = [*words, "--engine-option", "fault=hangs"]
    with subprocess.Popen(hangs, stderr=subprocess.PIPE, text=True) as started:
        worker = _worker(started.pid)
        time.sleep(0.5)  # until the parent waits for it
        started.send_signal(sign)
        assert started.wait(60) == status
    assert _gone(worker)


def _gone(process: int) -> bool:
    """Whether a process is over within a minute, though its status may not be fetched yet."""
    for _ in range(600):
        try:
            if ") Z " in Path(f"/proc/{process}/stat").read_text():
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.1)
    return False


def _worker(parent: int) -> int:
    """The one child of a process, as soon as it runs the worker's program."""
    for _ in range(600):
        for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            if launch.WORKER in Path(f"/proc/{child}/cmdline").read_text():
                return int(child)
        time.sleep(0.05)
    raise AssertionError("no worker was started")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_that_is_not_installed_is_bad_input(engine: str, model: Path) -> None:
    said = complaint(run(model, engine))
    assert said == (
        f"hal verify: {engine} is not installed here; run hal verify in the environment that has it"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--engine", "tgi"), "--engine is 'tgi', expected one of transformers, vllm, sglang"),
        (("--dtype", "int8"), "--dtype is 'int8', expected one of float32, bfloat16, float16"),
        (("--new-tokens", 0), "--new-tokens is 0, expected at least 1"),
        (("--chunk", 1), "--chunk is 1, expected at least 2"),
        (("--max-batch", 1), "--max-batch is 1, expected at least 2"),
        (("--seed", -1), "--seed is -1, expected at least 0"),
        (("--threshold", 0), "--threshold is 0, expected more than 0"),
        (("--threshold", "nan"), "--threshold is nan, expected more than 0"),
        (("--timeout", -1), "--timeout is -1, expected more than 0"),
        (("--engine-option", "x"), "--engine-option x: expected NAME=JSON, as block_size=32"),
        (("--stock",), "--stock and --engine-option are for vllm and sglang alone"),
        (("--engine-option", "a=1"), "--stock and --engine-option are for vllm and sglang alone"),
    ],
)
def test_bad_options_are_told_with_what_is_expected(
    options: tuple[object, ...], said: str, model: Path
) -> None:
    assert complaint(run(model, "transformers", *options)) == f"hal verify: {said}"


def test_a_folder_without_a_model_is_bad_input(tmp_path: Path) -> None:
    assert "has no config.json" in complaint(run(tmp_path, "vllm"))
    assert "is not a folder" in complaint(run(tmp_path / "x", "transformers"))


def setup(device: str = "cpu") -> Setup:
    return Setup("m", device, None, 4, 99, 40)


@pytest.mark.parametrize(("engine", "name"), sorted(launch.FILTERS.items()))
def test_the_stock_engine_gets_every_plugin_but_that_of_hal(
    engine: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = launch.Launch(engine, stock=True, timeout=1, say=print)
    for installed, wanted in (({"hal", "b", "a"}, "a,b"), ({"hal"}, ","), (set(), ",")):
        monkeypatch.setattr(launch, "plugins", lambda engine, found=installed: found)
        assert launch.environment(how, setup())[name] == wanted


def test_what_the_user_set_in_the_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    monkeypatch.setenv("VLLM_PLUGINS", "hal,mine")
    how = launch.Launch("vllm", stock=False, timeout=1, say=print)
    found = launch.environment(how, setup())
    assert found["VLLM_CPU_KVCACHE_SPACE"] == "7"
    assert found["VLLM_PLUGINS"] == "hal,mine"


@pytest.mark.parametrize(("device", "there"), [("cpu", True), ("cuda", False)])
def test_sglangs_cpu_engine_is_for_the_cpu_alone(
    device: str, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    how = launch.Launch("sglang", stock=False, timeout=1, say=print)
    assert ("SGLANG_USE_CPU_ENGINE" in launch.environment(how, setup(device))) is there
