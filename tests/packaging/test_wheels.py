"""Wheels hold their package, its marker and its metadata, and nothing else."""

import ast
import re
import shutil
import subprocess
import sys
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "hybrid-hal": ({"hal", "hal_registry"}, "."),
    "hybrid-hal-cpu": ({"hal_cpu"}, "backends/cpu"),
    "hybrid-hal-triton": ({"hal_triton"}, "backends/triton"),
    "hybrid-hal-cuda": ({"hal_cuda"}, "backends/cuda"),
    "hybrid-hal-rocm": ({"hal_rocm"}, "backends/rocm"),
    "hybrid-hal-npu": ({"hal_npu"}, "backends/npu"),
    "hybrid-hal-sglang": ({"hal_sglang"}, "integrations/sglang"),
    "hybrid-hal-vllm": ({"hal_vllm"}, "integrations/vllm"),
}
ENGINES = ("sglang", "vllm")
CORE = {"packaging", "pluggy", "rich", "typer"}
HEAVY = {
    "torch",
    "triton",
    "torch-npu",
    "triton-ascend",
    "sgl-kernel-npu",
    "transformers",
    "vllm",
    "sglang",
}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources: a build leaves folders behind that must not reach the next wheel."""
    copy = tmp_path_factory.mktemp("tree") / "project"
    copy.mkdir()
    skipped = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist")
    for name in ("hal", "registry", "backends", "integrations"):
        shutil.copytree(ROOT / name, copy / name, ignore=skipped)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module", params=sorted(PACKAGES))
def wheel(request: pytest.FixtureRequest, tree: Path) -> tuple[str, ZipFile]:
    """A distribution's name and its wheel."""
    name = str(request.param)
    out = tree / "wheels" / name
    ran = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)],
        cwd=tree / PACKAGES[name][1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    (file,) = out.glob("*.whl")
    return name, ZipFile(file)


def metadata(archive: ZipFile, name: str) -> Message:
    (path,) = [n for n in archive.namelist() if n.endswith(f".dist-info/{name}")]
    return Parser().parsestr(archive.read(path).decode())


def test_it_holds_its_packages_and_its_metadata_only(wheel: tuple[str, ZipFile]) -> None:
    name, archive = wheel
    tops = {path.split("/")[0] for path in archive.namelist()}
    infos = {top for top in tops if top.endswith(".dist-info")}
    assert len(infos) == 1
    assert tops - infos == PACKAGES[name][0]


def test_it_is_typed_and_whole(wheel: tuple[str, ZipFile]) -> None:
    name, archive = wheel
    packages, folder = PACKAGES[name]
    for package in packages:
        assert f"{package}/py.typed" in archive.namelist()
        where = ROOT / folder / ("registry" if package == "hal_registry" else "")
        sources = {str(path.relative_to(where)) for path in (where / package).rglob("*.py")}
        assert sources <= set(archive.namelist())
    for path in archive.namelist():
        if path.endswith(".py"):
            ast.parse(archive.read(path))


def test_it_needs_no_heavy_library_unless_an_extra_asks(wheel: tuple[str, ZipFile]) -> None:
    name, archive = wheel
    found = metadata(archive, "METADATA")
    assert found["Name"] == name
    assert found["Requires-Python"] == ">=3.11"
    needs = [Requirement(text) for text in found.get_all("Requires-Dist") or []]
    default = {
        need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})
    }
    assert not default & HEAVY
    if name == "hybrid-hal":
        assert default == CORE
    else:
        assert default <= {"hybrid-hal", "hybrid-hal-triton"}
    for need in needs:
        assert not (need.name in ("torch-npu", "triton-ascend") and "dev" in str(need.marker))


def test_it_registers_the_plugin_of_its_device(wheel: tuple[str, ZipFile]) -> None:
    name, archive = wheel
    texts = [archive.read(n).decode() for n in archive.namelist() if n.endswith("entry_points.txt")]
    points = re.findall(r"^([a-z]+\.[a-z]+) = (\S+)$", "\n".join(texts), flags=re.MULTILINE)
    device = name.removeprefix("hybrid-hal").removeprefix("-")
    if device in ENGINES:
        assert not points
        assert f"hal = hal_{device}.plugin:register" in texts[0]
        assert f"[hal.engines]\n{device} = hal_{device}.versions:PIN" in texts[0]
    elif device in ("", "triton"):
        assert not points
    else:
        assert [(point.split(".")[0], module) for point, module in points] == [
            (device, f"hal_{device}.plugin")
        ]


def test_no_kept_file_of_the_repository_is_in_it(wheel: tuple[str, ZipFile]) -> None:
    _, archive = wheel
    odd = [p for p in archive.namelist() if re.search(r"(^|/)(tests?|benchmarks|docs)/", p)]
    assert not odd
    assert not [p for p in archive.namelist() if p.endswith((".pyc", ".json.bak", ".orig"))]
