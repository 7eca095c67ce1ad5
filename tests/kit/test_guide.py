"""The guide for vendors builds a provider that passes the kit, and says what is so."""

import re
import sys
from pathlib import Path

import pytest

from hal.cli.new_provider import write
from hal.testing import ProviderSuite
from hal_registry import Offer
from hal_registry.vocabulary import FEATURES
from kit.test_vendor import pytest_in
from support.registry import Zoo

PAGE = (Path(__file__).parents[2] / "docs" / "write-a-provider.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
CONSOLE = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The skeleton that the guide starts from, importable as if it were installed."""
    Zoo(tmp_path).add("hal-acme-torch", {"acme.torch": "hal_acme_torch.plugin"}, {}, "0.1.0")
    write("acme.torch", str(tmp_path))
    return tmp_path


def test_the_skeleton_has_the_files_and_the_entry_point_of_the_page(project: Path) -> None:
    command, *files = CONSOLE[0].splitlines()
    assert command == "$ hal new-provider acme.torch"
    assert all((project / file.removeprefix("hal-acme-torch/")).exists() for file in files)
    (toml,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert toml in (project / "pyproject.toml").read_text()


def test_the_files_of_the_page_make_a_provider_that_passes(project: Path) -> None:
    files = [block for block in PYTHON if block.startswith("# ")]
    assert len(files) == 3
    for block in files:
        path, _, source = block.partition("\n")
        (project / path.removeprefix("# ")).write_text(source)
    done = pytest_in(project, "tests", path=project)
    assert done.returncode == 0, done.stdout


def test_the_skeleton_says_what_the_page_shows(project: Path) -> None:
    done = pytest_in(project, "tests", path=project)
    _, line = CONSOLE[1].splitlines()
    assert line in done.stdout


def test_the_expected_failure_of_the_page_is_accepted() -> None:
    (block,) = [block for block in PYTHON if not block.startswith("# ")]
    scope: dict[str, object] = {"__name__": "guide"}
    exec(block, scope)
    assert sys.modules["hal.testing.suite"].ProviderSuite in scope["TestAcme"].__mro__


def test_tests_that_the_page_names_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert named
    assert {name for name in named if getattr(ProviderSuite, name, None) is None} == set()


def test_the_page_names_every_field_and_feature_of_an_offer() -> None:
    table = PAGE[PAGE.index("| field | says |") : PAGE.index("Constraints that sets")]
    named = set(re.findall(r"`(\w+)`", table))
    assert set(Offer.__dataclass_fields__) <= named
    assert set(FEATURES) <= named
