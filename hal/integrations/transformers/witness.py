"""Where a seam stands, and who sees that each ran as often as it has to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hal.errors import HalError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from hal.runtime.binder import Layer


@dataclass(slots=True)
class Witness:
    """Sees every linear layer run through `hal`: each seam as often as a step needs it."""

    expected: Counter[tuple[int, str]] = field(default_factory=Counter)
    seen: Counter[tuple[int, str]] = field(default_factory=Counter)

    def begin(self) -> None:
        """Forget the last step."""
        self.seen.clear()

    def note(self, layer_id: int, seam: str) -> int:
        """Book one call, and say how many of this seam came before it in the step."""
        self.seen[layer_id, seam] += 1
        return self.seen[layer_id, seam] - 1

    def check(self) -> None:
        """Raise unless every seam was called as often as expected; the text names the others."""
        known = set(self.expected) | set(self.seen)
        wrong = sorted(key for key in known if self.seen[key] != self.expected[key])
        if wrong:
            named = ", ".join(
                f"layer {i} {name} {self.seen[i, name]} times instead of {self.expected[i, name]}"
                for i, name in wrong
            )
            raise HalError(f"linear layers must all run through hal in a step, but: {named}")


@dataclass(frozen=True, slots=True)
class Place:
    """One seam of one mixer: its name, the bound layer, its id and the witness of its model."""

    seam: str
    mixer: nn.Module
    layer: Layer
    layer_id: int
    witness: Witness

    def note(self, given: Mapping[str, object] | None = None) -> int:
        """Book a call as `Witness.note`; one that packs rows its own way is an error."""
        for name in ("cu_seqlens", "seq_idx"):
            if given is not None and given.get(name) is not None:
                raise self.error(f"{name} was given, the rows are the step's alone")
        return self.witness.note(self.layer_id, self.seam)

    def error(self, text: str) -> HalError:
        """An error that names the layer."""
        return HalError(f"layer {self.layer_id}: {text}")
