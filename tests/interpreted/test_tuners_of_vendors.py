"""Each vendor's tuner sweeps what its provider reads, and the provider reads what it is told."""

import json
from collections import Counter
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from hal.binding import build
from hal.cli.tune import tuner_of
from hal.device import Device
from hal.errors import ProviderError
from hal_cuda import provider as cuda
from hal_cuda.hopper import tuner as hopper
from hal_cuda.hopper.prefill import CHANNEL_TABLE, TABLE
from hal_cuda.tuner import TUNER as CUDA
from hal_registry import Candidate, default_registry, load
from hal_rocm import provider as rocm
from hal_rocm.plugin import MANIFEST as ROCM_MANIFEST
from hal_rocm.tuner import STAGES
from hal_rocm.tuner import TUNER as ROCM
from hal_triton.table_file import VARIABLE, TableError, document
from hal_triton.tune.candidates import CANDIDATES
from hal_triton.tuning import DEFAULT, UNBOUNDED, Config

NAME = "delta_rule.decode"
BACKENDS = Path(__file__).parents[2] / "backends"
REFUSED = {
    "hal_rocm": {"norm": "rocm.triton does not offer delta_rule.prefill_fused, which reads it"}
}
MINE = {NAME: ((UNBOUNDED, Config({"BV": 128}, 2)),)}


@pytest.mark.parametrize("tuner", [CUDA, ROCM, hopper.TUNER], ids=["cuda", "rocm", "hopper"])
def test_a_tuner_is_found_under_its_own_path(tuner: Any) -> None:
    assert load(tuner.path) is tuner


def test_every_name_that_a_vendor_offers_can_be_swept() -> None:
    assert set(CUDA.names) == set(DEFAULT)
    assert set(ROCM.names) == set(DEFAULT) - {"norm"}  # it offers no fused prefill
    assert list(hopper.TUNER.names) == [TABLE, CHANNEL_TABLE]


def packages() -> list[str]:
    """The packages of vendors that ship tables of block sizes."""
    return sorted(path.parent.name for path in BACKENDS.glob("*/hal_*/tables.py"))


def tuners(package: str) -> list[Any]:
    """The tuners of a package's providers, as the command finds them."""
    registry = default_registry()
    found = [each for device in registry.devices() for each in registry.on(device)]
    ours = [each for each in found if each.manifest.load.startswith(f"{package}.")]
    return [tuner for each in ours if (tuner := tuner_of(each)) is not None]


def test_the_vendors_with_tables_are_all_found() -> None:
    assert packages() == ["hal_cuda", "hal_rocm"]
    assert [each.provider for each in tuners("hal_cuda")] == ["cuda.hopper", "cuda.triton"]
    assert [each.provider for each in tuners("hal_rocm")] == ["rocm.triton"]


@pytest.mark.parametrize("package", packages())
def test_every_name_of_a_shipped_table_is_swept_or_refused_with_the_reason(package: str) -> None:
    module = import_module(f"{package}.tables")
    shipped = set(DEFAULT).union(*(module.table(arch) for arch in module.TABLES))
    swept = {name for each in tuners(package) for name in each.names}
    refused = {name: why for each in tuners(package) for name, why in each.unswept.items()}
    assert swept <= shipped
    assert {name: refused[name] for name in shipped - swept} == REFUSED.get(package, {})


@pytest.mark.parametrize("tuner", [CUDA, ROCM, hopper.TUNER], ids=["cuda", "rocm", "hopper"])
def test_the_classes_of_a_name_are_neighbours_that_end_without_a_limit(tuner: Any) -> None:
    groups = [
        (name, [each.limit for each in group])
        for name, group in groupby(tuner.chosen(()), key=lambda each: each.name)
    ]
    assert [name for name, _ in groups] == list(tuner.names)
    for _, limits in groups:
        assert limits == sorted(set(limits)) and limits[-1] == UNBOUNDED


@pytest.mark.parametrize("tuner", [CUDA, ROCM, hopper.TUNER], ids=["cuda", "rocm", "hopper"])
def test_every_class_has_candidates_and_an_entry_that_is_shipped(tuner: Any) -> None:
    shipped = tuner.shipped("gfx942" if tuner is ROCM else "sm_90")
    for each in tuner.chosen(()):
        assert tuner.candidates[each.name]
        assert any(each.limit <= limit for limit, _ in shipped.table[each.name])


@pytest.mark.parametrize("package", packages())
def test_a_sweep_leaves_no_name_with_fewer_entries_than_are_shipped(package: str) -> None:
    module = import_module(f"{package}.tables")
    for tuner in tuners(package):
        made = Counter(each.name for each in tuner.chosen(()))
        for arch in module.TABLES:
            for name, count in made.items():
                assert count >= len(module.table(arch).get(name, ())), (arch, name)


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
