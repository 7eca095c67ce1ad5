"""The conformance kit: what a vendor runs to show that a provider keeps its word.

A vendor subclasses `ProviderSuite` and names a provider, or runs
`pytest --pyargs hal.testing --hal-provider NAME`. Needs pytest and torch, which load on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hal.testing.suite import ProviderSuite

__all__ = ["ProviderSuite"]


def __getattr__(name: str) -> Any:
    """Load the suite on first use, so that importing `hal.testing` is light."""
    if name == "ProviderSuite":
        from hal.testing.suite import ProviderSuite

        return ProviderSuite
    raise AttributeError(f"module 'hal.testing' has no attribute {name!r}")
