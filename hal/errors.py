"""Errors that `hal` raises; each text says what was needed, what was offered and the fix.

`hal.Unsupported` is in `hal.refusal`, beside the report it carries.
"""


class HalError(Exception):
    """Base of the errors that `hal` defines."""


class ConfigError(HalError, ValueError):
    """A model config that cannot be read; `field` names the entry at fault, or is None."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class PoolExhausted(HalError, RuntimeError):
    """More slots were asked for than are free; nothing was handed out."""


class StepOrderError(HalError, RuntimeError):
    """A call that the step protocol does not allow now, as a layer call before `begin`."""


class CompositionError(HalError, TypeError):
    """Parts that cannot be put together, as speculation over an attention without commit."""


class ProviderError(HalError, RuntimeError):
    """A provider's operation failed; the cause is chained, the text names operation and shapes."""


class WeightsError(HalError, ValueError):
    """A checkpoint that cannot be served: missing, corrupt or of another model."""
