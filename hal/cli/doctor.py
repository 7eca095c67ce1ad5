"""`hal doctor`: what is installed and what is wrong with it.

Nothing of a vendor is imported but by the probe of a provider whose libraries are all there.
"""

import json
import platform
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import partial
from importlib.metadata import Distribution, PackageNotFoundError, distributions, version
from typing import Any, Final

import typer

from hal.cli.engines import engine_lines, engines
from hal.cli.errors import REFUSED, reporting
from hal.cli.options import AsJson, Debug
from hal.cli.output import aligned
from hal.cli.question import installed
from hal.torch_import import torn_torch
from hal_registry import (
    API,
    Candidate,
    Code,
    Failure,
    Fault,
    Reason,
    Registry,
    attempt,
    device_presence,
    library_reasons,
)

LIBRARIES: Final = ("torch", "triton", "torch-npu", "transformers", "safetensors")


def doctor(as_json: AsJson = False, debug: Debug = False) -> None:
    """Show plugins, versions, faults with their traceback, and import-name clashes.

    Exit status 1 says that a plugin is broken or that two distributions claim one import name.
    """
    with reporting("doctor", debug):
        registry = installed()
        facts = _facts(registry)
        typer.echo(json.dumps(facts, indent=1) if as_json else "\n".join(_lines(facts)))
    blocked = (Code.PLUGIN_BLOCKED,)
    if facts["clashes"] or any(fault.code not in blocked for fault in registry.faults):
        raise typer.Exit(REFUSED)


def _facts(registry: Registry) -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "hal": {"version": _version("hybrid-hal"), "api": "{}.{}".format(*API)},
        "libraries": {name: _version(name) for name in LIBRARIES},
        "providers": [_provider(candidate) for candidate in registry.candidates],
        "engines": engines(),
        "faults": [_fault(fault) for fault in registry.faults],
        "clashes": clashes(),
    }


def _provider(candidate: Candidate) -> dict[str, Any]:
    missing = [str(reason) for reason in library_reasons(candidate)]
    return {
        "name": candidate.name,
        "distribution": candidate.distribution,
        "version": candidate.version,
        "api": "{}.{}".format(*candidate.manifest.api),
        "offers": list(candidate.manifest.offers),
        "missing": missing,
        "probe": [] if missing or not candidate.manifest.probe else _probed(candidate),
    }


def _probed(candidate: Candidate) -> list[str]:
    """What the provider's probe says of its device and of what it looked for."""
    if torn := torn_torch():
        return [str(torn)]
    with redirect_stdout(sys.stderr):  # vendor libraries may print, and stdout may be JSON
        found = device_presence(candidate, None)
    if isinstance(found, Reason):
        return [str(found)]
    arch = f" of arch {found.arch}" if found.arch else ""
    devices = f"{found.count} device{'s' if found.count > 1 else ''}{arch}"
    return [f"{devices}, {found.detail}" if found.detail else devices, *found.notes]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _fault(fault: Fault) -> dict[str, str]:
    return {**fault.reason().to_dict(), "traceback": fault.traceback, "origin": _origin(fault)}


def _origin(fault: Fault) -> str:
    return f"{fault.distribution} {fault.version}"


def clashes() -> dict[str, list[str]]:
    """Top-level modules that two distributions bring, as triton and triton-ascend do.

    Which of them is imported depends on the order of installation. Namespace packages are shared on
    purpose and do not count.
    """
    owners: dict[str, set[str]] = defaultdict(set)
    for found in distributions():
        modules = attempt(partial(_modules, found))
        for name in [] if isinstance(modules, Failure) else modules:
            owners[name].add(found.name or "a distribution without a name")
    return {name: sorted(two) for name, two in sorted(owners.items()) if len(two) > 1}


def _modules(found: Distribution) -> set[str]:
    """The top-level modules of a distribution, by the list of its files."""
    files = [file for file in found.files or () if file.suffix == ".py"]
    packages = {f.parts[0] for f in files if len(f.parts) == 2 and f.name == "__init__.py"}
    return packages | {file.stem for file in files if len(file.parts) == 1}


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    hal = facts["hal"]
    yield f"hybrid-hal {hal['version']}, API {hal['api']}, Python {facts['python']}"
    libraries = [(name, found or "not installed") for name, found in facts["libraries"].items()]
    yield from aligned(libraries, indent=2)
    yield "Providers"
    for provider in facts["providers"]:
        yield f"  {provider['name']}  ({provider['distribution']} {provider['version']}), API " + (
            f"{provider['api']}, {len(provider['offers'])} operations"
        )
        yield from (f"    {text}" for text in (*provider["missing"], *provider["probe"]))
    yield from engine_lines(facts["engines"])
    yield from _wrong(facts)


def _wrong(facts: dict[str, Any]) -> Iterator[str]:
    """Faults and clashes, or the line that says there are none."""
    for fault in facts["faults"]:
        yield f"Fault: [{fault['code']}] {fault['subject']} ({fault['origin']}): {fault['offered']}"
        yield f"  Fix: {fault['fix']}."
        yield from (f"  | {line}" for line in fault["traceback"].splitlines())
    for name, owners in facts["clashes"].items():
        yield f"Clash: import name {name} comes from {' and '.join(owners)}; uninstall one of them"
    if not facts["faults"] and not facts["clashes"]:
        yield "No faults and no import-name clashes."
