"""The engine plugins that are installed beside `hal`, for `hal doctor`; no engine is imported."""

from collections.abc import Iterator
from functools import partial
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import Any, Final

from hal.integrations.engines.versions import Pin
from hal_registry import Failure, attempt

GROUP: Final = "hal.engines"
"""Entry points of engine plugins; each gives the `Pin` of its engine."""


def engines() -> list[dict[str, Any]]:
    """Every engine plugin: its engine, versions, and what keeps it from serving."""
    return [_engine(entry) for entry in sorted(entry_points(group=GROUP), key=lambda e: e.name)]


def _engine(entry: EntryPoint) -> dict[str, Any]:
    pin = attempt(partial(entry.load))
    if isinstance(pin, Failure) or not isinstance(pin, Pin):
        text = pin.text if isinstance(pin, Failure) else f"got {type(pin).__name__}, expected Pin"
        return {"engine": entry.name, "plugin": entry.value, "wrong": text}
    found = next((v for v in map(_version, pin.brought_by) if v is not None), None)
    return {
        "engine": pin.engine,
        "plugin": f"{pin.distribution} {_version(pin.distribution)}",
        "tested": list(pin.tested),
        "installed": found,
        "wrong": _wrong(pin, found),
    }


def _wrong(pin: Pin, found: str | None) -> str:
    """What keeps the plugin from serving; an empty text where nothing does."""
    if found is None:
        return f"{pin.engine} is not installed"
    if not pin.knows(found):
        return f"{pin.engine} {found} is refused unless {pin.any_version}=1"
    return ""


def engine_lines(found: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each plugin, for people."""
    if found:
        yield "Engines"
    for each in found:
        tested = f", tested with {', '.join(each['tested'])}" if "tested" in each else ""
        state = each["wrong"] or f"serves {each['engine']} {each['installed']}"
        yield f"  {each['engine']}  ({each['plugin']}{tested}): {state}"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
