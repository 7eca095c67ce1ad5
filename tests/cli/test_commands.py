"""Commands answer on stdout, complain in one line on stderr, and mean what their status says."""

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from hal.cli import main
from support.model_configs import CONFIGS
from support.registry import Zoo

HAL = str(Path(sysconfig.get_path("scripts")) / "hal")
REAL, TINY = CONFIGS / "real", CONFIGS / "tiny"
LFM, GDN = str(REAL / "lfm2-350m.json"), str(REAL / "qwen3-next-80b-a3b.json")


def hal(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the console script, outside the repository."""
    return subprocess.run(
        [HAL, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        timeout=120,
        env={**os.environ, **environment},
    )


@dataclass(frozen=True)
class Ran:
    """What a command did: its status and what it printed."""

    returncode: int
    stdout: str
    stderr: str


Call = Callable[..., Ran]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Run the command line in this process, which is faster than a process of its own."""

    def run(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["hal", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        code = end.value.code
        return Ran(code if isinstance(code, int) else 0, *capsys.readouterr())

    return run


def test_the_console_script_is_the_same_main() -> None:
    assert hal("check", LFM, "-d", "npu").returncode == 1
    assert hal("check", LFM, "-d", "cpu").returncode == 0
    assert hal("check", "/no/such.json", "-d", "cpu").returncode == 2


@pytest.mark.parametrize("command", ["check", "explain"])
@pytest.mark.parametrize(
    ("device", "status"), [("cpu", 0), ("npu", 1), ("cuda", 0), ("rocm", 0), ("gpu", 1)]
)
def test_the_status_says_whether_it_fits(
    call: Call, command: str, device: str, status: int
) -> None:
    ran = call(command, LFM, "--device", device)
    assert ran.returncode == status, ran.stderr
    assert ran.stderr == ""
    assert ran.stdout.startswith("lfm2 runs on" if status == 0 else "lfm2 cannot run on")


@pytest.mark.parametrize("command", ["check", "explain"])
@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_json_is_the_same_answer(call: Call, command: str, device: str) -> None:
    text, data = call(command, LFM, "-d", device), call(command, LFM, "-d", device, "--json")
    plain = json.loads(data.stdout)
    assert data.returncode == text.returncode
    assert plain["fits"] is (text.returncode == 0)
    if not plain["fits"]:
        assert plain["headline"] == text.stdout.splitlines()[0]


BAD = {
    "no such file": (["check", "/no/such.json", "-d", "cpu"], "found no such file"),
    "device without form": (["check", LFM, "-d", "NPU"], "device: got 'NPU'"),
    "dtype": (["check", LFM, "-d", "cpu", "--dtype", "int8"], "dtype: got 'int8'"),
    "tp": (["check", LFM, "-d", "cpu", "--tp", "0"], "tp: rank 0 of 0"),
    "width": (["check", LFM, "-d", "cpu", "--speculative", "0"], "speculative: width 0"),
    "tree alone": (["check", LFM, "-d", "cpu", "--tree"], "--tree needs --speculative"),
    "provider": (["check", LFM, "-d", "cpu", "--provider", "x"], "expected INTERFACE=NAME"),
    "override": (["check", LFM, "-d", "cpu", "--provider", "x=y"], "neither an interface nor"),
    "two arches": (["check", LFM, "-d", "cuda:sm_90", "--arch", "sm_80"], "is not the arch of"),
    "arch without form": (["check", LFM, "-d", "cuda", "--arch", "SM 90"], "device: got 'cuda:SM"),
    "explain": (["explain", "/no/such.json", "-d", "cpu"], "found no such file"),
    "memory without a unit": (
        ["plan", LFM, "-d", "cpu", "--memory", "141"],
        "--memory: got '141', expected a size with its unit, such as 141GiB",
    ),
    "device index": (["check", LFM, "-d", "cpu:" + "9" * 5000], "device: got 'cpu:999"),
    "memory": (["plan", LFM, "-d", "cpu", "--memory", "much"], "--memory: got 'much'"),
    "bandwidth": (["plan", LFM, "-d", "cpu", "--bandwidth", "4x"], "--bandwidth: got '4x'"),
    "context": (["plan", LFM, "-d", "cpu", "--context", "0"], "--context: got '0'"),
    "card": (["plan", LFM, "-d", "cpu", "--card", "h300"], "--card h300: expected one of a100"),
    "weights": (["plan", LFM, "-d", "cpu", "--weights", "-1"], "--weights: got '-1'"),
}


@pytest.mark.parametrize("kind", sorted(BAD))
def test_bad_input_is_one_line_with_what_is_expected(call: Call, kind: str) -> None:
    arguments, text = BAD[kind]
    ran = call(*arguments)
    assert ran.returncode == 2
    assert ran.stdout == ""
    (line,) = ran.stderr.splitlines()
    assert line.startswith(f"hal {arguments[0]}: ")
    assert text in line


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": 3}', "\x00"])
def test_a_config_that_cannot_be_read_is_bad_input(call: Call, tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    ran = call("check", str(tmp_path), "--device", "cpu")
    assert ran.returncode == 2
    assert len(ran.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["check", "explain", "plan"])
def test_debug_adds_the_traceback(call: Call, command: str) -> None:
    ran = call(command, "/no/such.json", "-d", "cpu", "--debug")
    assert ran.returncode == 2
    assert "Traceback" in ran.stderr
    assert ran.stderr.splitlines()[-1].startswith(f"hal {command}: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", LFM, "-d", "cpu", "--tp", "9" * 5000],
        ["chek"],
        ["check"],
        ["check", LFM],
        ["check", LFM, "-d", "cpu", "--nope"],
    ],
)
def test_a_wrong_command_line_is_told_how_to_get_help(call: Call, arguments: list[str]) -> None:
    ran = call(*arguments)
    assert ran.returncode == 2
    assert "--help" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_the_help_lists_every_command_and_imports_none_of_them() -> None:
    from hal.cli import COMMANDS

    code = (
        "import sys; sys.argv = ['hal', '--help']\nfrom hal.cli import COMMANDS, main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print([c for c in COMMANDS if 'hal.cli.' + c.replace('-', '_') in sys.modules])"
    )
    ran = Zoo(Path("/")).python(code)
    assert ran.stdout.splitlines()[-1] == "[]"
    for name, text in COMMANDS.items():
        assert f"  {name} " in ran.stdout
        assert text in ran.stdout
        assert len(text) <= 52


@pytest.mark.parametrize("name", ["check", "explain", "matrix", "plan"])
def test_no_command_that_answers_imports_torch(name: str) -> None:
    arguments = {"matrix": []}.get(name, [GDN, "-d", "cpu"])
    code = (
        f"import sys; sys.argv = ['hal', {name!r}, *{arguments!r}]\nfrom hal.cli import main\n"
        "try: main()\nexcept SystemExit as end: print(end.code)\n"
        "print('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    ran = Zoo(Path("/")).python(code)
    assert ran.stdout.splitlines()[-2:] == ["0", "False"], ran.stderr


@pytest.mark.parametrize("command", ["check", "explain", "plan", "matrix", "doctor"])
def test_what_is_piped_has_no_boxes_and_no_wrapped_lines(command: str) -> None:
    arguments = [] if command in ("matrix", "doctor") else [GDN, "-d", "npu"]
    ran = hal(command, *arguments, COLUMNS="40")
    assert ran.stdout.isascii()
    assert "\x1b" not in ran.stdout
    assert max(map(len, ran.stdout.splitlines())) > 60


def test_generate_without_its_libraries_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch', name='torch')")
    ran = hal("generate", str(TINY), "--prompt", "x", PYTHONPATH=str(tmp_path))
    assert ran.returncode != 0
    (line,) = ran.stderr.splitlines()
    assert line.startswith("hal generate: torch is not installed; install ")


def test_a_broken_plugin_of_the_device_is_told_by_check(tmp_path: Path) -> None:
    zoo = Zoo(tmp_path)
    zoo.plugin("dist-a", "tpu.vendor", "raise OSError('libtpu.so: no such file')")
    ran = hal("check", LFM, "--device", "tpu", PYTHONPATH=str(tmp_path))
    assert ran.returncode == 1
    assert ran.stdout.splitlines()[0] == (
        "lfm2 cannot run on tpu: tpu.vendor is broken: OSError: libtpu.so: no such file"
    )


def test_options_reach_the_question(call: Call) -> None:
    ran = call("check", GDN, "-d", "cuda:0", "--arch", "sm_90", "--dtype", "float16", "--tp", "2",
              "--speculative", "3", "--tree", "--prefix-cache", "--graphs", "--json")  # fmt: skip
    assert json.loads(ran.stdout)["device"] == "cuda:0"
    told = call("explain", GDN, "-d", "cpu", "--speculative", "3", "--prefix-cache")
    assert "delta_rule.verify" in told.stdout
