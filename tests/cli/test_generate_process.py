"""`hal generate` as a process: a real Ctrl-C, a reader that leaves, a plugin that is broken."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hal.cli.ending import BROKEN_PIPE, INTERRUPTED
from hal.cli.errors import REFUSED
from support.models import folder_of

ENTRY = ("-m", "hal.cli")
LONG = ("--max-new-tokens", "490", "--json")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of("lfm2", tmp_path_factory.mktemp("models"))


def start(folder: Path, *options: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *ENTRY, "generate", str(folder), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def test_ctrl_c_ends_the_process_with_what_it_has(source: Path) -> None:
    prompts = [o for i in range(5, 45) for o in ("--ids", str(i))]
    process = start(source, *prompts, "--max-batch", "1", *LONG)
    assert process.stdout is not None
    first = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    records = [json.loads(line) for line in (first + rest).splitlines()]
    assert process.returncode == INTERRUPTED
    assert len(records) == 40
    assert records[-1]["finish_reason"] == "cancelled"
    assert records[-1]["ids"] == []
    assert "Traceback" not in errors
    assert errors.splitlines()[-1].startswith("hal generate: interrupted, ")


def test_a_reader_that_leaves_ends_the_process_without_a_word(source: Path) -> None:
    prompts = [o for i in range(5, 15) for o in ("--ids", str(i))]
    process = start(source, *prompts, "--max-batch", "1", *LONG)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=60) == BROKEN_PIPE
    assert errors == ""
    process.stderr.close()


def test_a_device_whose_plugin_is_broken_is_one_line(source: Path, tmp_path: Path) -> None:
    info = tmp_path / "bead_frame-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bead-frame\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hal.providers]\nabacus.beads = no_such_beads\n")
    process = start(source, "--ids", "5", "--device", "abacus", PYTHONPATH=str(tmp_path))
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (REFUSED, "")
    assert "Traceback" not in errors
    assert errors.startswith("hal generate: lfm2 cannot run on abacus")
    assert "no_such_beads" in errors
    assert len(errors.splitlines()) == 1


def test_the_command_can_be_imported_without_torch() -> None:
    code = "import sys, hal.cli.generate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
