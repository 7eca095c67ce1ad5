"""The kit's pytest plugin: its options, the parameters of its tests, what counts, the report."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from hal.testing.examined import Examined
    from hal.testing.subject import Subject
    from hal_registry import Candidate

ABSENT = pytest.StashKey[str]()
FACTS = pytest.StashKey[dict[str, Any]]()
NEVER_SKIPPED = (
    "the kit skips nothing but an absent device, and expects failures only by expected_failures"
)
KEY = "hal"
"""Name of the user property by which a test's provider and operation reach the report."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The kit's options."""
    group = parser.getgroup("hal", "conformance of hal providers")
    group.addoption("--hal-provider", default="", metavar="NAME", help="provider to certify")
    group.addoption("--hal-stand-in", default="", metavar="DEVICE",
                    help="torch device in place of the provider's")  # fmt: skip
    group.addoption("--hal-report", default="", metavar="FILE", help="write the result as JSON")
    group.addoption("--hal-require-device", action="store_true",
                    help="fail where the provider's device is absent")  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Keep the run's tally where the options are."""
    from hal.testing.report import Tally

    config.pluginmanager.register(_Recorder(Tally(), config), "hal-recorder")


def _suite(owner: Any) -> Any:
    """The suite that a test's class is, or None; nothing is imported for other tests."""
    if not isinstance(owner, type) or owner.__module__ == "hal.testing.suite":
        return None
    names = {f"{base.__module__}.{base.__name__}" for base in owner.__mro__}
    return owner if "hal.testing.suite.ProviderSuite" in names else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the kit's tests their values from the manifest; one without any is dropped later."""
    if (suite := _suite(metafunc.cls)) is None:
        return
    from hal.testing.examined import PARAMETERS, examine, label

    if suite.__module__ == "hal.testing.test_provider":
        suite.provider = metafunc.config.getoption("--hal-provider")
        suite.stand_in = metafunc.config.getoption("--hal-stand-in")
    for name, values in PARAMETERS.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, values(examine(suite)) or [None], ids=label)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Drop tests without a value, mark expected failures, and note provider and operation."""
    mine = [(item, suite) for item in items if (suite := _suite(getattr(item, "cls", None)))]
    empty = {item for item, _ in mine if None in _values(item).values()}
    facts = {suite: _facts(suite) for suite in {suite for _, suite in mine}}
    for suite in facts:
        _check(suite, items[0].config, {item.name for item, owner in mine if owner is suite})
    for item, suite in mine:
        if item in empty:
            continue
        item.user_properties.append((KEY, _key(suite, _values(item))))
        item.stash[FACTS] = {**facts[suite], "test": item.name if _kits(item) else ""}
        if item.name in suite.expected_failures:
            issue = suite.expected_failures[item.name]
            item.add_marker(pytest.mark.xfail(reason=issue, strict=True))
    items[:] = [item for item in items if item not in empty]


def _check(suite: Any, config: pytest.Config, names: set[str]) -> None:
    """What a suite says of itself can be held: its tests are the kit's, its device is real."""
    from hal.testing.guard import SAME, changes
    from hal.testing.suite import TESTS

    if changed := changes(suite, TESTS):
        raise pytest.UsageError(f"{suite.__name__} redefines {', '.join(changed)}: {SAME}")
    if unknown := set(suite.expected_failures) - names:
        raise pytest.UsageError(f"{suite.__name__}: no test is called {sorted(unknown)}")
    if suite.stand_in and config.getoption("--hal-require-device"):
        raise pytest.UsageError(
            f"{suite.__name__}: --hal-require-device was given, and {suite.stand_in} stands in for "
            f"the device of {suite.provider}; leave one of the two out"
        )


def _facts(suite: Any) -> dict[str, Any]:
    """What every result of a suite carries into the report, also from a worker's process."""
    from hal.testing.examined import examine
    from hal.testing.guard import total
    from hal.testing.report import origin
    from hal.testing.suite import TESTS

    examined = examine(suite)
    return {
        "suite": f"{suite.__module__}.{suite.__qualname__}",
        "planned": total(examined, TESTS),
        "origin": origin(examined, suite.provider, suite.stand_in),
    }


def _kits(item: pytest.Item) -> bool:
    """Whether a suite's test is one of the kit, and not one that a vendor adds."""
    from hal.testing.suite import TESTS

    return getattr(item, "originalname", "") in TESTS


def _values(item: pytest.Item) -> dict[str, Any]:
    """The values of a test's parameters."""
    return getattr(getattr(item, "callspec", None), "params", {})


def _key(suite: Any, values: dict[str, Any]) -> tuple[str, str, str, str]:
    """What a result is counted under."""
    from hal.testing.examined import operation_of
    from hal.testing.plan import Trial

    first = [value[0] if isinstance(value, tuple) else value for value in values.values()]
    dtypes = [value.settings["dtype"] for value in first if isinstance(value, Trial)]
    return suite.provider, suite.stand_in, operation_of(values), next(iter(dtypes), "")


@pytest.fixture
def hal_examined(request: pytest.FixtureRequest) -> Examined:
    """The suite's provider as it was looked up."""
    from hal.testing.examined import examine

    return examine(request.cls)


@pytest.fixture
def hal_candidate(hal_examined: Examined) -> Candidate:
    """The manifest and the distribution that it came from."""
    if hal_examined.candidate is None:
        pytest.fail(hal_examined.problem, pytrace=False)
    return hal_examined.candidate


@pytest.fixture
def hal_subject(request: pytest.FixtureRequest, hal_examined: Examined) -> Subject:
    """The provider on its device; an absent device skips, or fails if it was required."""
    from hal.testing.subject import Subject

    subject = hal_examined.subject
    if isinstance(subject, Subject):
        return subject
    if request.config.getoption("--hal-require-device") or hal_examined.candidate is None:
        pytest.fail(f"the device is required: {subject.reason}", pytrace=False)
    request.node.stash[ABSENT] = subject.reason
    pytest.skip(subject.reason)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Fail a test of the kit that is not called as the kit wrote it."""
    suite = _suite(pyfuncitem.cls)
    if suite is None or not _kits(pyfuncitem):
        return
    from hal.testing.guard import SAME, foreign
    from hal.testing.suite import TESTS

    test = pyfuncitem.originalname
    if name := foreign(suite, test, TESTS, pyfuncitem.obj, pyfuncitem.funcargs):
        pytest.fail(f"{name} was replaced: {SAME}", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test of the kit that is skipped or expected to fail in any other way has failed."""
    report = yield
    suite = _suite(getattr(item, "cls", None))
    if FACTS in item.stash:
        vars(report)["hal"] = item.stash[FACTS]
    if suite is None or ABSENT in item.stash or item.name in suite.expected_failures:
        return report
    vars(report).pop("wasxfail", None)
    if report.skipped:
        report.outcome, report.longrepr = "failed", NEVER_SKIPPED
    return report


class _Recorder:
    """Counts results, also those that come from workers, and says what the run is worth."""

    def __init__(self, tally: Any, config: pytest.Config) -> None:
        self.tally = tally
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a result once: its call, or the phase that kept it from being called."""
        key: Any = dict(report.user_properties).get(KEY)
        if key is not None and (report.when == "call" or not report.passed):
            outcome = report.outcome if getattr(report, "wasxfail", None) is None else "expected"
            self.tally.add(tuple(key), outcome)
            self.tally.note(tuple(key), vars(report)["hal"])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the report; a run that executed no operation does not pass."""
        if getattr(self.config, "workerinput", None) or not self.tally.counts:
            return
        path = self.config.getoption("--hal-report")
        if path:
            Path(path).write_text(self.tally.to_json(), encoding="utf-8")
        if self.tally.idle() and session.exitstatus in (0, 5):
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say for which provider no operation was run."""
        for name in self.tally.idle():
            terminalreporter.write_line(
                f"hal: no operation of {name} was run: its manifest offers none, or all were "
                f"skipped; this run certifies nothing", red=True,
            )  # fmt: skip
