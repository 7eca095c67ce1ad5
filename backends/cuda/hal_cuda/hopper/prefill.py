"""Plans and launches of prefill by the kernel in CUDA C++; other calls take the shared kernels."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Final, Protocol

import torch
from torch import Tensor

from hal.model.spec import GateKind
from hal_cuda.hopper.arguments import (
    ALIGNMENT,
    CHANNEL_RECORD,
    CHUNK,
    RECORD,
    SQUARE,
    Block,
    strides_fit,
    view_of,
)
from hal_cuda.hopper.cut import CHANNELS_RESIDENT, RESIDENT, SLICES, cut_of
from hal_cuda.hopper.driver import Kernel, driver
from hal_cuda.hopper.variant import CHANNEL, KERNELS, READY, SAFE, Variant
from hal_triton.delta_rule.call import DeltaCall, gate_numbers, gate_tensors, result_strides
from hal_triton.delta_rule.prefill import PrefillRunner, Run

DIM: Final = 128
"""K and V."""

TABLE: Final = "delta_rule.prefill.hopper"
"""Entry of the tuning table by rows times value heads: consuming groups, and whether a kernel of
its own prepares the chunks."""

CHANNEL_TABLE: Final = "delta_rule.channel_prefill.hopper"
"""The same where every channel decays by itself, whose chunks are always prepared."""

_LEAST_CHUNKS: Final = 8
"""Of a row, that a launch which prepares them is worth."""

_PAIR: Final = 8
"""Bytes of the pairs of float32 by which a state is read and written."""


def takes(call: DeltaCall) -> bool:
    """Whether the kernels serve a call: bfloat16, K = V = 128, dense states in float32."""
    dims = call.dims
    return (
        call.q.dtype == torch.bfloat16
        and (dims.K, dims.V) == (DIM, DIM)
        and _state_fits(call.state)
    )


def _state_fits(state: Tensor) -> bool:
    """Whether a slot's heads are dense matrices that pairs of float32 can be read from."""
    slot, head, row, column = state.stride()
    return state.dtype == torch.float32 and (row, column) == (DIM, 1) and not (slot | head) % 2


def chunks_of(call: DeltaCall) -> int:
    """About how many chunks a row has: rows' lengths are on the device."""
    return call.q.shape[0] // (CHUNK * max(call.src.shape[0], 1))


def channel_of(call: DeltaCall) -> int:
    """The kind of a channel's gate as the kernels number it; 0 for one decay a head."""
    if not call.is_channel:
        return 0
    kind = None if call.gate is None else call.gate.kind
    return {None: READY, GateKind.CHANNEL: CHANNEL, GateKind.SAFE: SAFE}[kind]


