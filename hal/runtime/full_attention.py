"""What `hal` asks of the engine's full attention: Protocols alone, it runs no attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from hal.runtime.batch import Batch, Mode


class FullAttention(Protocol):
    """The engine's attention backend, called with the batch that the linear layers get too."""

    @property
    def label(self) -> str:
        """What people call it, for errors."""
        ...

    @property
    def speculation(self) -> SpeculativeAttention | None:
        """Itself where it has a commit, else None; composition asks this and nothing else."""
        ...

    def begin(self, batch: Batch) -> None:
        """Make the step's metadata; an error leaves nothing that a later `begin` would not mend."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
        """Attend: q `[T, HQ, D]`, k `[T, HKV, D]`, v `[T, HKV, V]`, result `[T, HQ, V]`."""
        ...

    def capture(self, mode: Mode, rows: int, width: int) -> None:
        """Make metadata at fixed addresses for steps of `rows` rows, and let it be the step's.

        `width` is the tokens of a row in VERIFY, and 1 in DECODE.
        """
        ...

    def replay(self, batch: Batch) -> None:
        """Rewrite the captured metadata for a batch, the tail beyond its rows included."""
        ...


class SpeculativeAttention(FullAttention, Protocol):
    """A full attention that can verify drafts: the step changes nothing until the commit."""

    def commit(
        self, accepted: Sequence[int] | Tensor, tips: Sequence[int] | Tensor | None = None
    ) -> None:
        """Keep every row's accepted tokens, 0 up to all of them; a tree names paths by tips."""
        ...
