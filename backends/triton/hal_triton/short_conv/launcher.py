"""The short convolution of LFM2 and LFM3: C * Conv(B * x) in one launch."""

from torch import Tensor

from hal.runtime.checks import check_act, check_same
from hal_triton.conv.runner import ConvCall, ConvRunner
from hal_triton.tuning import Tuning


class TritonShortConv:
    """Offers `prefill` and `decode` on the state of the plain convolution.

    B * x is rounded to act, since it is what the state holds; C meets the float32 sum.
    """

    def __init__(self, tuning: Tuning, layout: str = "ring") -> None:
        self._run = ConvRunner(tuning, layout)

    def prefill(
        self,
        B: Tensor,
        C: Tensor,
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
        out: Tensor | None = None,
        track: Tensor | None = None,
    ) -> Tensor:
        """Run any mixture of rows; B, C, x and result act `[T, hidden]`."""
        _check_gates("short_conv.prefill", B, C, x)
        return self._run(
            ConvCall(
                "short_conv.prefill",
                x,
                (B, C),
                weight,
                bias,
                state,
                src,
                dst,
                start,
                query_start_loc,
                track,
                None,
                out,
            )
        )

    def decode(
        self,
        B: Tensor,
        C: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        src: Tensor,
        dst: Tensor,
        start: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Run one token a row; B, C, x and result act `[B, hidden]`, pad rows exactly zero."""
        _check_gates("short_conv.decode", B, C, x)
        return self._run(
            ConvCall("short_conv.decode", x, (B, C), weight, bias, state, src, dst, start, out=out)
        )


def _check_gates(operation: str, B: Tensor, C: Tensor, x: Tensor) -> None:
    check_act(operation, "x", x, 2)
    for name, gate in (("B", B), ("C", C)):
        check_same(operation, name, gate, x.dtype, "x")
        if gate.shape != x.shape:
            raise ValueError(f"{operation}: {name} is {list(gate.shape)}, x is {list(x.shape)}")
