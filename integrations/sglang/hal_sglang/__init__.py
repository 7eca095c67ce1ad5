"""A stock SGLang whose linear layers are served by the providers that `hal` selects.

SGLang finds `hal_sglang.plugin` by its entry point; nothing here is called by hand. `report()` says
what this process served. Importing the package imports neither torch nor SGLang.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hal.integrations.engines.session import report
    from hal_sglang.factories import factories

__all__ = ["factories", "report"]

_HOMES = {"factories": "hal_sglang.factories", "report": "hal.integrations.engines.session"}


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'hal_sglang' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
