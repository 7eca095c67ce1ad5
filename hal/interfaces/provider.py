"""What a vendor's distribution hands over once its manifest has won."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from hal.interfaces.conv import Conv
    from hal.interfaces.conv_state import ConvState
    from hal.interfaces.delta_rule import DeltaRule
    from hal.interfaces.scan import Scan


@dataclass(frozen=True, slots=True)
class Scratch:
    """A tensor that verify leaves for commit: name, shape and dtype name, content private."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Provider(Protocol):
    """Built as `Provider(device, options)`: a device string such as "cuda:0", and options by name.

    An interface that the manifest does not offer is None.
    """

    conv: Conv | None
    delta_rule: DeltaRule | None
    scan: Scan | None
    conv_state: ConvState | None

    def prepare(self, params: Mapping[str, Tensor | None]) -> Mapping[str, Tensor | None]:
        """Lay a layer's weights out once, at bind; the same names come back."""
        ...

    def scratch_spec(
        self, interface: str, shapes: Mapping[str, Sequence[int]], max_batch: int, width: int
    ) -> Sequence[Scratch]:
        """The tensors that `interface` needs for verify steps of `width` tokens a row.

        `shapes` holds a layer's state shapes by name, without the slot axis. Steps may have fewer
        rows than `max_batch` and a smaller `max_len` than `width`. Verify writes there and keeps
        nothing in the provider: other layers verify before this one's commit, which may come
        several times and leaves the scratch as it is.
        """
        ...

    def warmup(self) -> None:
        """Compile all that the bound layers can launch; a no-op where nothing compiles."""
        ...
