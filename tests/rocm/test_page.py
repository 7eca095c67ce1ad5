"""docs/rocm.md has the table of what was compiled, and what it says of the offers is so.

HAL_SNAPSHOTS=write puts the table into the page.
"""

import json
import re
from pathlib import Path
from typing import Any

from hal.cli.output import markdown
from hal_rocm.arches import ARCHES
from hal_rocm.plugin import MANIFEST
from support.snapshots import check_snapshot

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "rocm.md"
TABLE = re.compile(r"^\| kernel \|.*?\n\n", flags=re.DOTALL | re.MULTILINE)
REPORT = json.loads((DOCS / "reports" / "rocm-compiled.json").read_text())


def cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return "not offered"
    lds = found["lds"]
    size = f"{lds / 1024:.3g} KiB" if lds >= 1024 else f"{lds} B" if lds else "none"
    units = sorted({name.split("_")[1] for name in found["instructions"]})
    return ", ".join([size, *units])


def table() -> str:
    arches = REPORT["arches"]
    kernels = sorted({name for found in arches.values() for name in found})
    rows = [(f"`{name}`", *(cell(arches[a].get(name)) for a in ARCHES)) for name in kernels]
    return "\n".join(markdown(("kernel", *ARCHES), rows)) + "\n\n"


def test_the_table_is_that_of_the_report() -> None:
    check_snapshot(PAGE, TABLE.sub(lambda _: table(), PAGE.read_text()))
    assert f"as Triton {REPORT['triton']} builds it" in PAGE.read_text()


def test_the_report_has_every_arch_and_keeps_every_limit() -> None:
    assert list(REPORT["arches"]) == list(ARCHES) == list(MANIFEST.arches)
    for arch, kernels in REPORT["arches"].items():
        for name, found in kernels.items():
            assert found["lds"] <= ARCHES[arch].lds, (arch, name)
            assert found["threads"] <= ARCHES[arch].wave * ARCHES[arch].warps, (arch, name)
            assert all(ARCHES[arch].unit in used for used in found["instructions"]), (arch, name)


def test_the_page_says_that_nothing_ran_and_names_every_arch() -> None:
    text = PAGE.read_text()
    assert "**Nothing of it has run on an AMD GPU so far.**" in text
    assert all(arch in text for arch in ARCHES)
    assert not [proof for proof in MANIFEST.proofs if proof.level == "hardware"]
