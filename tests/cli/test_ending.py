"""However a command ends, its status says so: the reader left, Ctrl-C, a plugin misbehaved."""

import json
import os
import pty
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from hal.cli.ending import BROKEN_PIPE, INTERRUPTED
from support.model_configs import CONFIGS
from support.registry import Zoo, plugin_source

HAL = str(Path(sysconfig.get_path("scripts")) / "hal")
LFM = str(CONFIGS / "real" / "lfm2-350m.json")
COMMANDS = {
    "check": ["check", LFM, "-d", "cpu"],
    "check refused": ["check", LFM, "-d", "npu", "--json"],
    "check by typer": ["check", LFM, "-dcpu"],
    "explain": ["explain", LFM, "-d", "cpu"],
    "plan": ["plan", LFM, "-d", "cpu"],
    "matrix": ["matrix", "--json"],
    "doctor": ["doctor"],
    "help": ["--help"],
    "help of a command": ["plan", "--help"],
}
HOOK = "from hal_registry import *\n@hookimpl\n"


def environment(root: Path | None = None, **extra: str) -> dict[str, str]:
    """What a command sees: the zoo, where there is one, beside what is importable already."""
    path = os.pathsep.join(filter(None, (str(root or ""), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **extra}


def run(
    *arguments: str, root: Path | None = None, **extra: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [HAL, *arguments], capture_output=True, text=True, check=False, cwd="/", timeout=120,
        env=environment(root, **extra),
    )  # fmt: skip


def redirected(kind: str, where: str) -> subprocess.CompletedProcess[str]:
    """Run a command by a shell, its stdout as `where` says, its errors told apart."""
    command = subprocess.list2cmdline([HAL, *COMMANDS[kind]])
    return subprocess.run(
        ["sh", "-c", f"{command} {where}"], capture_output=True, text=True, check=False, cwd="/",
        timeout=120, env=environment(),
    )  # fmt: skip


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_reader_that_leaves_is_status_141_without_a_word(kind: str) -> None:
    read, write = os.pipe()
    os.close(read)
    ran = subprocess.run(
        [HAL, *COMMANDS[kind]], stdout=write, stderr=subprocess.PIPE, text=True, check=False,
        cwd="/", timeout=120, env=environment(),
    )  # fmt: skip
    os.close(write)
    assert (ran.returncode, ran.stderr) == (BROKEN_PIPE, "")


@pytest.mark.parametrize("kind", COMMANDS)
@pytest.mark.parametrize("where", [">&-", "> /dev/full"])
def test_an_answer_that_cannot_be_written_is_no_success(kind: str, where: str) -> None:
    if where == "> /dev/full" and not Path("/dev/full").exists():
        pytest.skip("there is no device that is always full")
    ran = redirected(kind, where)
    assert ran.returncode == 2
    (line,) = ran.stderr.splitlines()
    assert line.startswith("hal")


@pytest.mark.parametrize("kind", ["check", "doctor"])
def test_without_stderr_the_answer_is_the_same(kind: str) -> None:
    assert redirected(kind, "2>&-").stdout == run(*COMMANDS[kind]).stdout
    assert redirected(kind, "2>&-").returncode == 0


SLOW = "import pathlib, time\npathlib.Path(__file__).with_suffix('.ran').touch()\ntime.sleep(60)\n"


@pytest.mark.parametrize("kind", ["check", "check by typer", "explain", "plan", "matrix", "doctor"])
def test_ctrl_c_is_status_130_without_a_traceback(tmp_path: Path, kind: str) -> None:
    Zoo(tmp_path).plugin("dist-a", "tpu.slow", SLOW)
    process = subprocess.Popen(
        [HAL, *COMMANDS[kind]], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/",
        env=environment(tmp_path),
    )  # fmt: skip
    until = time.monotonic() + 60
    while not list(tmp_path.glob("*.ran")) and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (INTERRUPTED, "")
    assert "Traceback" not in errors


NOISY = (
    "print('loading the vendor')\n"
    + plugin_source("cpu.noisy")
    + "\n@hookimpl\ndef hal_veto(selection):\n    print('asked')\n    return []\n"
)


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", LFM, "-d", "cpu", "--json"],
        ["check", LFM, "-dcpu", "--json"],
        ["explain", LFM, "-d", "cpu", "--json"],
        ["plan", LFM, "-d", "cpu", "--json"],
        ["matrix", "--json"],
        ["doctor", "--json"],
    ],
    ids=lambda arguments: " ".join(arguments[:1]),
)
def test_what_plugins_print_goes_to_stderr(tmp_path: Path, arguments: list[str]) -> None:
    Zoo(tmp_path).plugin("dist-a", "cpu.noisy", NOISY)
    ran = run(*arguments, root=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)
    said = set(ran.stderr.splitlines())
    assert said <= {"loading the vendor", "asked"}
    assert "loading the vendor" in said


