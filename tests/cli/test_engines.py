"""`hal doctor` shows the engine plugins, their engines, and what keeps one from serving."""

from importlib.metadata import EntryPoint, PackageNotFoundError
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal.cli import engines as shown
from hal.cli.engines import GROUP, engine_lines, engines
from hal.integrations.engines.versions import Pin

PIN = Pin("Engine", "hybrid-hal-engine", ("1.2.0",), "HAL_ENGINE_ANY", ("engine-cpu", "engine"))
BROKEN = "not a pin"


def install(monkeypatch: pytest.MonkeyPatch, value: str, **versions: str) -> None:
    """One plugin at an entry point, beside distributions of these versions."""

    def version(name: str) -> str:
        if name.replace("-", "_") not in versions:
            raise PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    entry = EntryPoint("engine", value, GROUP)
    monkeypatch.setattr(shown, "entry_points", lambda group: [entry] if group == GROUP else [])
    monkeypatch.setattr(shown, "version", version)


def only() -> dict[str, Any]:
    (found,) = engines()
    return found


def own(name: str) -> str:
    return f"{__name__}:{name}"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import SimpleNamespace

    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(PIN=PIN, BROKEN=BROKEN))  # type: ignore[arg-type] # what an entry point loads


@given(st.sampled_from(["", "+cpu", "+cu130"]))
def test_a_tested_engine_is_served_whichever_distribution_brings_it(local: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("engine_cpu", "engine"):
            install(patch, own("PIN"), hybrid_hal_engine="0.1.0", **{name: f"1.2.0{local}"})
            assert not only()["wrong"]
            head, line = engine_lines(engines())
            assert head == "Engines"
            assert line.startswith("  Engine  (hybrid-hal-engine 0.1.0, tested with 1.2.0): ")
            assert line.endswith(f": serves Engine 1.2.0{local}")


def test_an_untested_engine_says_how_to_try_it(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, own("PIN"), hybrid_hal_engine="0.1.0", engine="1.3.0")
    assert only()["wrong"] == "Engine 1.3.0 is refused unless HAL_ENGINE_ANY=1"


def test_a_plugin_without_its_engine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, own("PIN"), hybrid_hal_engine="0.1.0")
    assert only()["installed"] is None
    assert only()["wrong"] == "Engine is not installed"


@pytest.mark.parametrize(
    ("value", "text"), [(own("BROKEN"), "expected Pin"), ("no_such_module:PIN", "no_such_module")]
)
def test_a_broken_plugin_is_a_line_and_no_crash(
    monkeypatch: pytest.MonkeyPatch, value: str, text: str
) -> None:
    install(monkeypatch, value)
    assert text in only()["wrong"]
    assert value in list(engine_lines(engines()))[1]


def test_without_plugins_there_is_no_heading() -> None:
    assert list(engine_lines([])) == []
