"""A report is whole only if every planned test has a result in it, and knows what was tested."""

import json
from pathlib import Path
from typing import Any

import pytest

from hal.testing import ProviderSuite
from hal.testing.guard import total
from hal_registry import Candidate
from kit.test_suite import HEAD, PLAIN, SUITE, run
from kit.test_vendor import pytest_in
from support.kit import small
from support.registry import Zoo, plugin_source

pytest_plugins = ["pytester"]

LIE = "widths=(3, 4, 9), lie=True"
NODE = f"test_small.py::TestSmall::{PLAIN}"
FILTER = """
def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if "declared_point" not in item.name]
"""
FIRST_FILTER = """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if "two_runs" in item.name]
"""


def report(pytester: Any) -> dict[str, Any]:
    found = json.loads((pytester.path / "out.json").read_text())
    assert isinstance(found, dict)
    return found


def reported(pytester: Any, *options: str, body: str = "", manifest: str = "") -> dict[str, Any]:
    """The report of a run of the small provider."""
    run(pytester, body, "--hal-report", "out.json", *options, manifest=manifest)
    return report(pytester)


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["alone", "workers"])
def test_a_run_of_everything_is_complete(pytester: Any, options: tuple[str, ...]) -> None:
    found = reported(pytester, *options)
    assert found["complete"] is True
    (mine,) = found["providers"]
    counted = {name: n["passed"] for name, n in mine["operations"].items() if "commit" not in name}
    assert mine["declaration"]["passed"] + sum(counted.values()) > 90


def test_a_failure_does_not_make_a_run_a_part(pytester: Any) -> None:
    assert reported(pytester, manifest=LIE)["complete"] is True


@pytest.mark.parametrize(
    "options",
    [
        ("-k", "two_runs"),
        ("--deselect", NODE),
        ("-n", "2", "-k", "two_runs"),
    ],
    ids=" ".join,
)
def test_a_selection_is_a_part(pytester: Any, options: tuple[str, ...]) -> None:
    assert reported(pytester, *options)["complete"] is False


@pytest.mark.parametrize("options", [("-x",), ("-n", "2", "-x")], ids=" ".join)
def test_a_run_that_stops_early_is_a_part(pytester: Any, options: tuple[str, ...]) -> None:
    assert reported(pytester, *options, manifest=LIE)["complete"] is False


def test_one_test_by_its_name_is_a_part(pytester: Any) -> None:
    pytester.makeini("[pytest]\naddopts = -p no:cacheprovider -W error")
    pytester.makepyfile(test_small=HEAD + SUITE.format(manifest=""))
    result = pytester.runpytest_inprocess("-q", "--hal-report", "out.json", NODE)
    assert result.ret == pytest.ExitCode.OK
    assert report(pytester)["complete"] is False


@pytest.mark.parametrize("conftest", [FILTER, FIRST_FILTER], ids=["late", "early"])
def test_tests_that_a_conftest_drops_are_missed(pytester: Any, conftest: str) -> None:
    pytester.makeconftest(conftest)
    assert reported(pytester)["complete"] is False


def test_a_test_that_the_vendor_adds_stands_for_none_of_the_kit(pytester: Any) -> None:
    body = "    def test_of_mine(self, x=0): pass\n"
    assert reported(pytester, body=body)["complete"] is True
    assert reported(pytester, "--deselect", NODE, body=body)["complete"] is False


def test_the_plan_counts_the_tests_of_a_run(pytester: Any) -> None:
    from hal.testing.suite import TESTS
    from support.kit import examine, suite_of

    planned = total(examine(suite_of(small())), TESTS)
    assert run(pytester).parseoutcomes()["passed"] == planned


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "worker"])
def test_a_provider_of_a_given_registry_is_identified(
    pytester: Any, options: tuple[str, ...]
) -> None:
    (mine,) = reported(pytester, "-k", "two_runs", *options)["providers"]
    assert mine["digest"] == small().digest()
    assert (mine["distribution"], mine["version"]) == ("given", "0")
    assert {"python", "torch", "hybrid-hal"} <= set(mine["versions"])
    assert mine["device"]["level"] == "hardware"


