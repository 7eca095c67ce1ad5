"""The hardware layer under engines that serve hybrid linear-attention models.

`select` binds a model to a device's providers or refuses with every reason; `explain` answers the
same question without torch and without the device. Names load on first use: importing `hal`
imports no torch and discovers nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hal import model
    from hal.device import Device
    from hal.errors import (
        CompositionError,
        ConfigError,
        HalError,
        PoolExhausted,
        ProviderError,
        StepOrderError,
        WeightsError,
    )
    from hal.options import Shard, Speculative
    from hal.refusal import Refusal, Unsupported
    from hal.runtime.batch import Batch, Mode
    from hal.selection import Explanation, Selection, explain, select

_HOMES = {
    "Batch": "hal.runtime.batch",
    "CompositionError": "hal.errors",
    "ConfigError": "hal.errors",
    "Device": "hal.device",
    "Explanation": "hal.selection",
    "HalError": "hal.errors",
    "Mode": "hal.runtime.batch",
    "PoolExhausted": "hal.errors",
    "ProviderError": "hal.errors",
    "Refusal": "hal.refusal",
    "Selection": "hal.selection",
    "Shard": "hal.options",
    "Speculative": "hal.options",
    "StepOrderError": "hal.errors",
    "Unsupported": "hal.refusal",
    "WeightsError": "hal.errors",
    "explain": "hal.selection",
    "select": "hal.selection",
}

__all__ = [
    "Batch",
    "CompositionError",
    "ConfigError",
    "Device",
    "Explanation",
    "HalError",
    "Mode",
    "PoolExhausted",
    "ProviderError",
    "Refusal",
    "Selection",
    "Shard",
    "Speculative",
    "StepOrderError",
    "Unsupported",
    "WeightsError",
    "explain",
    "model",
    "select",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its home on first use."""
    if name == "model":
        return importlib.import_module("hal.model")
    if name not in _HOMES:
        raise AttributeError(f"module 'hal' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return __all__
