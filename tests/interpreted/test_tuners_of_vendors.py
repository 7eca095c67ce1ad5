"""Each vendor's tuner sweeps what its provider reads, and the provider reads what it is told."""

import json
from pathlib import Path
from typing import Any

import pytest

from hal.binding import build
from hal.device import Device
from hal.errors import ProviderError
from hal_cuda import provider as cuda
from hal_cuda.hopper import tuner as hopper
from hal_cuda.hopper.prefill import TABLE
from hal_cuda.tuner import TUNER as CUDA
from hal_registry import Candidate, load
from hal_rocm import provider as rocm
from hal_rocm.plugin import MANIFEST as ROCM_MANIFEST
from hal_rocm.tuner import STAGES
from hal_rocm.tuner import TUNER as ROCM
from hal_triton.table_file import VARIABLE, TableError, document
from hal_triton.tune.candidates import CANDIDATES
from hal_triton.tuning import DEFAULT, UNBOUNDED, Config

NAME = "delta_rule.decode"
MINE = {NAME: ((UNBOUNDED, Config({"BV": 128}, 2)),)}


@pytest.mark.parametrize("tuner", [CUDA, ROCM, hopper.TUNER], ids=["cuda", "rocm", "hopper"])
def test_a_tuner_is_found_under_its_own_path(tuner: Any) -> None:
    assert load(tuner.path) is tuner


def test_every_name_that_a_vendor_offers_can_be_swept() -> None:
    assert set(CUDA.names) == set(DEFAULT)
    assert set(ROCM.names) == set(DEFAULT) - {"norm"}  # it offers no fused prefill
    assert list(hopper.TUNER.names) == [TABLE]


@pytest.mark.parametrize("tuner", [CUDA, ROCM, hopper.TUNER], ids=["cuda", "rocm", "hopper"])
def test_every_class_has_candidates_and_an_entry_that_is_shipped(tuner: Any) -> None:
    shipped = tuner.shipped("gfx942" if tuner is ROCM else "sm_90")
    for each in tuner.chosen(()):
        assert tuner.candidates[each.name]
        assert any(each.limit <= limit for limit, _ in shipped.table[each.name])


def test_no_candidate_of_amd_has_stages_that_end_the_compiler() -> None:
    tried: Any = ROCM
    for name, configs in tried.candidates.items():
        assert all(config.stages <= STAGES for config in configs)
        assert all(config in configs for config in CANDIDATES[name] if config.stages <= STAGES)


@pytest.mark.parametrize(("vendor", "arch"), [(cuda, "sm_90"), (rocm, "gfx942")])
def test_a_provider_reads_the_file_that_it_is_told_and_refuses_one_of_another_arch(
    vendor: Any, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(document(MINE, arch, {})))
    monkeypatch.delenv(VARIABLE, raising=False)
    before = vendor.tuning(arch)
    monkeypatch.setenv(VARIABLE, str(path))
    after = vendor.tuning(arch)
    assert after.table == {**before.table, **MINE}
    assert (after.solve, after.drafts) == (before.solve, before.drafts)
    other = {"sm_90": "sm_80", "gfx942": "gfx90a"}[arch]
    with pytest.raises(TableError, match=f"is of arch '{arch}', the device is '{other}'"):
        vendor.tuning(other)


def test_a_provider_is_not_built_over_a_file_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(document(MINE, "sm_90", {})))
    monkeypatch.setenv(VARIABLE, str(path))
    with pytest.raises(ProviderError, match="is of arch 'sm_90', the device is 'gfx1100'"):
        build(Candidate(ROCM_MANIFEST, "hybrid-hal-rocm", "0"), Device("rocm"), {})
