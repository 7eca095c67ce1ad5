"""Synthetic manifests, and plugins as fake distributions on disk."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hal_registry import API, Candidate, Manifest, Offer, Requirement
from hal_registry.vocabulary import (
    ACTIVATIONS,
    DTYPES,
    FEATURES,
    GATES,
    KINDS,
    LAYOUTS,
    OPERATIONS,
    VERIFY,
    interface_of,
    states_of,
)

EVERYTHING = Offer(
    dtypes=DTYPES,
    state_dtypes=DTYPES,
    layouts=tuple(name for names in LAYOUTS.values() for name in names),
    gates=GATES,
    kinds=KINDS,
    activations=ACTIVATIONS,
    head_dims=range(1, 1025),
    ratios=range(1, 1025),
    widths=range(2, 9),
    state_sizes=range(1, 1025),
    verify=VERIFY,
    verify_widths=range(1, 17),
    track=(1,),
    features=FEATURES,
)
"""An offer that refuses nothing but an arch."""


def offers(*names: str, offer: Offer = EVERYTHING) -> dict[str, Offer]:
    """The offer for each operation, or for every operation of an interface."""
    return {
        op: offer for op in OPERATIONS for name in names if name in (op, interface_of(op), "all")
    }


def manifest(name: str, *names: str, offer: Offer = EVERYTHING, **fields: object) -> Manifest:
    """A manifest of one offer for operations or interfaces ("all" for everything)."""
    given: dict[str, object] = {
        "device": name.partition(".")[0],
        "api": API,
        "load": "tests_have_no:Provider",
        "offers": offers(*names, offer=offer),
        **fields,
    }
    return Manifest(name=name, **given)  # type: ignore[arg-type]


def candidate(name: str, *names: str, offer: Offer = EVERYTHING, **fields: object) -> Candidate:
    """A candidate of a synthetic distribution."""
    return Candidate(manifest(name, *names, offer=offer, **fields), "given", "0")


def touches(need: Requirement) -> tuple[str, ...]:
    """The states that a requirement's operation touches."""
    return states_of(need.operation)


PLUGIN = """
from hal_registry import API, Manifest, Offer, hookimpl

@hookimpl
def hal_providers():
    return [Manifest(name={name!r}, device={device!r}, api={api}, load={load!r}, offers={offers})]
"""


def plugin_source(
    name: str, api: str = "API", load: str = "nowhere:Provider", offers: str = "{}"
) -> str:
    """The source of a plugin module with one manifest."""
    device = name.partition(".")[0]
    return PLUGIN.format(name=name, device=device, api=api, load=load, offers=offers)


@dataclass(frozen=True)
class Zoo:
    """A folder of fake distributions, as site-packages holds them."""

    root: Path

    def add(
        self,
        distribution: str,
        points: Mapping[str, str],
        modules: Mapping[str, str],
        version: str = "1.0",
    ) -> None:
        """Write a distribution: entry points by name, module sources by module name."""
        info = self.root / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
        lines = "\n".join(f"{name} = {value}" for name, value in points.items())
        (info / "entry_points.txt").write_text(f"[hal.providers]\n{lines}\n")
        for name, source in modules.items():
            (self.root / f"{name}.py").write_text(source)

    def plugin(self, distribution: str, name: str, source: str | None = None) -> None:
        """Write a distribution with one plugin, a good one unless a source is given."""
        module = "zoo_" + distribution.replace("-", "_")
        self.add(distribution, {name: module}, {module: source or plugin_source(name)})

    def python(self, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run code in a fresh interpreter that sees the zoo beside what is installed."""
        path = os.pathsep.join(filter(None, (str(self.root), os.environ.get("PYTHONPATH"))))
        return run_python(code, PYTHONPATH=path, **environment)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter, outside the repository."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd="/",
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )
