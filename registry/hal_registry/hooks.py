"""The hooks of a plugin, by pluggy: mark a function `@hookimpl` to implement one.

A provider plugin is a tiny module, named by an entry point of group `hal.providers`, that imports
neither torch nor its vendor's libraries.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import pluggy

from hal_registry.manifest import Manifest
from hal_registry.reasons import Reason

PROJECT: Final = "hal"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def hal_providers() -> Sequence[Manifest]:
    """The manifests of the providers in this distribution."""
    return ()


@hookspec(firstresult=True)
def hal_requirements(model: Mapping[str, object]) -> object | None:
    """The `hal.model.ModelSpec` of a text config whose family `hal` does not know, else None."""


@hookspec
def hal_veto(selection: object) -> Sequence[Reason]:
    """Reasons against a complete `hal.Selection`; none lets it pass."""
    return ()
