"""Libraries are judged by metadata, devices by the probe; a failing probe is a reason."""

import sys
from importlib.metadata import version
from typing import Any

import pytest

from hal_registry import Code, Presence, Reason, device_presence, library_reasons, load, probe
from support.registry import candidate

PROBES = "zoo_probes"
MISSING = Reason(Code.LIBRARY_MISSING, "libvendor.so", "the driver", "none", fix="install it")


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(sys)(PROBES)
    module.two = lambda index: Presence(2, arch="sm_90")
    module.none = lambda index: Presence(0, detail="the driver finds no device")
    module.rubbish = lambda index: 2
    module.words = lambda index: Presence("many")  # type: ignore[arg-type]
    module.null = lambda index: Presence(None)  # type: ignore[arg-type]
    module.true = lambda index: Presence(True)
    module.minus = lambda index: Presence(-1)
    module.arch = lambda index: Presence(1, arch=None)  # type: ignore[arg-type]
    module.exits = lambda index: sys.exit("no driver")
    module.reason = lambda index: MISSING
    module.told = lambda index: Presence(1, notes=("a: bound", "b: absent"))
    module.line = lambda index: Presence(1, notes="a: bound")  # type: ignore[arg-type]
    module.numbers = lambda index: Presence(1, notes=(1,))  # type: ignore[arg-type]
    module.checked = lambda index: Presence(1, check="no function")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, PROBES, module)


def presence(name: str, index: int | None = None) -> Presence | Reason:
    return device_presence(candidate("cuda.x", probe=f"{PROBES}:{name}"), index)


def missing(*needs: str, **hints: str) -> list[Reason]:
    return list(library_reasons(candidate("cuda.x", needs=needs, hints=hints)))


def test_a_library_that_is_not_installed_is_named_with_how_to_get_it() -> None:
    (reason,) = missing("no-such-lib>=2", **{"no-such-lib": "build it from source"})
    assert reason == Reason(
        Code.LIBRARY_MISSING,
        "no-such-lib",
        "no-such-lib>=2",
        "not installed",
        fix="build it from source",
    )


def test_without_a_hint_the_fix_is_pip() -> None:
    (reason,) = missing("no-such-lib>=2")
    assert reason.fix == "pip install 'no-such-lib>=2'"


def test_a_wrong_version_is_named_with_both_versions() -> None:
    """P094: the supported range and the version that is there."""
    (reason,) = missing("pluggy>=99,<100")
    assert reason.code is Code.LIBRARY_VERSION
    assert reason.needed == "pluggy<100,>=99"
    assert reason.offered == f"version {version('pluggy')}"


def test_a_known_bad_version_is_refused() -> None:
    """P095: a pair that is known not to work is excluded in the requirement."""
    (reason,) = missing(f"pluggy!={version('pluggy')}")
    assert reason.code is Code.LIBRARY_VERSION


def test_every_library_is_reported_not_only_the_first() -> None:
    assert len(missing("no-such-lib", "pluggy>=1", "no-such-other")) == 2


def test_a_need_of_another_platform_is_none() -> None:
    assert not missing("no-such-lib; python_version < '3'")


@pytest.mark.parametrize(("index", "there"), [(None, True), (0, True), (1, False), (9, False)])
def test_without_a_probe_there_is_one_device(index: int | None, there: bool) -> None:
    found = device_presence(candidate("cpu.x"), index)
    assert isinstance(found, Presence) == there
    if isinstance(found, Reason):
        assert (found.code, found.needed) == (Code.DEVICE_ABSENT, f"cpu:{index}")
        assert (found.offered, found.detail) == (
            "1 device",
            "a provider without a probe has one device",
        )


@pytest.mark.parametrize("found", [None, "no version at all", KeyError("Version"), SystemExit()])
def test_a_library_whose_version_cannot_be_read_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, found: Any
) -> None:
    def installed(name: str) -> Any:
        if isinstance(found, BaseException):
            raise found
        return found

    monkeypatch.setattr(probe, "version", installed)
    (reason,) = missing("pluggy>=1")
    assert reason.code in (Code.PLUGIN_BROKEN, Code.LIBRARY_VERSION)
    assert reason.subject.startswith("pluggy")


@pytest.mark.usefixtures("probes")
@pytest.mark.parametrize(("index", "there"), [(None, True), (0, True), (1, True), (2, False)])
def test_a_device_is_there_up_to_the_count(index: int | None, there: bool) -> None:
    assert isinstance(presence("two", index), Presence) == there


@pytest.mark.usefixtures("probes")
def test_an_absent_device_is_named_with_what_the_probe_saw() -> None:
    found = presence("none")
    assert isinstance(found, Reason)
    assert found.code is Code.DEVICE_ABSENT
    assert (found.needed, found.offered) == ("cuda:0", "0 devices")
    assert found.detail == "the driver finds no device"


@pytest.mark.usefixtures("probes")
@pytest.mark.parametrize(
    ("name", "text"),
    [("rubbish", "2"), ("exits", "SystemExit: no driver"), ("gone", "AttributeError")]
    + [(name, "expected a count") for name in ("words", "null", "true", "minus", "arch")]
    + [(name, "expected a tuple of lines") for name in ("line", "numbers")]
    + [("checked", "expected a function")],
)
def test_a_probe_that_fails_is_a_reason(name: str, text: str) -> None:
    found = presence(name)
    assert isinstance(found, Reason)
    assert found.code is Code.PLUGIN_BROKEN
    assert found.subject == "cuda.x"
    assert text in found.offered


@pytest.mark.usefixtures("probes")
def test_a_probe_may_give_a_reason_of_its_own() -> None:
    """What is missing may be a library that no metadata tells of."""
    assert presence("reason") is MISSING


@pytest.mark.usefixtures("probes")
def test_a_probe_may_tell_what_it_looked_for() -> None:
    found = presence("told")
    assert isinstance(found, Presence)
    assert found.notes == ("a: bound", "b: absent")


def test_a_dotted_path_is_imported() -> None:
    assert load("hal_registry:Code") is Code
