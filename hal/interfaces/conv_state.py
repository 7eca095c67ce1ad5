"""The conv-state sidecar: state of layers that run their own convolution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ConvStep:
    """What one layer's convolution needs in this step.

    `tensors` are the layer's pool tensors: one for short conv, two for CCA (window, previous
    hidden). The index tensors are the same objects for all layers of a step.
    """

    tensors: tuple[Tensor, ...]
    src: Tensor
    dst: Tensor
    start: Tensor
    query_start_loc: Tensor
    max_len: int


class ConvState(Protocol):
    """Owns the per-step view of conv-state tensors; the pool owns their memory.

    The indices are resolved once a step in `begin`; `step` only pairs them with a layer's tensors,
    so that no layer translates slots by itself. Addresses stay the same from step to step.
    """

    def attach(self, tensors: Mapping[int, Sequence[Tensor]]) -> None:
        """Take the pool tensors by layer id, once, after the pool is allocated."""
        ...

    def begin(
        self, src: Tensor, dst: Tensor, start: Tensor, query_start_loc: Tensor, max_len: int
    ) -> None:
        """Resolve the step's indices: src, dst, start i32 `[B]`, query_start_loc i32 `[B+1]`.

        The tensors are kept, not copied; a step may have no rows. `max_len` is an upper bound.
        """
        ...

    def step(self, layer_id: int) -> ConvStep:
        """The layer's view of this step."""
        ...
