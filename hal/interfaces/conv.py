"""The depthwise causal convolution in front of every linear layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Conv(Protocol):
    """y[t, c] = act(bias[c] + sum_j weight[c, j] * x[t - (W-1) + j, c]), summed in float32.

    Tap W-1 meets the newest token; taps before the row start read the window of `src`. The window
    is the last W-1 *inputs*, oldest first: `state` is `[S, C, W-1]` in layout "CW", `[S, W-1, C]`
    in "WC", `[S, W, C]` in "ring". `activation` is "silu" or None and acts before the one rounding
    to act. `weight` `[C, W]` and `bias` `[C]` may be of another float dtype than x.
    """

    def prefill(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        src: Tensor,
        dst: Tensor,
        start: Tensor,
        query_start_loc: Tensor,
        max_len: int,
        *,
        activation: str | None = None,
        out: Tensor | None = None,
        track: Tensor | None = None,
    ) -> Tensor:
        """Convolve any mixture of rows; x and result act `[T, C]`, track i32 `[M, 3]`.

        A row shorter than W-1 keeps the newest part of the old window in front of its own tokens.
        """
        ...

    def decode(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        src: Tensor,
        dst: Tensor,
        start: Tensor,
        *,
        activation: str | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Convolve one token a row; x and result act `[B, C]`.

        A row with neither slot is padding: its output is exactly zero and nothing is written.
        """
        ...

    def verify(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        src: Tensor,
        start: Tensor,
        query_start_loc: Tensor,
        max_len: int,
        scratch: Sequence[Tensor],
        *,
        parents: Tensor | None = None,
        activation: str | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Convolve draft tokens, act `[T, C]`; `state` is only read, what commit needs is scratch.

        With `parents` i32 `[T]` a token's window follows its parents, not the token order.
        """
        ...

    def commit(
        self,
        state: Tensor,
        scratch: Sequence[Tensor],
        src: Tensor,
        dst: Tensor,
        start: Tensor,
        query_start_loc: Tensor,
        last: Tensor,
    ) -> None:
        """Write the window after the path to row-relative token `last` (-1: write nothing)."""
        ...