def variant_of(call: DeltaCall, consumers: int, prepared: bool = False) -> Variant:
    """The form of the kernel for a call; gates in float16 are widened before."""
    return Variant(
        consumers,
        track=call.points > 0,
        ready=call.gate is None,
        wide_a=call.a.dtype != torch.bfloat16,
        wide_b=call.b.dtype != torch.bfloat16,
        l2=call.qk_l2norm,
        prepared=prepared,
        channel=channel_of(call) if prepared else 0,
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
        if not all(map(strides_fit, tokens)) or not _pairs_fit(call):
            return self._copied
        variant = self._variant(call)
        block, form = block_of(call, variant), _InParts if variant.prepared else _Whole
        return _Launched(block, form.of(call, variant, block), self._copied, super()._plan)

    def _variant(self, call: DeltaCall) -> Variant:
        """The form by the tuning; few chunks are not worth a launch that prepares them."""
        work = call.src.shape[0] * call.dims.HV
        if not work:  # pads alone, which no gate decays
            return variant_of(call, 2)
        blocks = self._tuning.pick(CHANNEL_TABLE if call.is_channel else TABLE, work).blocks
        worth_it = bool(blocks.get("PREPARED")) and chunks_of(call) >= _LEAST_CHUNKS
        return variant_of(call, blocks["CONSUMERS"], call.is_channel or worth_it)

    def _widened(self, call: DeltaCall, out: Tensor) -> None:
        """The same call with gates in float32."""
        self(replace(call, a=call.a.float(), b=call.b.float(), out=out))

    def _copied(self, call: DeltaCall, out: Tensor) -> None:
        """The same call on copies of what bulk copies and wide stores cannot address."""
        q, k, v = (x if _reachable(x) else _dense(x) for x in (call.q, call.k, call.v))
        a = call.a if _pairs_fit(call) and _pairs_lie(call) else _dense(call.a)
        target = (
            out if _reachable(out) else torch.empty(out.shape, dtype=out.dtype, device=v.device)
        )
        self(replace(call, q=q, k=k, v=v, a=a, out=target))
        if target is not out:
            out.copy_(target)


class _Runs(Protocol):
    """The launches of a signature, whose arguments but those of its own are in place."""

    @property
    def index(self) -> int: ...

    def __call__(self, block: Block, call: DeltaCall, stream: int) -> None: ...


@dataclass(frozen=True, slots=True)
class _Whole:
    """One launch: rows are walked whole, and blocks prepare chunks for themselves."""

    walk: Kernel
    programs: int
    index: int

    @classmethod
    def of(cls, call: DeltaCall, variant: Variant, block: Block) -> "_Whole":
        """The launch of a call, whose arguments need nothing more."""
        index = call.v.get_device()
        programs = variant.programs(call.src.shape[0], call.dims.HV)
        return cls(KERNELS.get(variant.walk(), index), programs, index)

    def __call__(self, block: Block, call: DeltaCall, stream: int) -> None:
        driver().launch(self.walk, self.programs, block.launchable(), self.index, stream)


@dataclass(frozen=True, slots=True)
class _InParts:
    """Chunks are prepared all at once, then the parts of rows are walked in two phases.

    Beside the kernels stand the programs of each launch; `records` and `borders` are the sizes of
    what passes between them, in bytes and in elements. Rows that are whole have no first phase.
    """

    prepare: Kernel
    walk: Kernel
    join: Kernel
    preparing: int
    first: int
    joining: int
    rest: int
    records: int
    borders: int
    index: int

    @classmethod
    def of(cls, call: DeltaCall, variant: Variant, block: Block) -> "_InParts":
        """The launches of a call, whose cut goes into its arguments."""
        index, rows, heads = call.v.get_device(), call.src.shape[0], call.dims.HV
        processors = driver().processors(index)
        walk, prepare, join = (KERNELS.get(form, index) for form in variant.forms())
        blocks = heads * 2 // variant.consumers
        cut = cut_of(chunks_of(call), rows * blocks, processors)
        block.number(parts=cut.parts, waves=cut.waves)
        items, whole = (call.q.shape[0] // CHUNK + rows) * heads, cut.parts == 1
        resident = CHANNELS_RESIDENT if variant.channel else RESIDENT
        return cls(
            prepare, walk, join,
            preparing=min(items, resident * processors),
            first=0 if whole else rows * (2 * cut.parts - 3) * blocks,
            joining=rows * heads * SLICES,
            rest=(rows * max(cut.parts - 1, 1) + 1) * blocks,
            records=items * (CHANNEL_RECORD if variant.channel else RECORD),
            borders=0 if whole else rows * 2 * cut.parts * heads * SQUARE,
            index=index,
        )  # fmt: skip

    def __call__(self, block: Block, call: DeltaCall, stream: int) -> None:
        records = call.v.new_empty(self.records, dtype=torch.uint8)
        sums = call.v.new_empty(self.borders, dtype=torch.float32)
        block.number(records=records.data_ptr(), sums=sums.data_ptr())
        given = block.launchable()
        driver().launch(self.prepare, self.preparing, given, self.index, stream)
        if self.first:
            block.number(phase=0)
            driver().chain(self.walk, self.first, given, stream)
            driver().chain(self.join, self.joining, given, stream)
        block.number(phase=1)
        driver().chain(self.walk, self.rest, given, stream)


@dataclass(frozen=True, slots=True)
class _Launched:
    """The plan of a signature; `copied` and `shared` serve addresses that do not fit."""

    block: Block
    runs: _Runs
    copied: Run
    shared: Callable[[DeltaCall], Run]
    lock: Lock = field(default_factory=Lock)

    def __call__(self, call: DeltaCall, out: Tensor) -> None:
        """Fill `out` and the slots."""
        state, to = call.state.data_ptr(), out.data_ptr()
        tokens = (call.q.data_ptr(), call.k.data_ptr(), call.v.data_ptr())
        if (tokens[0] | tokens[1] | tokens[2] | to) % ALIGNMENT or not _pairs_lie(call):
            self.copied(call, out)
        elif state % _PAIR:
            self.shared(call)(call, out)
        elif torch.cuda.current_device() == self.runs.index:
            self._launch(call, tokens, state, to)
        else:
            with torch.cuda.device(self.runs.index):
                self._launch(call, tokens, state, to)

    def _launch(self, call: DeltaCall, tokens: tuple[int, int, int], state: int, out: int) -> None:
        """One thread at a time, since the driver reads the arguments while it launches."""
        bounds, track = call.bounds()
        rate, bias = gate_tensors(call.gate, call.state)
        others = (call.a, call.b, rate, bias, bounds, call.src, call.dst, track)
        stream = _raw_stream(self.runs.index)
        with self.lock:
            for at, pointer in zip(self.block.maps(), tokens, strict=True):
                driver().move(at, pointer)
            self.block.point(*[x.data_ptr() for x in others], state, out, 0, 0)
            self.runs(self.block, call, stream)


def _raw_stream(index: int) -> int:
    """The stream that torch would launch on, as the driver knows it."""
    stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
    return stream(index)


def _pairs_fit(call: DeltaCall) -> bool:
    """Whether gates of channels can be read in pairs at their strides; those of heads need not."""
    a = call.a
    return not call.is_channel or (a.stride(2) == 1 and not (a.stride(0) | a.stride(1)) % 2)


def _pairs_lie(call: DeltaCall) -> bool:
    """Whether they can at their address."""
    return not call.is_channel or not call.a.data_ptr() % (2 * call.a.element_size())


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
    scale, beta_scale, lower_bound = gate_numbers(call.gate, DIM)
    block.number(
        out_t=out_t, out_h=out_h, s_slot=call.state.stride(0), s_h=call.state.stride(1),
        a_t=call.a.stride(0), b_t=call.b.stride(0), rows=call.src.shape[0],
        tokens=call.q.shape[0], HV=dims.HV, R=dims.ratio, points=call.points, scale=scale,
        beta_scale=beta_scale, lower_bound=lower_bound,
        a_h=call.a.stride(1) if call.is_channel else 0,
    )  # fmt: skip
    return block
