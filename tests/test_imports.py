"""What decides imports no torch and no vendor library, wherever it is run from."""

import subprocess
import sysconfig
from pathlib import Path

import pytest

from support.model_configs import CONFIGS
from support.registry import run_python

ROOT = Path(__file__).parents[1]
LFM = str(CONFIGS / "real" / "lfm2-350m.json")
HEAVY = ("torch", "triton", "torch_npu", "sgl_kernel_npu", "transformers", "numpy")

LIGHT = [
    "import hal",
    "import hal; dir(hal); hal.Device, hal.Shard, hal.ConfigError, hal.Unsupported",
    "import hal; hal.model.read",
    "import hal.model",
    "import hal.interfaces",
    "import hal.binding",
    "import hal.selection",
    "import hal.capacity, hal.cards, hal.weights",
    "import hal.cli",
    "import hal.cli.check, hal.cli.explain, hal.cli.plan, hal.cli.matrix, hal.cli.doctor",
    "import hal_registry; hal_registry.default_registry()",
    "import hal_cpu.plugin",
    "import hal_cuda.plugin",
    "import hal_rocm.plugin",
    "import hal_npu.plugin",
    f"import hal; hal.explain('cpu', {LFM!r})",
    f"import hal; hal.explain('npu', {LFM!r})",
    f"import hal\ntry: hal.select('npu', {LFM!r})\nexcept hal.Unsupported: pass",
    f"import hal\ntry: hal.select('gpu', {LFM!r})\nexcept hal.Unsupported: pass",
]


@pytest.mark.parametrize("code", LIGHT)
def test_it_imports_nothing_heavy(code: str) -> None:
    ran = run_python(f"{code}\nimport sys; print([m for m in {HEAVY!r} if m in sys.modules])")
    assert ran.stdout == "[]\n", ran.stderr


def test_importing_hal_discovers_nothing() -> None:
    code = "import hal, sys; print([m for m in sys.modules if m.startswith(('hal', 'pluggy'))])"
    assert run_python(code).stdout == "['hal']\n"


def test_every_public_name_loads() -> None:
    code = "import hal; print(all(getattr(hal, name) is not None for name in hal.__all__))"
    ran = run_python(code)
    assert ran.stdout == "True\n", ran.stderr


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    ran = run_python("import hal; hal.nothing")
    assert "AttributeError: module 'hal' has no attribute 'nothing'" in ran.stderr


def test_the_import_contracts_hold() -> None:
    lint = Path(sysconfig.get_path("scripts")) / "lint-imports"
    ran = subprocess.run(
        [str(lint), "--no-cache"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