@pytest.mark.parametrize(
    ("command", "error"),
    [
        *((name, "SystemExit(0)") for name in ("check", "check by typer", "matrix", "doctor")),
        ("check", "SystemExit"),
        ("doctor", "GeneratorExit('x')"),
    ],
)
def test_strict_is_never_a_silent_success(tmp_path: Path, command: str, error: str) -> None:
    Zoo(tmp_path).plugin("dist-a", "tpu.exits", f"raise {error}")
    ran = run(*COMMANDS[command], root=tmp_path, HAL_STRICT="1")
    assert (ran.returncode, ran.stdout) == (2, "")
    (line,) = ran.stderr.splitlines()
    assert error.partition("(")[0] in line


ODD = {
    "need": HOOK + "def hal_providers(): return [Manifest('tpu.a', 'tpu', API, 'a:b', {},"
    " needs=('torch>=2.*',))]",
    "device": HOOK + "def hal_providers(): return [Manifest('_e.a', '_e', API, 'a:b', {})]",
    "exit": "raise SystemExit(0)",
    "library": HOOK + "def hal_providers(): return [Manifest('tpu.library', 'tpu', API, 'a:b', {},"
    " needs=('pluggy>=1', 'torch; python_version < \"3\"', 'no-such-lib'))]",
}


def test_one_plugin_does_not_end_the_doctor(tmp_path: Path) -> None:
    zoo = Zoo(tmp_path)
    for kind, source in ODD.items():
        zoo.plugin(f"dist-{kind}", f"tpu.{kind}", source)
    (tmp_path / "nameless-1.0.dist-info").mkdir()
    (tmp_path / "nameless-1.0.dist-info" / "RECORD").write_text("zoo_need.py,,\npluggy/x.py,,\n")
    ran = run("doctor", root=tmp_path)
    assert ran.returncode == 1, ran.stderr
    assert ran.stderr == ""
    faults = [line for line in ran.stdout.splitlines() if line.startswith("Fault: ")]
    assert len(faults) == 3
    assert "cpu.torch" in ran.stdout
    assert "no-such-lib: needed no-such-lib; offered not installed" in ran.stdout


def test_a_veto_of_no_words_is_a_reason_and_not_a_crash(tmp_path: Path) -> None:
    veto = "def hal_veto(selection): return [Reason(Code.MODE_UNSUPPORTED, None, 'a', 'b')]"
    Zoo(tmp_path).plugin("dist-a", "cpu.veto", HOOK + veto)
    ran = run("check", LFM, "-d", "cpu", root=tmp_path)
    assert (ran.returncode, ran.stderr) == (1, "")
    assert "is broken: TypeError: subject of a Reason: expected text" in ran.stdout.splitlines()[0]


def test_the_matrix_reads_alike_on_a_narrow_terminal() -> None:
    """A line a family, whatever the width: a terminal can scroll, and grep finds whole words."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [HAL, "matrix"], stdout=theirs, cwd="/", env=environment(COLUMNS="40", TERM="xterm")
    )
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 65536):
            shown += part
    except OSError:  # how Linux says that the other side has closed
        pass
    os.close(ours)
    assert process.wait(timeout=60) == 0
    assert shown.decode().replace("\r\n", "\n") == run("matrix").stdout


def test_the_module_is_the_same_command() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "hal.cli", "check", LFM, "-d", "npu"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 1
    assert ran.stdout == run("check", LFM, "-d", "npu").stdout
