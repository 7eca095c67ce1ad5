"""`hal doctor` shows what is wrong and says so by its status; `hal matrix` leaves out no family."""

import json
import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

from hal.cli.matrix import example
from hal.cli.output import aligned, markdown
from hal.model import read
from hal.model.families import FAMILIES
from hal_registry import default_registry
from support.registry import Zoo

HAL = str(Path(sysconfig.get_path("scripts")) / "hal")


def hal(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [HAL, *arguments], capture_output=True, text=True, check=False, cwd="/",
        env={**os.environ, **environment},
    )  # fmt: skip


def test_a_clean_house_is_status_0() -> None:
    ran = hal("doctor")
    assert ran.returncode == 0, ran.stdout
    assert ran.stdout.endswith("No faults and no import-name clashes.\n")
    for candidate in default_registry().candidates:
        assert str(candidate) in ran.stdout


def test_a_fault_is_shown_with_its_traceback(tmp_path: Path) -> None:
    zoo = Zoo(tmp_path)
    zoo.plugin("dist-a", "tpu.vendor", "def load():\n    raise OSError('libtpu')\nload()")
    ran = hal("doctor", PYTHONPATH=str(tmp_path))
    assert ran.returncode == 1
    assert "Fault: [plugin-broken] tpu.vendor (dist-a 1.0): OSError: libtpu" in ran.stdout
    assert "  |     raise OSError('libtpu')" in ran.stdout
    facts = json.loads(hal("doctor", "--json", PYTHONPATH=str(tmp_path)).stdout)
    assert facts["faults"][0]["origin"] == "dist-a 1.0"
    assert "libtpu" in facts["faults"][0]["traceback"]


def test_a_blocked_plugin_is_shown_and_is_no_fault_of_the_house() -> None:
    ran = hal("doctor", HAL_BLOCK="cuda.triton")
    assert ran.returncode == 0
    assert "[plugin-blocked] cuda.triton" in ran.stdout


def clash(zoo: Zoo, distribution: str, *files: str) -> None:
    zoo.add(distribution, {}, {})
    for file in files:
        (zoo.root / file).parent.mkdir(parents=True, exist_ok=True)
        (zoo.root / file).touch()
    info = zoo.root / f"{distribution}-1.0.dist-info"
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))


def test_two_distributions_of_one_import_name_are_a_clash(tmp_path: Path) -> None:
    zoo = Zoo(tmp_path)
    clash(zoo, "flint", "flint/__init__.py", "shared/a/__init__.py", "flint_only.py")
    clash(zoo, "flintascend", "flint/__init__.py", "shared/b/__init__.py")
    ran = hal("doctor", PYTHONPATH=str(tmp_path))
    assert ran.returncode == 1
    clashes = [line for line in ran.stdout.splitlines() if line.startswith("Clash")]
    assert clashes == [
        "Clash: import name flint comes from flint and flintascend; uninstall one of them"
    ]


def test_missing_libraries_of_a_provider_are_shown(tmp_path: Path) -> None:
    zoo = Zoo(tmp_path)
    source = (
        "from hal_registry import API, Manifest, hookimpl\n@hookimpl\ndef hal_providers():\n"
        "    return [Manifest('tpu.x', 'tpu', API, 'a:b', {}, needs=('no-such-lib>=2',))]"
    )
    zoo.plugin("dist-a", "tpu.x", source)
    ran = hal("doctor", PYTHONPATH=str(tmp_path))
    assert "[library-missing] no-such-lib: needed no-such-lib>=2; offered not installed" in (
        ran.stdout
    )


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_has_an_example_that_reads(family: str) -> None:
    model = read(example(family))
    assert model.model_type == family
    assert model.dtype == "bfloat16"
    assert any(model.stateful_layers()) or family == "minimax_m2"


def test_the_matrix_has_a_row_a_family_and_a_column_a_device() -> None:
    header, *rows = hal("matrix").stdout.splitlines()
    assert header.split() == ["family", *default_registry().devices()]
    assert [row.split()[0] for row in rows] == sorted(FAMILIES)


def test_the_matrix_as_json_holds_whole_answers() -> None:
    found = json.loads(hal("matrix", "--json").stdout)
    assert set(found["families"]) == set(FAMILIES)
    assert found["families"]["lfm2"]["npu"]["headline"].startswith("lfm2 cannot run on npu: ")
    proofs = {proof["operation"] for proof in found["proofs"] if proof["provider"] == "cpu.torch"}
    assert {"conv.prefill", "conv_state.step"} <= proofs


def test_columns_line_up() -> None:
    assert list(aligned([("a", "bb"), ("ccc",)], indent=1)) == [" a    bb", " ccc"]
    assert list(aligned([])) == []
    assert list(markdown(("a", "b"), [("1|2", "")])) == [
        "| a | b |",
        "| --- | --- |",
        "| 1\\|2 |  |",
    ]
