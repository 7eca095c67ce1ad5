"""`hal generate` on tiny models: results, and one line with the fix for everything that is bad."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from hal.cli import generate as command
from hal.cli import generate_job
from hal.cli.ending import INTERRUPTED
from hal.cli.errors import BAD_INPUT, REFUSED
from hal.cli.generate import generate
from hal.errors import ProviderError
from hal.integrations.transformers import Engine, Runner
from support.models import folder_of
from support.serving import prompts_of, runner_of, serve
from support.words import save_tokenizer

APP = typer.Typer(pretty_exceptions_enable=False)
APP.command()(generate)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = folder_of("lfm2", tmp_path_factory.mktemp("models"))
    save_tokenizer(folder)
    return folder


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    """A folder of its own, to be spoiled."""
    return Path(shutil.copytree(source, tmp_path / "model"))


@pytest.fixture(scope="module")
def expected(source: Path) -> dict[int, list[int]]:
    """What the engine gives for six prompts."""
    return serve(runner_of(source), prompts_of(), 8, stop=[2]).ids


def run(folder: Path, *options: object) -> Result:
    return CliRunner().invoke(APP, [str(folder), *map(str, options)])


def words(ids: list[int]) -> str:
    return " ".join(f"w{i}" for i in ids if i > 3)


def records(result: Result) -> list[dict[str, object]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def complaint(result: Result, status: int = BAD_INPUT) -> str:
    """The one line of a refused call, which left nothing on stdout."""
    assert result.exit_code == status
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert "Traceback" not in lines[0]
    assert lines[0].startswith("hal generate: ")
    return lines[0]


def six(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in prompts_of()))
    return file


SMALL = ("--max-batch", 3, "--token-budget", 9, "--max-new-tokens", 8)


def test_json_has_an_object_a_prompt_in_input_order(
    source: Path, tmp_path: Path, expected: dict[int, list[int]]
) -> None:
    result = run(source, "--prompts", six(tmp_path), *SMALL, "--json")
    assert result.exit_code == 0
    found = records(result)
    assert [list(record) for record in found] == [
        ["index", "prompt", "prompt_ids", "ids", "text", "finish_reason", "timings"]
    ] * 6
    for number, record in enumerate(found):
        assert record["index"] == number
        assert record["prompt"] is None
        assert record["prompt_ids"] == prompts_of()[number]
        assert record["ids"] == expected[number]
        assert record["text"] == words(expected[number])
        assert record["finish_reason"] == ("eos" if expected[number][-1] == 2 else "length")
        assert set(record["timings"]) == {"queue_s", "prefill_s", "decode_s", "total_s"}


def test_speed_and_providers_end_the_run_on_stderr(source: Path) -> None:
    result = run(source, "--ids", "5 6 7", "--max-new-tokens", 2)
    assert result.exit_code == 0
    first, *rest = result.stderr.splitlines()
    assert first.startswith("1 prompt, 3 prompt tokens, 2 new tokens in ")
    assert first.endswith(" new tokens/s)")
    assert rest[0].startswith("lfm2 runs on cpu: 3 of 4 layers keep state")
    assert any("conv_state.step" in line and "cpu.torch" in line for line in rest)


def test_text_prompts_are_numbered_before_ids_and_files(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("w30 w31\nw32\n")
    result = run(
        source, "--prompts", file, "--ids", "20,21", "--prompt", "w10 w11", "--prompt", "w12",
        "--max-new-tokens", 2, "--json",
    )  # fmt: skip
    found = records(result)
    assert [record["prompt"] for record in found] == ["w10 w11", "w12", None, "w30 w31", "w32"]
    assert [record["prompt_ids"] for record in found] == [[10, 11], [12], [20, 21], [30, 31], [32]]


def test_one_prompt_is_streamed_token_by_token(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[str] = []
    monkeypatch.setattr(generate_job, "_write", pieces.append)
    assert run(source, "--ids", "5 6 7", "--max-new-tokens", 5).exit_code == 0
    monkeypatch.undo()
    (record,) = records(run(source, "--ids", "5 6 7", "--max-new-tokens", 5, "--json"))
    assert len(pieces) == 6
    assert "".join(pieces) == f"{record['text']}\n"


def test_several_prompts_are_shown_as_they_end(source: Path) -> None:
    options = ("--ids", "6", "--ids", "5 " * 60, "--max-len", 62, "--max-new-tokens", 8)
    first, full = (
        f"[{r['index']}] {r['finish_reason']}: {r['text']}"
        for r in records(run(source, *options, "--json"))
    )
    assert run(source, *options).stdout.splitlines() == [full, first]


@pytest.mark.parametrize("prompts", [["5 6 7"], ["5 6 7", "8"]])
def test_without_a_tokenizer_ids_run_and_the_text_is_null(folder: Path, prompts: list[str]) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    options = [o for ids in prompts for o in ("--ids", ids)] + ["--max-new-tokens", "3"]
    found = records(run(folder, *options, "--json"))
    assert [record["text"] for record in found] == [None] * len(prompts)
    shown = run(folder, *options).stdout
    assert all(" ".join(map(str, record["ids"])) in shown for record in found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_dtype_can_be_set(source: Path, dtype: str) -> None:
    result = run(source, "--ids", "5", "--max-new-tokens", 2, "--dtype", dtype, "--json")
    assert len(records(result)[0]["ids"]) == 2


def test_threads_are_set(source: Path) -> None:
    before = torch.get_num_threads()
    try:
        assert run(source, "--ids", "5", "--max-new-tokens", 1, "--threads", 2).exit_code == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_terminal_gets_a_progress_bar_on_stderr(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advanced: list[float] = []
    monkeypatch.setattr(generate_job, "_bar", lambda: _Bar(advanced))
    monkeypatch.setattr(generate_job, "_is_terminal", lambda: True)
    result = run(source, "--prompts", six(tmp_path), *SMALL, "--json")
    assert len(records(result)) == 6
    assert sum(advanced) == 6 * 8


class _Bar:
    """Stands for a progress bar and adds up."""

    def __init__(self, advanced: list[float]) -> None:
        self.advanced = advanced

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def add_task(self, name: str, total: int) -> int:
        assert total == 6 * 8
        return 0

    def advance(self, task: int, steps: float) -> None:
        self.advanced.append(steps)


def test_the_bar_can_be_drawn() -> None:
    with generate_job._bar() as bar:
        bar.advance(bar.add_task("tokens", total=3), 2)
    assert not generate_job._is_terminal()


def spoil_weights(folder: Path, change: Callable[[bytes], bytes]) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(change(file.read_bytes()))


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (shutil.rmtree, "is not a folder; give the folder of a Hugging Face model"),
        (lambda f: (f / "config.json").unlink(), "has no config.json; give the folder of"),
        (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda f: spoil_weights(f, lambda b: b[:-9]), "download it again"),
        (lambda f: spoil_weights(f, lambda b: b[:3]), "download it again"),
        (lambda f: spoil_weights(f, lambda b: b"\xff" * 99), "download it again"),
        (
            lambda f: spoil_weights(f, lambda b: b.replace(b'"shape":[64]', b'"shape":[65]', 1)),
            "cannot be loaded",
        ),
        (
            lambda f: (f / "model.safetensors").unlink(),
            "has no weights: expected model.safetensors",
        ),
        (
            lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
            "pickled weights only (pytorch_model.bin)",
        ),
        (
            lambda f: (
                (f / "model.safetensors").rename(f / "model-1.safetensors")
                and (f / "model.safetensors.index.json").write_text(
                    '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
                )
            ),
            "lacks 1 of 2 shards (model-2.safetensors); download the missing files",
        ),
        (
            lambda f: (f / "config.json").write_text(
                (f / "config.json").read_text().replace('"hidden_size": 64', '"hidden_size": 32')
            ),
            "its config.json and its weights must be of one model",
        ),
        (lambda f: (f / "tokenizer.json").write_text("{"), "download its files again"),
        (
            lambda f: [t.unlink() for t in f.glob("tokenizer*")],
            "has no tokenizer, which text prompts need: add its tokenizer.json, or give token ids",
        ),
    ],
)
def test_a_bad_folder_is_one_line_with_the_fix(
    folder: Path, spoil: Callable[[Path], object], text: str
) -> None:
    spoil(folder)
    assert text in complaint(run(folder, "--prompt", "w5 w6"))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "there is no prompt; give --prompt, --ids or --prompts"),
        (["--prompt", ""], "--prompt 1 is empty; give at least one token"),
        (["--prompt", "w5", "--prompt", ""], "--prompt 2 is empty"),
        (["--ids", ""], "--ids 1 is empty"),
        (["--ids", "5 x"], "--ids 1: '5 x' holds no token ids"),
        (
            ["--ids", "5 160"],
            "id 160 is outside the vocabulary, which has ids 0 to 159",
        ),
        (["--ids=-1"], "--ids 1: token id -1 is outside the vocabulary"),
        (["--prompts", "nowhere.txt"], "nowhere.txt cannot be read: No such file or directory"),
        (["--ids", "5 " * 512], "--ids 1: the prompt has 512 tokens, at most 511 fit"),
        (["--ids", "5 " * 9, "--max-len", 9], "the prompt has 9 tokens, at most 8 fit"),
        (["--ids", "5", "--max-batch", 0], "--max-batch is 0, expected at least 1"),
        (["--ids", "5", "--token-budget", 0], "--token-budget is 0, expected at least 1"),
        (["--ids", "5", "--max-new-tokens", 0], "--max-new-tokens is 0, expected at least 1"),
        (["--ids", "5", "--threads", -2], "--threads is -2, expected at least 1"),
        (["--ids", "5", "--max-len", 0], "--max-len is 0, expected at least 1"),
        (["--ids", "5", "--dtype", "int8"], "dtype: got 'int8', expected one of"),
        (
            ["--ids", "5", "--graphs"],
            "--graphs needs a device that records whole decodes",
        ),
        (["--ids", "5", "--device", "CPU!"], "device: got 'CPU!', expected a type"),
    ],
)
def test_bad_options_are_one_line_with_the_fix(
    source: Path, options: list[object], text: str
) -> None:
    assert text in complaint(run(source, *options))


@pytest.mark.parametrize("option", ["--max-batch", "--token-budget"])
def test_a_bound_that_nothing_reaches_takes_no_memory(
    source: Path, tmp_path: Path, expected: dict[int, list[int]], option: str
) -> None:
    options = ("--prompts", six(tmp_path), "--max-new-tokens", 8, "--json", option, 10**12)
    result = run(source, *options)
    assert result.exit_code == 0, result.stderr
    assert [record["ids"] for record in records(result)] == [expected[i] for i in range(6)]


def test_a_prompt_file_that_is_not_utf8_is_one_line(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "latin1"
    file.write_bytes("dépêche".encode("latin-1"))
    assert "is not UTF-8 (byte 1); save it as UTF-8" in complaint(run(source, "--prompts", file))


def test_a_prompt_longer_than_the_token_budget_is_served_in_chunks(source: Path) -> None:
    options = ("--ids", "5 6 7 " * 20, "--max-new-tokens", 4, "--json")
    (whole,), (cut,) = (records(run(source, *options, "--token-budget", n)) for n in (512, 7))
    assert whole["ids"] == cut["ids"]


def test_an_unknown_device_is_one_line_with_the_devices_there_are(source: Path) -> None:
    line = complaint(run(source, "--ids", "5", "--device", "abacus"), REFUSED)
    assert "lfm2 cannot run on abacus: no plugin serves abacus" in line
    assert 'use device "cpu" (cpu.torch fits)' in line


def test_a_family_that_is_not_driven_is_one_line(folder: Path) -> None:
    from support.models import CONFIGS

    shutil.copy(CONFIGS / "qwen4_exp_text.json", folder / "config.json")
    line = complaint(run(folder, "--ids", "5"), REFUSED)
    assert "the transformers runner does not drive qwen4_exp_text: its sparse attention" in line


def test_a_pair_that_is_refused_prints_its_reasons(folder: Path) -> None:
    from support.models import CONFIGS

    shutil.copy(CONFIGS / "recurrent_gemma.json", folder / "config.json")
    result = run(folder, "--ids", "5")
    assert (result.exit_code, result.stdout) == (REFUSED, "")
    headline, *reasons = result.stderr.splitlines()
    assert headline.startswith("hal generate: recurrent_gemma cannot run on cpu: rg_lru")
    assert any("[interface-missing]" in line for line in reasons)
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("name", ["inkling_text", "inkling2_text", "recurrent_gemma"])
def test_a_refusal_by_the_device_says_that_no_provider_makes_the_runner_drive_it(
    folder: Path, name: str
) -> None:
    """Who installs what is missing would otherwise meet the second refusal only then."""
    from hal.integrations.transformers.families import LEFT_ALONE
    from support.models import CONFIGS

    shutil.copy(CONFIGS / f"{name}.json", folder / "config.json")
    *_, fix, note = run(folder, "--ids", "5").stderr.splitlines()
    assert fix.startswith("  Fix: install a provider for cpu that offers ")
    assert note.startswith("  With such a provider an engine may serve it; ")
    assert note.endswith(f"does not drive {name}: {LEFT_ALONE[name]}.")


def test_debug_shows_the_traceback_above_the_line(folder: Path) -> None:
    shutil.rmtree(folder)
    result = run(folder, "--ids", "5", "--debug")
    assert result.exit_code == BAD_INPUT
    assert result.stderr.startswith("Traceback (most recent call last)")
    assert result.stderr.splitlines()[-1].startswith("hal generate: ")


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (
            RuntimeError("two\nlines"),
            BAD_INPUT,
            "RuntimeError: two lines; run with --debug",
        ),
        (ProviderError("conv failed\non x"), REFUSED, "hal generate: conv failed on x"),
        (
            ModuleNotFoundError("no", name="transformers"),
            BAD_INPUT,
            "transformers is not installed; install hybrid-hal with its extra [hf]",
        ),
    ],
)
def test_what_fails_in_a_step_is_one_line_too(
    source: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, text: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Runner, "_forward", fail)
    assert text in complaint(run(source, "--ids", "5", "--json"), status)


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Runner]]:
    """Send this process a Ctrl-C in the middle of the eighth step; the runners are kept."""
    runners: list[Runner] = []
    steps = 0
    step = Runner.step

    def interrupting(runner: Runner, *arguments: object) -> torch.Tensor:
        nonlocal steps
        runners.append(runner)
        steps += 1
        if steps == 8:
            os.kill(os.getpid(), signal.SIGINT)
        return step(runner, *arguments)

    monkeypatch.setattr(Runner, "step", interrupting)
    before = signal.getsignal(signal.SIGINT)
    yield runners
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_prints_what_there_is_and_frees_the_slots(
    source: Path, tmp_path: Path, expected: dict[int, list[int]], interrupted: list[Runner]
) -> None:
    result = run(source, "--prompts", six(tmp_path), *SMALL, "--json")
    assert result.exit_code == INTERRUPTED
    found = records(result)
    assert [record["index"] for record in found] == list(range(6))
    assert {record["finish_reason"] for record in found} >= {"cancelled"}
    for record in found:
        ids = record["ids"]
        assert ids == expected[record["index"]][: len(ids)]
        assert (record["finish_reason"] == "cancelled") == (ids != expected[record["index"]])
    assert len(interrupted) == 8
    assert interrupted[0].free_slots == 3
    assert interrupted[0].kv.bytes == 0
    ended = sum(record["finish_reason"] != "cancelled" for record in found)
    last = result.stderr.splitlines()[-1]
    assert last == f"hal generate: interrupted, {ended} of 6 prompts had ended"


def test_an_interrupt_of_one_streamed_prompt_keeps_its_text(
    source: Path, interrupted: list[Runner]
) -> None:
    result = run(source, "--ids", "5 6 7", "--max-new-tokens", 100)
    assert result.exit_code == INTERRUPTED
    assert len(interrupted) == 8
    assert 1 <= len(result.stdout.split()) <= 8


def test_an_interrupt_before_the_first_step_is_one_line(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_quiet", stop)
    assert complaint(run(source, "--ids", "5"), INTERRUPTED) == "hal generate: interrupted"


def test_a_second_interrupt_acts_at_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(*_: object) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Engine, "step", twice)
    result = run(source, "--ids", "5", "--max-new-tokens", 100)
    assert result.exit_code == INTERRUPTED
    assert result.stderr == "hal generate: interrupted\n"
