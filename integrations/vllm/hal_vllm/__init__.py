"""A stock vLLM whose linear layers are served by the providers that `hal` selects.

vLLM finds `hal_vllm.plugin` by its entry point; nothing here is called by hand. `report()` says
what this process served. Importing the package imports neither torch nor vLLM.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hal.integrations.engines.session import report

__all__ = ["report"]


def __getattr__(name: str) -> Any:
    """Load `report` on first use."""
    if name != "report":
        raise AttributeError(f"module 'hal_vllm' has no attribute {name!r}")
    return importlib.import_module("hal.integrations.engines.session").report
