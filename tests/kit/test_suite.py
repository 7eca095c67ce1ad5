"""What the kit makes of a run: no test is changed, skipped or excused without a word."""

import json
import sys
from dataclasses import replace
from typing import Any

import pytest

from hal.testing import ProviderSuite
from hal_cpu.plugin import MANIFEST
from support.registry import run_python

pytest_plugins = ["pytester"]

HEAD = """
import pytest
from hal.testing import ProviderSuite
from hal_registry import Registry
from support.kit import small, TorchProvider
"""
SUITE = """
class TestSmall(ProviderSuite):
    provider = "cpu.small"
    registry = Registry.of(small({manifest}))
"""
PLAIN = "test_two_runs_give_the_same_bits[conv.decode: plain]"
ISSUE = "https://example.com/issues/7"


def run(
    pytester: pytest.Pytester, body: str = "", *options: str, manifest: str = ""
) -> pytest.RunResult:
    """Run the suite of a small CPU provider, in this process, with more lines in its class."""
    pytester.makeini("[pytest]\naddopts = -p no:cacheprovider -W error")
    source = HEAD + SUITE.format(manifest=manifest) + body
    pytester.makepyfile(test_small=source)
    return pytester.runpytest_inprocess("-q", *options)


def test_a_small_provider_passes_and_the_run_is_worth_something(pytester: Any) -> None:
    result = run(pytester)
    assert result.ret == pytest.ExitCode.OK
    outcomes = result.parseoutcomes()
    assert set(outcomes) == {"passed"}
    assert outcomes["passed"] > 90


@pytest.mark.parametrize("bases", [(ProviderSuite,), "mixin"])
def test_a_redefined_test_is_an_error_when_the_class_is_made(bases: Any) -> None:
    name = "test_only_addressed_slots_change"
    fields = {name: lambda self: None}
    with pytest.raises(TypeError, match=f"TestMine redefines {name}: the kit's tests are the same"):
        if bases == "mixin":
            type("TestMine", (type("Mixin", (), fields), ProviderSuite), {})
        else:
            type("TestMine", bases, fields)


@pytest.mark.parametrize("issue", ["flaky", "", "known to fail"])
def test_an_expected_failure_names_an_issue(issue: str) -> None:
    with pytest.raises(TypeError, match="expected the address or the number of an issue"):
        type("TestMine", (ProviderSuite,), {"expected_failures": {PLAIN: issue}})


@pytest.mark.parametrize("issue", [ISSUE, "#12", "acme/hal-acme#3"])
def test_a_reference_is_an_address_or_a_number(issue: str) -> None:
    type("TestMine", (ProviderSuite,), {"expected_failures": {PLAIN: issue}})


def test_an_expected_failure_that_passes_fails_the_run(pytester: Any) -> None:
    result = run(pytester, f"    expected_failures = {{{PLAIN!r}: {ISSUE!r}}}\n")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([f"*XPASS(strict)*{ISSUE}*"])


def test_an_expected_failure_that_fails_is_counted_as_such(pytester: Any) -> None:
    test = "test_every_declared_point_equals_the_oracle"
    failures = {f"{test}[conv.decode: {label}]": ISSUE for label in ("width=9", "corner, width=9")}
    body = f"    expected_failures = {failures!r}\n"
    result = run(pytester, body, "--hal-report", "out.json", manifest="widths=(3, 4, 9), lie=True")
    assert result.ret == pytest.ExitCode.OK, result.stdout.str()
    report = json.loads((pytester.path / "out.json").read_text())
    assert report["providers"][0]["operations"]["conv.decode"]["expected"] == 2


def test_an_expected_failure_of_a_test_that_is_not_there_is_an_error(pytester: Any) -> None:
    result = run(pytester, f"    expected_failures = {{'test_nothing': {ISSUE!r}}}\n")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "no test is called ['test_nothing']" in result.stderr.str() + result.stdout.str()


@pytest.mark.parametrize("mark", ["skip(reason='later')", "xfail(reason='later')"])
def test_marks_that_excuse_tests_fail_them(pytester: Any, mark: str) -> None:
    manifest = "widths=(3, 4, 9), lie=True"
    result = run(pytester, f"    pytestmark = pytest.mark.{mark}\n", "-k", "declared_point",
                 manifest=manifest)  # fmt: skip
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*the kit skips nothing but an absent device*"])