def test_a_stand_in_is_no_hardware_in_the_report(pytester: Any) -> None:
    (mine,) = reported(pytester, "-k", "two_runs", body='    stand_in = "cpu"\n')["providers"]
    assert mine["device"]["stand_in"] == "cpu"
    assert mine["device"]["level"] == "interpreter"


def test_a_required_device_cannot_be_stood_in_for(pytester: Any) -> None:
    result = run(pytester, '    stand_in = "cpu"\n', "--hal-require-device")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    text = result.stderr.str() + result.stdout.str()
    assert "--hal-require-device was given, and cpu stands in for the device of cpu.small" in text


@pytest.mark.parametrize("name", ["hal_subject", "hal_examined", "hal_candidate", "hal_new"])
def test_a_fixture_of_the_kit_cannot_be_redefined_in_the_class(name: str) -> None:
    for bases in ((type("Mixin", (), {name: None}), ProviderSuite), (ProviderSuite,)):
        with pytest.raises(TypeError, match=f"TestMine redefines {name}: the kit's tests"):
            type("TestMine", bases, {name: None})


def test_the_look_up_of_tests_cannot_be_redefined() -> None:
    with pytest.raises(TypeError, match="TestMine redefines __getattribute__: the kit's tests"):
        type("TestMine", (ProviderSuite,), {"__getattribute__": lambda self, name: None})


LATER = {
    "test": "TestSmall.test_only_addressed_slots_change = lambda self, trial, hal_subject: None",
    "kit": "ProviderSuite.test_only_addressed_slots_change = lambda self, trial: None",
    "none": "TestSmall.test_only_addressed_slots_change = None",
    "fixture": "TestSmall.hal_subject = pytest.fixture(lambda self: None)",
    "look-up": "TestSmall.__getattribute__ = lambda self, name: object",
}


@pytest.mark.parametrize("kind", LATER)
def test_what_is_replaced_after_the_class_was_made_is_refused(
    pytester: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = ProviderSuite.test_only_addressed_slots_change
    monkeypatch.setattr(ProviderSuite, "test_only_addressed_slots_change", kept)
    result = run(pytester, LATER[kind] + "\n")
    assert result.ret in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERRUPTED)
    assert "passed" not in result.parseoutcomes()
    assert "TestSmall redefines " in result.stderr.str() + result.stdout.str()


def test_a_fixture_that_a_conftest_replaces_fails_the_tests_that_take_it(pytester: Any) -> None:
    pytester.makeconftest(
        "import pytest\n\n@pytest.fixture(scope='session')\ndef hal_subject(): return object()\n"
    )
    result = run(pytester, "", "-k", "two_runs")
    assert set(result.parseoutcomes()) == {"failed", "deselected"}
    result.stdout.fnmatch_lines(["*hal_subject was replaced: the kit's tests are the same*"])


def test_a_test_that_is_replaced_while_it_runs_fails(pytester: Any) -> None:
    pytester.makeconftest(
        "import pytest\n\n@pytest.fixture(autouse=True)\n"
        "def swap(request): request.node.obj = lambda **given: None\n"
    )
    result = run(pytester, "", "-k", "two_runs")
    assert set(result.parseoutcomes()) == {"failed", "deselected"}
    result.stdout.fnmatch_lines(["*test_two_runs_give_the_same_bits was replaced*"])


def test_the_module_of_a_plugin_is_known_for_each_of_its_manifests(tmp_path: Path) -> None:
    both = plugin_source("heavy.one").replace("return [", "return [second(), ")
    second = both.replace("from hal_registry", "import torch\nfrom hal_registry", 1) + (
        "\ndef second():\n    return Manifest('heavy.two', 'heavy', API, 'nowhere:Provider', {})\n"
    )
    Zoo(tmp_path).plugin("hal-heavy", "heavy.one", second)
    for name in ("heavy.one", "heavy.two"):
        done = pytest_in(
            tmp_path, "--pyargs", "hal.testing", "--hal-provider", name, "-k", "imports_no_torch",
            path=tmp_path,
        )  # fmt: skip
        assert done.returncode == 1, done.stdout
        assert "importing zoo_hal_heavy imports" in done.stdout


def test_a_given_manifest_has_no_module() -> None:
    assert Candidate(small(), "given", "0").module == ""
