"""A vendor's distribution, as the smallest complete example, and what `hal new-provider` writes."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from support.registry import Zoo, run_python

ROOT = Path(__file__).parents[2]
ACME = ROOT / "tests" / "vendors" / "acme"
CHECK = """
import hal
for family in ({families}):
    from hal.cli.matrix import example
    answer = hal.explain({device!r}, example(family), dtype="bfloat16")
    print(family, answer.fits, str(answer).splitlines()[0])
import sys
assert "torch" not in sys.modules
"""


def pytest_in(folder: Path, *options: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Run pytest as a vendor does, with what is at `path` installed beside everything else."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options],
        cwd=folder, capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": str(path)},
    )  # fmt: skip


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as site-packages holds Acme's distribution, with its tests beside it."""
    site = tmp_path_factory.mktemp("acme")
    project = tomllib.loads((ACME / "pyproject.toml").read_text())["project"]
    Zoo(site).add(project["name"], project["entry-points"]["hal.providers"], {}, "0.1.0")
    shutil.copytree(ACME / "hal_acme", site / "hal_acme")
    shutil.copytree(ACME / "tests", site / "tests")
    return site


def test_the_fake_vendor_passes_the_kit_and_reports_it(acme: Path) -> None:
    done = pytest_in(acme, "tests", "--hal-report", "out.json", path=acme)
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout
    (found,) = json.loads((acme / "out.json").read_text())["providers"]
    assert found["provider"] == "acme.torch"
    assert found["distribution"] == "hal-acme"
    assert found["device"]["level"] == "interpreter"
    assert set(found["operations"]) == {
        "conv.prefill", "conv.decode", "delta_rule.prefill", "delta_rule.decode",
    }  # fmt: skip
    assert all(set(n) == {"passed", "dtypes"} for n in found["operations"].values())


def test_without_its_stand_in_the_device_is_absent_and_that_is_all_that_is_skipped(
    acme: Path,
) -> None:
    command = ("--pyargs", "hal.testing", "--hal-provider", "acme.torch", "-rs")
    done = pytest_in(acme, *command, path=acme)
    assert done.returncode == 5, done.stdout
    assert "Acme accelerators are not made yet" in done.stdout
    assert "failed" not in done.stdout
    required = pytest_in(acme, *command, "--hal-require-device", path=acme)
    assert required.returncode == 1
    assert "skipped" not in required.stdout


def test_a_family_fits_as_soon_as_the_vendor_is_installed(acme: Path) -> None:
    code = CHECK.format(families="'qwen3_next', 'lfm2'", device="acme")
    here = run_python(code, PYTHONPATH=str(acme)).stdout.splitlines()
    assert here[0].startswith("qwen3_next True qwen3_next runs on acme")
    assert here[1].startswith("lfm2 False ")
    assert "lfm2 cannot run on acme: conv_state is needed" in here[1]
    away = run_python(code).stdout.splitlines()
    assert away[0].startswith("qwen3_next False ")
    assert "qwen3_next cannot run on acme" in away[0]


def test_a_plugin_that_imports_torch_is_caught(acme: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    shutil.copytree(acme, site)
    plugin = site / "hal_acme" / "plugin.py"
    plugin.write_text(
        plugin.read_text().replace("from hal_registry", "import torch\nfrom hal_registry")
    )
    done = pytest_in(site, "tests", "-k", "imports_no_torch", path=site)
    assert done.returncode == 1
    assert "importing hal_acme.plugin imports" in done.stdout


@pytest.fixture(scope="module")
def skeleton(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new provider, written by the command and installed by pip; its project folder."""
    root = tmp_path_factory.mktemp("new") / "hal-quick-chip-native"
    hal = [sys.executable, "-c", "from hal.cli import main; main()"]
    subprocess.run([*hal, "new-provider", "quick_chip.native", "--path", str(root)], check=True,
                   capture_output=True)  # fmt: skip
    site = str(root.parent / "site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--no-deps", "--no-build-isolation", "--target", site, str(root)]
    done = subprocess.run(pip, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return root


def test_a_new_provider_passes_its_declaration_at_once_and_certifies_nothing(
    skeleton: Path,
) -> None:
    done = pytest_in(skeleton, "tests", path=skeleton.parent / "site")
    last = done.stdout.splitlines()[-1]
    assert "passed" in last, done.stdout
    assert not {"failed", "error", "skipped"} & set(last.replace(",", "").split()), last
    assert done.returncode == 5
    assert "no operation of quick_chip.native was run: its manifest offers none" in done.stdout


def test_a_new_provider_is_found_and_refuses_every_model_by_name(skeleton: Path) -> None:
    code = CHECK.format(families="'qwen3_next',", device="quick_chip")
    line = run_python(code, PYTHONPATH=str(skeleton.parent / "site")).stdout
    assert line.startswith("qwen3_next False ")
    assert "qwen3_next cannot run on quick_chip: conv and delta_rule are needed" in line


@pytest.mark.parametrize(
    "command", [("check", "--select", "E,F,I,UP,B,ANN"), ("format", "--check")]
)
def test_a_new_provider_pleases_the_linter(skeleton: Path, command: tuple[str, ...]) -> None:
    ruff = [sys.executable, "-m", "ruff", *command, "--isolated", "--line-length", "100"]
    code = str(skeleton / "hal_quick_chip_native")
    done = subprocess.run([*ruff, code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_nothing_that_exists_is_overwritten(tmp_path: Path) -> None:
    from hal.cli.new_provider import write

    write("acme.torch", str(tmp_path / "new"))
    plugin = tmp_path / "new" / "hal_acme_torch" / "plugin.py"
    plugin.write_text("mine")
    (tmp_path / "new" / "pyproject.toml").unlink()
    with pytest.raises(ValueError, match="exists; choose another --path, nothing was written"):
        write("acme.torch", str(tmp_path / "new"))
    assert plugin.read_text() == "mine"
    assert not (tmp_path / "new" / "pyproject.toml").exists()


@pytest.mark.parametrize("name", ["acme", "Acme.torch", "acme.", "acme.torch.x", "9.x", ""])
def test_a_name_is_a_device_and_a_flavour(name: str, tmp_path: Path) -> None:
    from hal.cli.new_provider import write

    with pytest.raises(ValueError, match=r"expected <device>\.<flavour>, as 'acme\.torch'"):
        write(name, str(tmp_path))
