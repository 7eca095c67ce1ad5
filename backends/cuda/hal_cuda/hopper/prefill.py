"""Plans and launches of prefill by the kernel in CUDA C++; other calls take the shared kernels."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Final

import torch
from torch import Tensor

from hal.model.spec import GateKind
from hal_cuda.hopper.arguments import ALIGNMENT, Block, strides_fit, view_of
from hal_cuda.hopper.driver import Kernel, driver
from hal_cuda.hopper.variant import KERNELS, Variant
from hal_triton.delta_rule.call import DeltaCall, gate_numbers, gate_tensors, result_strides
from hal_triton.delta_rule.prefill import PrefillRunner, Run

DIM: Final = 128
"""K and V."""

TABLE: Final = "delta_rule.prefill.hopper"
"""Entry of the tuning table: consuming groups by rows times value heads."""

_PAIR: Final = 8
"""Bytes of the pairs of float32 by which a state is read and written."""


def takes(call: DeltaCall) -> bool:
    """Whether the kernel serves a call: bfloat16, K = V = 128, one decay a head, dense states."""
    dims, gate = call.dims, call.gate
    return (
        call.q.dtype == torch.bfloat16
        and (dims.K, dims.V) == (DIM, DIM)
        and not call.is_channel
        and (gate is None or gate.kind is GateKind.SCALAR)
        and _state_fits(call.state)
    )


def _state_fits(state: Tensor) -> bool:
    """Whether a slot's heads are dense matrices that pairs of float32 can be read from."""
    slot, head, row, column = state.stride()
    return state.dtype == torch.float32 and (row, column) == (DIM, 1) and not (slot | head) % 2


def variant_of(call: DeltaCall, consumers: int) -> Variant:
    """The form of the kernel for a call; gates in float16 are widened before."""
    return Variant(
        consumers,
        track=call.points > 0,
        ready=call.gate is None,
        wide_a=call.a.dtype != torch.bfloat16,
        wide_b=call.b.dtype != torch.bfloat16,
        l2=call.qk_l2norm,
    )


class HopperPrefill(PrefillRunner):
    """Prefill on states VK; a signature is checked and planned once.

    What the kernel cannot address is copied where that is tokens, and left to the shared kernels
    where it is states.
    """

    def _plan(self, call: DeltaCall) -> Run:
        if not takes(call) or not call.v.shape[0]:  # no tensor map shows nothing
            return super()._plan(call)
        if torch.float16 in (call.a.dtype, call.b.dtype):
            return self._widened
        tokens = (call.q, call.k, call.v, *([] if call.out is None else [call.out]))
        if not all(map(strides_fit, tokens)):
            return self._copied
        rows, heads = call.src.shape[0], call.dims.HV
        config = self._tuning.pick(TABLE, rows * heads)
        variant = variant_of(call, config.blocks["CONSUMERS"])
        index = call.v.get_device()
        return _Launched(
            KERNELS.get(variant, index), variant.programs(rows, heads), index,
            block_of(call, variant), self._copied, super()._plan,
        )  # fmt: skip

    def _widened(self, call: DeltaCall, out: Tensor) -> None:
        """The same call with gates in float32."""
        self(replace(call, a=call.a.float(), b=call.b.float(), out=out))

    def _copied(self, call: DeltaCall, out: Tensor) -> None:
        """The same call on copies of what bulk copies and wide stores cannot address."""
        q, k, v = (x if _reachable(x) else _dense(x) for x in (call.q, call.k, call.v))
        target = (
            out if _reachable(out) else torch.empty(out.shape, dtype=out.dtype, device=v.device)
        )
        self(replace(call, q=q, k=k, v=v, out=target))
        if target is not out:
            out.copy_(target)


@dataclass(frozen=True, slots=True)
class _Launched:
    """The one launch of a signature; `copied` and `shared` serve addresses that do not fit."""

    kernel: Kernel
    programs: int
    index: int
    block: Block
    copied: Run
    shared: Callable[[DeltaCall], Run]
    lock: Lock = field(default_factory=Lock)

    def __call__(self, call: DeltaCall, out: Tensor) -> None:
        """Fill `out` and the slots."""
        state, to = call.state.data_ptr(), out.data_ptr()
        tokens = (call.q.data_ptr(), call.k.data_ptr(), call.v.data_ptr())
        if (tokens[0] | tokens[1] | tokens[2] | to) % ALIGNMENT:
            self.copied(call, out)
        elif state % _PAIR:
            self.shared(call)(call, out)
        elif torch.cuda.current_device() == self.index:
            self._launch(call, tokens, state, to)
        else:
            with torch.cuda.device(self.index):
                self._launch(call, tokens, state, to)

    def _launch(self, call: DeltaCall, tokens: tuple[int, int, int], state: int, out: int) -> None:
        """One thread at a time, since the driver reads the arguments while it launches."""
        bounds, track = call.bounds()
        rate, bias = gate_tensors(call.gate, call.state)
        others = (call.a, call.b, rate, bias, bounds, call.src, call.dst, track)
        stream = _raw_stream(self.index)
        with self.lock:
            for at, pointer in zip(self.block.maps(), tokens, strict=True):
                driver().move(at, pointer)
            self.block.point(*[x.data_ptr() for x in others], state, out)
            driver().launch(self.kernel, self.programs, self.block.launchable(), self.index, stream)


def _raw_stream(index: int) -> int:
    """The stream that torch would launch on, as the driver knows it."""
    stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
    return stream(index)


def _reachable(x: Tensor) -> bool:
    return strides_fit(x) and x.data_ptr() % ALIGNMENT == 0


def _dense(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def block_of(call: DeltaCall, variant: Variant) -> Block:
    """The arguments of a signature; a launch puts its addresses in."""
    block, dims = Block.empty(), call.dims
    halves = (2, 2, variant.consumers)
    for at, x, count in zip(block.maps(), (call.q, call.k, call.v), halves, strict=True):
        driver().map(at, view_of(x, count))
    out_t, out_h = result_strides(call.out, dims)
    scale, beta_scale, _ = gate_numbers(call.gate, DIM)
    block.number(
        out_t=out_t, out_h=out_h, s_slot=call.state.stride(0), s_h=call.state.stride(1),
        a_t=call.a.stride(0), b_t=call.b.stride(0), rows=call.src.shape[0],
        tokens=call.q.shape[0], HV=dims.HV, R=dims.ratio, points=call.points, scale=scale,
        beta_scale=beta_scale,
    )  # fmt: skip
    return block
