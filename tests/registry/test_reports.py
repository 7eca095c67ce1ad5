"""Proofs by hardware rest on a committed report, of this declaration."""

import json
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from hal_registry import Candidate, Proof, default_registry

ROOT = Path(__file__).parents[2]
PROVED = [
    candidate
    for candidate in default_registry().candidates
    if any(proof.level == "hardware" for proof in candidate.manifest.proofs)
]


def proofs(candidate: Candidate) -> list[Proof]:
    return [proof for proof in candidate.manifest.proofs if proof.level == "hardware"]


def report(candidate: Candidate, path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The report, and what it says of the provider."""
    found = json.loads((ROOT / path).read_text(encoding="utf-8"))
    (mine,) = [each for each in found["providers"] if each["provider"] == candidate.name]
    return found, mine


def test_the_cpu_is_proved() -> None:
    assert "cpu.torch" in {candidate.name for candidate in PROVED}


def test_the_gpu_is_proved() -> None:
    assert "cuda.triton" in {candidate.name for candidate in PROVED}


@pytest.mark.parametrize("candidate", PROVED, ids=lambda candidate: candidate.name)
def test_a_report_is_of_this_declaration_and_says_when_and_with_what(candidate: Candidate) -> None:
    manifest = candidate.manifest
    libraries = [Requirement(need).name for need in manifest.needs]
    for proof in {(p.report, p.date, p.versions, p.arch): p for p in proofs(candidate)}.values():
        found, mine = report(candidate, proof.report)
        assert found["complete"]
        assert mine["digest"] == manifest.digest(), f"run make report PROVIDER={candidate.name}"
        assert proof.date == found["date"]
        assert mine["device"]["level"] == "hardware"
        assert proof.arch in ("", mine["device"]["arch"])
        words = {f"{name} {mine['versions'][name]}" for name in libraries}
        assert words | {f"Python {mine['versions']['python']}"} == set(proof.versions.split(", "))


@pytest.mark.parametrize("candidate", PROVED, ids=lambda candidate: candidate.name)
def test_what_is_proved_has_passed_and_nothing_of_it_failed(candidate: Candidate) -> None:
    for proof in proofs(candidate):
        _, mine = report(candidate, proof.report)
        counts = dict(mine["operations"][proof.operation])
        dtypes = counts.pop("dtypes")
        for count in (mine.get("declaration", counts), counts, dtypes.get(proof.dtype, counts)):
            assert set(count) == {"passed"}
            assert count["passed"] > 0