def test_an_absent_device_skips_and_the_run_certifies_nothing(pytester: Any) -> None:
    result = run(pytester, "", "-rs", manifest="probe='support.kit:absent'")
    outcomes = result.parseoutcomes()
    assert set(outcomes) == {"passed", "skipped"}
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines(["*SKIPPED*device-absent*cpu*no such board*"])
    result.stdout.fnmatch_lines(["hal: no operation of cpu.small was run*certifies nothing"])


def test_a_required_device_that_is_absent_fails_the_run(pytester: Any) -> None:
    result = run(pytester, "", "--hal-require-device", manifest="probe='support.kit:absent'")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "skipped" not in result.parseoutcomes()
    result.stdout.fnmatch_lines(["*the device is required: *device-absent*"])


def test_a_missing_library_skips_with_its_name(pytester: Any) -> None:
    result = run(pytester, "", "-rs", manifest="needs=('acme-runtime>=2',)")
    result.stdout.fnmatch_lines(["*SKIPPED*library-missing*acme-runtime*"])
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED


def test_an_empty_manifest_passes_its_declaration_and_certifies_nothing(pytester: Any) -> None:
    result = run(pytester, manifest="offers={}")
    assert set(result.parseoutcomes()) == {"passed"}
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED


def test_a_selection_of_tests_is_reported_as_incomplete(pytester: Any) -> None:
    result = run(pytester, "", "--hal-report", "out.json", "-k", "two_runs")
    assert result.ret == pytest.ExitCode.OK
    report = json.loads((pytester.path / "out.json").read_text())
    assert report["complete"] is False


def test_the_report_names_what_was_tested_where_and_how_it_went(pytester: Any) -> None:
    result = pytester.runpytest_inprocess(
        "-q", "-W", "error", "-p", "no:cacheprovider", "--pyargs", "hal.testing",
        "--hal-provider", "cpu.torch", "--hal-report", "out.json", "-k", "declared_point",
    )  # fmt: skip
    assert result.ret == pytest.ExitCode.OK
    (found,) = json.loads((pytester.path / "out.json").read_text())["providers"]
    assert found["digest"] == MANIFEST.digest()
    assert found["distribution"] == "hybrid-hal-cpu"
    assert {"python", "torch", "hybrid-hal"} <= set(found["versions"])
    assert found["device"]["type"] == "cpu"
    assert found["device"]["level"] == "hardware"
    tested = {op for op in MANIFEST.offers if op.endswith((".prefill", ".decode"))}
    assert set(found["operations"]) == tested
    for counts in found["operations"].values():
        assert counts["passed"] == sum(d["passed"] for d in counts["dtypes"].values())
        assert set(counts) == {"passed", "dtypes"}


def test_an_unknown_provider_fails_with_those_that_are_installed(pytester: Any) -> None:
    result = pytester.runpytest_inprocess(
        "-q", "-p", "no:cacheprovider", "--pyargs", "hal.testing", "--hal-provider", "no.where"
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*'no.where' is not installed, installed: cpu.torch*"])


def test_the_kit_is_light_until_it_is_used() -> None:
    done = run_python(
        "import sys, hal, hal.testing\n"
        "assert not {'torch', 'pytest', 'hypothesis'} & set(sys.modules), sys.modules"
    )
    assert done.returncode == 0, done.stderr


def test_no_field_of_the_manifest_is_without_a_trial() -> None:
    from hal.testing.plan import Plan

    offer = MANIFEST.offers["conv.decode"]
    narrow = replace(MANIFEST, offers={"conv.decode": offer}, proofs=())
    needs = [trial.need for trial in Plan.of(narrow).trials]
    assert {need.dtype for need in needs} == set(offer.dtypes)
    assert {min(offer.widths), max(offer.widths)} <= {need.width for need in needs}
    assert {need.activation for need in needs} == set(offer.activations)
    layouts = {trial.settings["layout"] for trial in Plan.of(narrow).trials}
    assert layouts == set(offer.layouts)
    assert sys.modules["hal.testing.plan"].Plan is Plan
