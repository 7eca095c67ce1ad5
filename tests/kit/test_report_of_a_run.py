"""A device run is turned into a report only of the declarations that it ran."""

import copy
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from hal_cuda.hopper.plugin import MANIFEST as HOPPER
from hal_cuda.plugin import MANIFEST

PROOF = Path(__file__).parents[2] / "benchmarks" / "gpu" / "proof.py"
RUN: dict[str, Any] = {
    "environment": {
        "device": "NVIDIA Test",
        "arch": "sm_99",
        "python": "3.12.9",
        "torch": "2.99",
        "triton": "9.9",
        "date": "2026-01-02 03:04",
        "declarations": {m.name: m.digest() for m in (MANIFEST, HOPPER)},
    },
    "lost": 0,
    "check": [
        {"name": "bfloat16 conv.decode one", "seconds": 1, "error": ""},
        {"name": "bfloat16 conv.verify two", "seconds": 1, "error": ""},
        {"name": "float32 delta.prefill three", "seconds": 1, "error": "wrong"},
        {"name": "bfloat16 hopper.prefill four", "seconds": 1, "error": ""},
    ],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the run lies and the report is written."""
    monkeypatch.setattr(sys, "argv", ["proof.py", str(tmp_path / "run"), str(tmp_path / "report")])
    return tmp_path


def written(folder: Path, run: dict[str, Any], status: int = 0) -> dict[str, Any]:
    """The report of a run, or nothing where none was written."""
    (folder / "run").write_text(json.dumps(run))
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(PROOF), run_name="__main__")
    assert done.value.code == status
    path = folder / "report"
    found = json.loads(path.read_text()) if path.exists() else {}
    assert isinstance(found, dict)
    return found


def without(*names: str) -> dict[str, Any]:
    """The run as older ones are, which do not say everything."""
    run = copy.deepcopy(RUN)
    for name in names:
        del run["environment"][name]
    return run


def test_arch_versions_and_digests_are_those_of_the_run(folder: Path) -> None:
    found = written(folder, RUN)
    assert (found["complete"], found["assumed"], found["date"]) == (True, [], "2026-01-02")
    assert found["checks"] == {"passed": 3, "failed": 1}
    for mine, manifest in zip(found["providers"], (MANIFEST, HOPPER), strict=True):
        assert (mine["provider"], mine["digest"]) == (manifest.name, manifest.digest())
        assert mine["device"]["arch"] == "sm_99"
        assert mine["versions"] == {"python": "3.12.9", "torch": "2.99", "triton": "9.9"}


def test_operations_are_counted_by_dtype_and_commits_with_their_verify(folder: Path) -> None:
    triton, hopper = written(folder, RUN)["providers"]
    assert set(triton["operations"]) == {
        "conv.decode", "conv.verify", "conv.commit", "delta_rule.prefill",
    }  # fmt: skip
    assert triton["operations"]["delta_rule.prefill"]["dtypes"] == {"float32": {"failed": 1}}
    assert hopper["operations"] == {
        "delta_rule.prefill": {"passed": 1, "dtypes": {"bfloat16": {"passed": 1}}}
    }


@pytest.mark.parametrize("manifest", [MANIFEST, HOPPER], ids=lambda manifest: manifest.name)
@pytest.mark.parametrize("changed", ["0" * 64, None])
def test_a_run_of_another_declaration_is_refused(
    folder: Path, manifest: Any, changed: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy.deepcopy(RUN)
    if changed is None:
        del run["environment"]["declarations"][manifest.name]
    else:
        run["environment"]["declarations"][manifest.name] = changed
    assert written(folder, run, status=1) == {}
    said = capsys.readouterr().err
    assert f"{manifest.name}: the run is of declaration {changed or 'none'}" in said
    assert manifest.digest() in said


@pytest.mark.parametrize("names", [("arch",), ("arch", "python", "declarations")])
def test_what_a_run_does_not_say_is_listed_as_assumed(
    folder: Path, names: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    found = written(folder, without(*names))
    assert found["assumed"] == list(names)
    assert found["providers"][0]["device"]["arch"] == "sm_90"
    assert f"the run does not say: {', '.join(names)}; assumed" in capsys.readouterr().err


def test_a_run_without_checks_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = copy.deepcopy(RUN)
    del run["check"]
    assert written(folder, run, status=1) == {}
    assert "no parity checks; h200.py makes them with --check" in capsys.readouterr().err


def test_a_run_that_lost_a_worker_is_not_complete(folder: Path) -> None:
    assert written(folder, {**RUN, "lost": 1})["complete"] is False
