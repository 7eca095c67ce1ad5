"""Why something cannot be had: a closed set of codes and one record for each finding."""

from dataclasses import asdict, dataclass
from enum import StrEnum


class Code(StrEnum):
    """What kind of thing is missing; the set is closed and documented in docs/reason-codes.md."""

    INTERFACE_MISSING = "interface-missing"
    OPERATION_MISSING = "operation-missing"
    DTYPE_UNSUPPORTED = "dtype-unsupported"
    LAYOUT_UNSUPPORTED = "layout-unsupported"
    MODE_UNSUPPORTED = "mode-unsupported"
    SHAPE_UNSUPPORTED = "shape-unsupported"
    SHARD_UNSUPPORTED = "shard-unsupported"
    ARCH_UNSUPPORTED = "arch-unsupported"
    LIBRARY_MISSING = "library-missing"
    LIBRARY_VERSION = "library-version"
    DEVICE_ABSENT = "device-absent"
    FAMILY_UNKNOWN = "family-unknown"
    NOT_HYBRID = "not-hybrid"
    PLUGIN_BROKEN = "plugin-broken"
    PLUGIN_BLOCKED = "plugin-blocked"
    NAME_CONFLICT = "name-conflict"
    API_MISMATCH = "api-mismatch"
    PROTOCOL_VIOLATION = "protocol-violation"


@dataclass(frozen=True, slots=True)
class Reason:
    """One finding: what `subject` needs, what is offered instead, and what to do about it."""

    code: Code
    subject: str
    needed: str
    offered: str
    detail: str = ""
    fix: str = ""

    def __post_init__(self) -> None:
        """Refuse what is no code or no text where it is made, not where it is shown."""
        Code(self.code)
        for name in ("subject", "needed", "offered", "detail", "fix"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} of a Reason: expected text, got {getattr(self, name)!r}")

    def __str__(self) -> str:
        """The finding on one line, without the fix."""
        detail = f" ({self.detail})" if self.detail else ""
        return f"[{self.code}] {self.subject}: needed {self.needed}; offered {self.offered}{detail}"

    def to_dict(self) -> dict[str, str]:
        """The finding as plain strings."""
        return {key: str(value) for key, value in asdict(self).items()}
