"""The selective scan, as engines call it."""

from collections.abc import Sequence

from torch import Tensor

from hal_triton.scan.call import UNLIMITED, ScanCall
from hal_triton.scan.decode import DecodeRunner
from hal_triton.scan.prefill import PrefillRunner
from hal_triton.scan.verify import CommitRunner, VerifyRunner
from hal_triton.tuning import Tuning


class TritonScan:
    """Offers every operation of the scan: Mamba-2, Mamba-1 and lightning.

    x of three dimensions is Mamba-2 or lightning, of two Mamba-1. Track points of a prefill lie at
    multiples of 64 or at a row's end; Mamba-1 takes any.
    """

    def __init__(self, tuning: Tuning) -> None:
        self._decode = DecodeRunner(tuning)
        self._prefill = PrefillRunner(tuning)
        self._verify = VerifyRunner(tuning)
        self._commit = CommitRunner(tuning)

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
        dt_limit: tuple[float, float] = UNLIMITED,
        dt_softplus: bool = True,
        out: Tensor | None = None,
        track: Tensor | None = None,
    ) -> Tensor:
        """Run any mixture of rows; result act of x's shape, D skip and z included."""
        return self._prefill(
            ScanCall(
                "scan.prefill", x, dt, A, B, C, D, dt_bias, z, state, src, dst, query_start_loc,
                track=track, dt_limit=dt_limit, dt_softplus=dt_softplus, out=out,
            )
        )  # fmt: skip

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
        dt_limit: tuple[float, float] = UNLIMITED,
        dt_softplus: bool = True,
        out: Tensor | None = None,
    ) -> Tensor:
        """Advance every row by one token; pad rows exactly zero."""
        return self._decode(
            ScanCall(
                "scan.decode", x, dt, A, B, C, D, dt_bias, z, state, src, dst,
                dt_limit=dt_limit, dt_softplus=dt_softplus, out=out,
            )
        )  # fmt: skip

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
        dt_limit: tuple[float, float] = UNLIMITED,
        dt_softplus: bool = True,
        parents: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Run draft tokens, each from the state of its parent; `state` is only read."""
        call = ScanCall(
            "scan.verify", x, dt, A, B, C, D, dt_bias, z, state, src, src, query_start_loc,
            parents=parents, dt_limit=dt_limit, dt_softplus=dt_softplus, out=out,
        )  # fmt: skip
        return self._verify(call, scratch)

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
        self._commit(state, scratch, src, dst, query_start_loc, last)
