"""Device names: an open type, with an index or an arch where one is given."""

import re
from dataclasses import dataclass
from typing import Final

from hal_registry.vocabulary import NAME

_OF_TORCH: Final = {"rocm": "cuda"}
"""Types that torch has another name for: its builds for AMD keep the one of NVIDIA."""

_FORM: Final = re.compile(rf"({NAME.pattern})(?::(?:([0-9]{{1,9}})|({NAME.pattern})))?")


@dataclass(frozen=True, slots=True)
class Device:
    """A device type ("cuda", "npu", any vendor's), an index or None, and an arch or ""."""

    type: str
    index: int | None = None
    arch: str = ""

    @classmethod
    def parse(cls, text: object) -> "Device":
        """Read "cuda", "cuda:0", "cuda:sm_90" or a `torch.device`."""
        found = _FORM.fullmatch(str(text))
        if found is None:
            raise ValueError(
                f"device: got {str(text)[:80]!r}, expected a type with an index or an arch, "
                f'as "cpu", "cuda:0" or "cuda:sm_90"'
            )
        kind, index, arch = found.groups()
        return cls(kind, int(index) if index else None, arch or "")

    @property
    def torch_name(self) -> str:
        """What torch calls the device, without the arch: "cuda:0" for "rocm:0"."""
        kind = _OF_TORCH.get(self.type, self.type)
        return kind if self.index is None else f"{kind}:{self.index}"

    def __str__(self) -> str:
        """The name that it was read from."""
        tail = self.arch if self.index is None else str(self.index)
        return f"{self.type}:{tail}" if tail else self.type
