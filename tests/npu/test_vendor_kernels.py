"""The vendor's own kernels through the adapter, where a checkout of its package is named."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from npu.shims import package_of
from npu.vendored import VARIABLE, table, trials

SCRIPT = Path(__file__).parent / "vendored.py"
FEW = (
    "conv.prefill: plain",
    "conv.decode: plain",
    "conv.verify: plain",
    "delta_rule.decode: plain",
    "delta_rule.decode: layout=KV",
    "delta_rule.decode: gate=safe",
    "delta_rule.verify: plain",
    "delta_rule.prefill: dtype=bfloat16",
)
"""One trial of each form; `python tests/npu/vendored.py` runs all, which takes much longer."""

needs_checkout = pytest.mark.skipif(
    not os.environ.get(VARIABLE) or find_spec("triton") is None,
    reason=f"{VARIABLE} names no checkout of sgl-kernel-npu, or Triton is not installed",
)


@needs_checkout
def test_the_vendors_kernels_equal_the_oracle_in_the_interpreter() -> None:
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), *FEW],
        capture_output=True, text=True, check=False, timeout=600, env={**os.environ},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]


def test_every_trial_of_the_manifest_is_one_that_can_be_run() -> None:
    """The few are trials of the plan, and together they reach every operation but commit."""
    names = [str(trial) for trial in trials(())]
    assert set(FEW) <= {name for name in names if name.startswith(FEW)}
    kept = {str(trial).split(": ")[0] for trial in trials(FEW)}
    assert kept == {name.split(": ")[0] for name in names}


def test_a_checkout_may_be_given_by_any_of_its_folders(tmp_path: Path) -> None:
    package = tmp_path / "python" / "sgl_kernel_npu" / "sgl_kernel_npu"
    (package / "fla").mkdir(parents=True)
    (package / "fla" / "chunk.py").touch()
    for place in (tmp_path, package.parent, package):
        assert package_of(place) == package
    with pytest.raises(FileNotFoundError, match="holds no package sgl_kernel_npu"):
        package_of(tmp_path / "elsewhere")


def test_an_empty_table_has_its_head() -> None:
    assert list(table([])) == [
        "| operation | dtype | trials | result | limit | state | limit |",
        "|---|---|---|---|---|---|---|",
    ]
