"""Every kernel and configuration of the AMD provider compiles for every arch that it declares."""

from functools import cache

import pytest

from hal_rocm.arches import ARCHES
from hal_rocm.tables import table
from hal_triton.tuning import Config
from support import rocm_gate as gate


@cache
def build(arch: str, part: str) -> tuple[list[gate.Built], frozenset[tuple[str, Config]]]:
    """Compiled once, for all the tests of a part."""
    return gate.build(arch, part)


@pytest.mark.parametrize("part", gate.PARTS)
@pytest.mark.parametrize("arch", ARCHES)
def test_every_kernel_fits_the_arch(arch: str, part: str) -> None:
    built, taken = build(arch, part)
    assert not [problem for each in built for problem in each.kernel.problems]
    assert not [each.name for each in built if each.threads > 1024]
    assert not [each.name for each in built if any("xf32" in n for n in each.instructions)]
    unit = ARCHES[arch].unit
    dots = [b for b in built if b.kernel.name in gate.MULTIPLYING and b.dtype != "float32"]
    for each in dots:
        assert [n for n in each.instructions if unit in n and "16" in n], each.name
    assert gate.shipped(arch, part) == taken


@pytest.mark.parametrize("arch", ARCHES)
def test_every_name_of_a_table_belongs_to_one_part(arch: str) -> None:
    for name in table(arch):
        parts = [part for part, (_, starts) in gate.PARTS.items() if name.startswith(starts)]
        assert len(parts) == 1, (name, parts)
