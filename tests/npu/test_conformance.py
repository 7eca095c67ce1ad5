"""The whole conformance kit passes on the adapter over the fake vendor, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from hal_npu.plugin import MANIFEST
from npu.fakes import FAKE


def test_the_kit_passes_over_the_fake_vendor(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    kit = [
        sys.executable,
        "-m",
        "pytest",
        "--pyargs",
        "hal.testing",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    options = ["--hal-provider", "npu.ascend", "--hal-stand-in", "cpu", "--hal-report", str(report)]
    ran = subprocess.run(
        [*kit, *options], capture_output=True, text=True, check=False, timeout=600, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(FAKE), "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-4000:]
    (told,) = json.loads(report.read_text())["providers"]
    assert told["digest"] == MANIFEST.digest()
    assert set(told["operations"]) == set(MANIFEST.offers)
    assert "failed" not in json.dumps(told)
