"""Reading a config is light: no torch, no transformers, a fraction of a millisecond."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from hal.model import read
from support.model_configs import CONFIGS, TINY, real, tiny

HEAVY = ("torch", "transformers", "numpy", "huggingface_hub", "triton", "pluggy", "typer", "rich")


def loaded_after(code: str, folder: Path) -> set[str]:
    """Run code in a fresh interpreter outside the checkout and return the heavy modules it has."""
    script = f"{code}\nimport sys\nprint(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_reader_loads_nothing_heavy(tmp_path: Path) -> None:
    assert loaded_after("import hal.model", tmp_path) == set()


def test_reading_every_config_loads_nothing_heavy(tmp_path: Path) -> None:
    folder = str(CONFIGS / "tiny")
    code = "from pathlib import Path\nfrom hal.model import read\n"
    code += f"assert [read(path) for path in Path({folder!r}).glob('*.json')]"
    assert loaded_after(code, tmp_path) == set()


@pytest.mark.parametrize("config", [real("qwen3-next-80b-a3b.json"), *map(tiny, TINY)])
def test_reading_takes_well_under_five_milliseconds(config: dict[str, object]) -> None:
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        read(config)
        best = min(best, time.perf_counter() - start)
    assert best < 0.005


def test_the_public_names_are_those_of_the_package() -> None:
    import hal.model

    assert set(hal.model.__all__) >= {"read", "UnknownFamily", "ModelSpec", "Kind", "LayerSpec"}
    assert all(getattr(hal.model, name) for name in hal.model.__all__)
