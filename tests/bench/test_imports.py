"""Measuring needs torch and what it measures, and nothing of the tests."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "hal" / "bench"
MODULES = sorted(
    ".".join(("hal.bench", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
)


@pytest.mark.parametrize("module", ["hal.bench.shapes", "hal.bench.refusal", "hal.tuner"])
def test_what_only_names_shapes_and_refusals_imports_no_torch(module: str) -> None:
    assert run(f"import {module}, sys; print('torch' in sys.modules)") == "False"


def test_measuring_needs_neither_pytest_nor_a_peer_nor_matplotlib() -> None:
    absent = ("pytest", "_pytest", "hypothesis", "matplotlib", "transformers", "triton", "fla")
    code = f"import sys; sys.modules.update(dict.fromkeys({absent}))\n"
    assert len(MODULES) > 15
    assert run(code + f"import {', '.join(MODULES)}; print('done')") == "done"


def run(code: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd="/"
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()
