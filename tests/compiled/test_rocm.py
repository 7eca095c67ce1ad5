"""Every kernel and configuration of the AMD provider compiles for every arch that it declares.

HAL_SNAPSHOTS=write keeps what was found in docs/reports, on one worker.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import triton

from hal_rocm.arches import ARCHES
from hal_rocm.tables import table
from support import rocm_gate as gate

REPORT = Path(__file__).parents[2] / "docs" / "reports" / "rocm-compiled.json"
EVERY = [(arch, part) for arch in ARCHES for part in gate.parts(arch)]


@pytest.fixture(scope="module", params=EVERY, ids="-".join)
def found(request: pytest.FixtureRequest) -> gate.Part:
    """A part compiled for an arch, for all of its tests."""
    return gate.build(*request.param)


def told() -> dict[str, Any]:
    """The report, empty where it is made anew."""
    found = json.loads(REPORT.read_text()) if REPORT.exists() else {}
    again = found.get("triton") == triton.__version__ and set(found["arches"]) == set(ARCHES)
    empty = {"triton": triton.__version__, "arches": {arch: {} for arch in ARCHES}}
    return found if again else empty


def test_every_kernel_fits_the_arch(found: gate.Part) -> None:
    assert not {problem for each in found.built for problem in each.kernel.problems}
    assert not {each.kernel.name for each in found.built if each.threads > 1024}
    assert gate.shipped(found.arch, found.name) <= found.taken


@pytest.mark.parametrize(("arch", "part"), EVERY, ids=lambda value: value)
def test_kernels_fit_where_states_take_more_than_2_gib(arch: str, part: str) -> None:
    """The compiler is told of every pointer whether 32 bits reach all of it."""
    built = gate.build_far(arch, part)
    assert not {problem for each in built for problem in each.kernel.problems}
    far = [each for each in built if "tt.pointer_range" in each.kernel.kernel.asm["ttir"]]
    assert far, "no other pointer is known to be near"


def test_products_of_16_bits_run_on_matrix_units_and_none_is_truncated(found: gate.Part) -> None:
    unit = ARCHES[found.arch].unit
    for each in found.built:
        assert not [name for name in each.instructions if "xf32" in name], each.kernel.name
        if each.is_narrow:
            used = [name for name in each.instructions if unit in name and "16" in name]
            assert used, f"{each.kernel.name} {each.dtype}"
    names = {each.kernel.name for each in found.built if each.is_narrow}
    assert names >= gate.NARROW.get(found.name, set())


def test_the_report_says_what_was_found(found: gate.Part) -> None:
    facts, report = gate.facts(found), told()
    if os.environ.get("HAL_SNAPSHOTS") == "write":
        kernels = {**report["arches"][found.arch], **facts}
        report["arches"][found.arch] = dict(sorted(kernels.items()))
        REPORT.write_text(json.dumps(report, indent=1) + "\n")
    recorded = json.loads(REPORT.read_text())
    if recorded["triton"] == triton.__version__:
        assert {name: recorded["arches"][found.arch].get(name) for name in facts} == facts


@pytest.mark.parametrize("arch", ARCHES)
def test_every_name_of_a_table_belongs_to_one_part(arch: str) -> None:
    for name in table(arch):
        parts = [part for part, (_, form) in gate.PARTS.items() if re.fullmatch(form, name)]
        assert len(parts) == 1, (name, parts)
