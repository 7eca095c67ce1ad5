"""`hal new-provider` writes distributions that stand beside each other and what is installed."""

from pathlib import Path

import pytest

from hal.cli.new_provider import write
from support.registry import Zoo, run_python

FOUND = """
from hal_registry import discover
registry = discover()
print(*(f"{c.name}={c.distribution}" for c in registry.candidates), len(registry.faults))
"""


def installed(zoo: Path, *names: str) -> None:
    """Write new providers and put them where an installer would."""
    for name in names:
        project = "hal-" + name.replace(".", "-").replace("_", "-")
        package = project.replace("-", "_")
        write(name, str(zoo))
        (zoo / "pyproject.toml").unlink()
        Zoo(zoo).add(project, {name: f"{package}.plugin"}, {}, "0.1.0")


def test_flavours_of_one_device_share_no_file(tmp_path: Path) -> None:
    files = {
        name: {str(file.relative_to(tmp_path / name)) for file in write(name, str(tmp_path / name))}
        for name in ("acme.torch", "acme.native", "acme_x.torch")
    }
    shared = set.intersection(*files.values())
    assert shared == {"pyproject.toml"}


def test_a_new_provider_of_a_served_device_stands_beside_the_one_that_is_there(
    tmp_path: Path,
) -> None:
    installed(tmp_path, "cpu.mine", "cpu.other")
    done = run_python(FOUND, PYTHONPATH=str(tmp_path))
    words = done.stdout.split()
    assert {"cpu.torch=hybrid-hal-cpu", "cpu.mine=hal-cpu-mine", "cpu.other=hal-cpu-other"} <= {
        *words
    }, done.stderr
    assert words[-1] == "0"


def test_folder_project_package_and_entry_point_have_the_whole_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write("quick_chip.native")
    root = tmp_path / "hal-quick-chip-native"
    text = (root / "pyproject.toml").read_text()
    assert 'name = "hal-quick-chip-native"' in text
    assert '"quick_chip.native" = "hal_quick_chip_native.plugin"' in text
    plugin = (root / "hal_quick_chip_native" / "plugin.py").read_text()
    assert 'load="hal_quick_chip_native.provider:QuickChipProvider"' in plugin


def test_the_name_of_an_installed_provider_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cpu\.torch is a provider of hybrid-hal-cpu") as caught:
        write("cpu.torch", str(tmp_path / "new"))
    assert "choose another flavour, nothing was written" in str(caught.value)
    assert not (tmp_path / "new").exists()


REFUSED = """
from hal.cli.new_provider import write
try:
    write({name!r}, {path!r})
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("distribution", "point", "source", "message"),
    [
        ("hal-acme-torch", "other.point", None, "hal-acme-torch 1.0 is installed"),
        ("dist-a", "acme.torch", "import no_such_module", "is a provider of dist-a"),
    ],
    ids=["project", "broken"],
)
def test_the_name_of_an_installed_project_or_a_broken_plugin_is_refused(
    tmp_path: Path, distribution: str, point: str, source: str | None, message: str
) -> None:
    Zoo(tmp_path).plugin(distribution, point, source)
    code = REFUSED.format(name="acme.torch", path=str(tmp_path / "new"))
    done = run_python(code, PYTHONPATH=str(tmp_path))
    assert message in done.stdout, done.stderr
    assert not (tmp_path / "new").exists()
