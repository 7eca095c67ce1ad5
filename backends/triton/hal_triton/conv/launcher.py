"""The convolution, as engines call it."""

from collections.abc import Sequence

from torch import Tensor

from hal_triton.conv.runner import ConvCall, ConvRunner
from hal_triton.conv.verify import ConvCommit, ConvDraft, ConvDrafts
from hal_triton.tuning import Tuning


class TritonConv:
    """Offers all operations for state layouts "ring", "CW" and "WC".

    Rows are cut into tiles of their own, so that the grid follows the tokens and not the longest
    row. The first tile of a row alone reads its window and writes its end.
    """

    def __init__(self, tuning: Tuning, layout: str = "ring") -> None:
        self._run = ConvRunner(tuning, layout)
        self._drafts = ConvDrafts(tuning, layout)

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
        """Convolve any mixture of rows; x and result act `[T, C]`, track i32 `[M, 3]`."""
        return self._run(
            ConvCall(
                "conv.prefill",
                x,
                None,
                weight,
                bias,
                state,
                src,
                dst,
                start,
                query_start_loc,
                track,
                activation,
                out,
            )
        )

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
        """Convolve one token a row; x and result act `[B, C]`, pad rows exactly zero."""
        return self._run(
            ConvCall(
                "conv.decode",
                x,
                None,
                weight,
                bias,
                state,
                src,
                dst,
                start,
                activation=activation,
                out=out,
            )
        )

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
        """Convolve draft tokens, act `[T, C]`, each over the window of its parents."""
        return self._drafts.verify(
            ConvDraft(
                x,
                weight,
                bias,
                state,
                src,
                start,
                query_start_loc,
                max_len,
                scratch,
                parents,
                activation,
                out,
            )
        )

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
        self._drafts.commit(ConvCommit(state, scratch, src, dst, start, query_start_loc, last))
