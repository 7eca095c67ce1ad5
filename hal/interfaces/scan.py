"""The selective scan: Mamba-2, Mamba-1 and lightning attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Scan(Protocol):
    """The recurrence of a row and head h, with group g = h // (H/G), all in float32.

    d = clamp(softplus(dt + dt_bias), dt_limit); S = S * exp(d * A) + (d * x) B[g]^T;
    y = S C[g] + D * x; y = y * silu(z) where z is given.

    That is Mamba-2: x, z act `[T, H, P]`, dt `[T, H]`, A f32 `[H]`, B and C `[T, G, N]`, D and
    dt_bias f32 `[H]`, state f32 `[S, H, P, N]`. Mamba-1 runs the same per channel: x, z `[T, I]`,
    dt `[T, I]`, A `[I, N]`, D and dt_bias `[I]`, state `[S, I, N]`. Lightning passes dt None (1)
    and A = -slope.
    """

    def prefill(
        self,
        x: Tensor,
        dt: Tensor | None,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        dt_bias: Tensor | None,
        z: Tensor | None,
        state: Tensor,
        src: Tensor,
        dst: Tensor,
        query_start_loc: Tensor,
        max_len: int,
        *,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        dt_softplus: bool = True,
        out: Tensor | None = None,
        track: Tensor | None = None,
    ) -> Tensor:
        """Run any mixture of rows; result act of x's shape, D skip and z included."""
        ...

    def decode(
        self,
        x: Tensor,
        dt: Tensor | None,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        dt_bias: Tensor | None,
        z: Tensor | None,
        state: Tensor,
        src: Tensor,
        dst: Tensor,
        *,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        dt_softplus: bool = True,
        out: Tensor | None = None,
    ) -> Tensor:
        """Advance every row by one token; the dt limit binds here as in prefill."""
        ...

    def verify(
        self,
        x: Tensor,
        dt: Tensor | None,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        dt_bias: Tensor | None,
        z: Tensor | None,
        state: Tensor,
        src: Tensor,
        query_start_loc: Tensor,
        max_len: int,
        scratch: Sequence[Tensor],
        *,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        dt_softplus: bool = True,
        parents: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Run draft tokens, each from the state of its parent; `state` is only read."""
        ...

    def commit(
        self,
        state: Tensor,
        scratch: Sequence[Tensor],
        src: Tensor,
        dst: Tensor,
        query_start_loc: Tensor,
        last: Tensor,
    ) -> None:
        """Write the state after the path to row-relative token `last` (-1: write nothing)."""
        ...
