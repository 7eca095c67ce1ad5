"""Plans and launches of the two convolution kernels, for plain and for gated convolutions."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hal.runtime.checks import check_conv, check_rows
from hal_triton.conv.kernels.decode import conv_decode
from hal_triton.conv.kernels.prefill import conv_prefill
from hal_triton.launch import Launch, Plans, dense, dense_or_none, rows_are_dense, signature
from hal_triton.tuning import Config, Tuning
from hal_triton.tuning import block as pow2


@dataclass(frozen=True, slots=True, eq=False)
class ConvCall:
    """The arguments of one call; without `query_start_loc` it is a decode.

    `gates` are B and C of a short convolution, each of x's shape.
    """

    operation: str
    x: Tensor
    gates: tuple[Tensor, Tensor] | None
    weight: Tensor
    bias: Tensor | None
    state: Tensor
    src: Tensor
    dst: Tensor
    start: Tensor
    query_start_loc: Tensor | None = None
    track: Tensor | None = None
    activation: str | None = None
    out: Tensor | None = None

    def indices(self) -> tuple[Tensor | None, ...]:
        """The index tensors."""
        return self.src, self.dst, self.start, self.query_start_loc, self.track

    def signature(self) -> tuple[object, ...]:
        """What decides the plan of this call."""
        held = (self.x, *(self.gates or ()), self.weight, self.bias, self.state, self.out)
        return self.activation, signature(*held, *self.indices())

    def is_tidy(self) -> bool:
        """Whether kernels can take the tensors as they are: dense rows, dense indices."""
        return rows_are_dense(self.x, *(self.gates or ()), self.bias, self.out) and all(
            t is None or t.is_contiguous() for t in self.indices()
        )

    def tidied(self) -> "ConvCall":
        """The same call on dense copies, without `out`."""
        return replace(
            self,
            x=dense(self.x),
            gates=self.gates and (dense(self.gates[0]), dense(self.gates[1])),
            bias=dense_or_none(self.bias),
            src=dense(self.src),
            dst=dense(self.dst),
            start=dense(self.start),
            query_start_loc=dense_or_none(self.query_start_loc),
            track=self.track if self.track is None else self.track.contiguous(),
            out=None,
        )

    def check(self, layout: str) -> None:
        """Refuse what does not fit, before anything is written."""
        name, tokens = self.operation, self.x.shape[0]
        check_conv(
            name, self.x, self.weight, self.bias, self.state, layout, self.activation, self.out
        )
        others = (("dst", self.dst), ("start", self.start))
        check_rows(name, tokens, self.src, others, self.query_start_loc, self.track)


class ConvRunner:
    """Runs calls on one state layout; a signature is checked and planned once."""

    def __init__(self, tuning: Tuning, layout: str) -> None:
        self._tuning, self._layout = tuning, layout
        self._plans: Plans[Launch] = Plans()

    def __call__(self, call: ConvCall) -> Tensor:
        """The convolution's result, act `[T, C]`."""
        key = call.signature()
        launch = self._plans.get(key)
        if launch is None:
            call.check(self._layout)
            if not call.is_tidy():
                result = self(call.tidied())
                return result if call.out is None else call.out.copy_(result)
            plan = self._packed if call.query_start_loc is not None else self._tokens
            launch = self._plans.put(key, plan(call))
        x, weight = call.x, call.weight
        out = x.new_empty(x.shape) if call.out is None else call.out
        gate, gate_out = call.gates or (x, x)
        bias = weight if call.bias is None else call.bias
        head = (x, gate, gate_out, weight, bias, call.state, call.src, call.dst, call.start)
        if call.query_start_loc is None:
            launch(*head, out)
        else:
            track = call.src if call.track is None else call.track
            launch(*head, call.query_start_loc, track, out)
        return out

    def _packed(self, call: ConvCall) -> Launch:
        tokens, channels = call.x.shape
        rows, points = call.src.shape[0], 0 if call.track is None else call.track.shape[0]
        config = self._tuning.pick(_table_name(call), tokens * channels)
        tiles = tokens // config.blocks["BT"] + rows + 1 if tokens else 0
        constants = {**config.blocks, "TRACK": points > 0}
        numbers = (rows, tokens, points, channels)
        return self._launch(conv_prefill, call, config, tiles, numbers, constants)

    def _tokens(self, call: ConvCall) -> Launch:
        rows, channels = call.x.shape
        config = self._tuning.pick(call.operation, rows * channels)
        return self._launch(conv_decode, call, config, rows, (channels,), {})

    def _launch(
        self,
        kernel: object,
        call: ConvCall,
        config: Config,
        parts: int,
        numbers: tuple[int, ...],
        constants: Mapping[str, object],
    ) -> Launch:
        """Plan `parts` programs for every block of channels."""
        channels = call.x.shape[1]
        block = min(config.blocks["BC"], pow2(channels, 32))
        if channels % block:  # masked elements are read one by one and take twice the registers
            block = max(32, block // 2)
        gate, gate_out = call.gates or (call.x, call.x)
        out_t = channels if call.out is None else call.out.stride(0)
        strides = (
            *(call.x.stride(0), gate.stride(0), gate_out.stride(0)),
            *call.weight.stride(),
            *window_strides(call.state, self._layout),
            out_t,
        )
        rough = call.x.dtype == torch.bfloat16
        shared = {
            "W": call.weight.shape[1],
            "BC": block,
            "EVEN": channels % block == 0,
            "RING": self._layout == "ring",
            "HAS_BIAS": call.bias is not None,
            "GATED": call.gates is not None,
            "ACTIVATE": call.activation is not None,
            "SILU": self._tuning.fast_silu if rough else self._tuning.silu,
        }
        return Launch(
            kernel,
            parts * -(-channels // block),
            (*numbers, *strides),
            {**constants, **shared},
            config.options,
            call.x.device,
        )


def _table_name(call: ConvCall) -> str:
    """The entry of a packed call; float32 inputs fill twice the registers."""
    return f"{call.operation}.float32" if call.x.dtype == torch.float32 else call.operation


def window_strides(state: Tensor, layout: str) -> tuple[int, int, int]:
    """Strides of slot, channel and window row."""
    slot, first, second = state.stride()
    return (slot, first, second) if layout == "CW" else (slot, second, first)
