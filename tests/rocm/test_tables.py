"""Configurations keep what an arch allows before anything is compiled."""

import pytest

from hal_rocm.arches import ARCHES
from hal_rocm.plugin import MANIFEST
from hal_rocm.tables import TABLES, table
from hal_triton.tuning import DEFAULT, UNBOUNDED


def test_every_declared_arch_has_a_table_and_no_other() -> None:
    assert tuple(TABLES) == tuple(ARCHES) == MANIFEST.arches


@pytest.mark.parametrize("arch", ARCHES)
def test_a_table_has_the_names_of_the_default_and_ends_without_a_limit(arch: str) -> None:
    assert set(TABLES[arch]) <= set(DEFAULT)
    for name, held in table(arch).items():
        limits = [limit for limit, _ in held]
        assert limits == sorted(limits), name
        assert limits[-1] == UNBOUNDED, name


@pytest.mark.parametrize("arch", ARCHES)
def test_no_configuration_has_more_waves_than_a_workgroup(arch: str) -> None:
    most = {64: 16, 32: 32}[ARCHES[arch].wave]
    assert ARCHES[arch].warps == most
    for name, held in table(arch).items():
        assert all(config.warps <= most for _, config in held), name


@pytest.mark.parametrize("arch", ARCHES)
def test_no_configuration_has_more_stages_than_the_pipeliner_takes(arch: str) -> None:
    for name, held in table(arch).items():
        assert all(config.stages in (1, 2) for _, config in held), name
        if name in TABLES[arch]:
            assert all(config.stages == 1 for _, config in held), name


@pytest.mark.parametrize("arch", ARCHES)
def test_tiles_of_products_have_at_least_16_rows(arch: str) -> None:
    for name, held in table(arch).items():
        if "chunks" in name or "walk" in name:
            sizes = [size for _, config in held for block, size in config.blocks.items()
                     if block != "SEG"]  # fmt: skip
            assert min(sizes) >= 16, name


def test_only_gfx950_has_more_than_64_kib_of_lds() -> None:
    assert {name: arch.lds // 1024 for name, arch in ARCHES.items()} == {
        "gfx90a": 64, "gfx942": 64, "gfx950": 160, "gfx1100": 64, "gfx1151": 64, "gfx1201": 64,
    }  # fmt: skip
