"""Plans and launches of prefill: in chunks where products have 16 bits, else token by token."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hal_triton.delta_rule.call import (
    DeltaCall,
    gate_constants,
    gate_numbers,
    gate_tensors,
    result_strides,
    state_strides,
)
from hal_triton.delta_rule.channel import WIDEST, plan_channel
from hal_triton.delta_rule.kernels.chunk import delta_chunks
from hal_triton.delta_rule.kernels.recurrent import delta_recurrent
from hal_triton.delta_rule.kernels.walk import delta_walk
from hal_triton.launch import Launch, Plans
from hal_triton.tuning import Tuning, block

Run = Callable[[DeltaCall, Tensor], None]


class PrefillRunner:
    """Runs packed calls on one state layout; a signature is checked and planned once.

    Chunks serve 16-bit activations, in one form where heads decay as a whole and in another where
    every key channel decays by itself. Float32 activations, and keys too wide for the second form,
    run token by token.
    """

    def __init__(self, tuning: Tuning, layout: str) -> None:
        self._tuning, self._layout = tuning, layout
        self._plans: Plans[Run] = Plans()

    def __call__(self, call: DeltaCall) -> Tensor:
        """Any mixture of rows, act `[T, HV, V]`."""
        key = call.signature()
        run = self._plans.get(key)
        if run is None:
            call.check(self._layout)
            if not call.is_tidy():
                result = self(call.tidied())
                return result if call.out is None else call.out.copy_(result)
            run = self._plans.put(key, self._plan(call))
        v = call.v
        out = v.new_empty(v.shape) if call.out is None else call.out
        if v.shape[0]:
            run(call, out)
        return out

    def _plan(self, call: DeltaCall) -> Run:
        wide = call.is_channel and call.dims.K > WIDEST
        if call.q.dtype == torch.float32 or wide:
            return _Recurrent(plan_recurrent(call, self._tuning, self._layout))
        if call.is_channel:
            return plan_channel(call, self._tuning, self._layout)
        return plan_chunked(call, self._tuning, self._layout)


@dataclass(frozen=True, slots=True)
class _Recurrent:
    """The one launch of the sequential form."""

    launch: Launch

    def __call__(self, call: DeltaCall, out: Tensor) -> None:
        """Fill `out` and the slots."""
        bounds, track = call.bounds()
        rate, bias = gate_tensors(call.gate, call.state)
        self.launch(
            call.q, call.k, call.v, call.a, call.b, rate, bias, call.state, call.src, call.dst,
            bounds, track, out,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Chunked:
    """The two launches of the chunked form, and the shapes of what passes between them."""

    chunks: Launch
    walk: Launch
    between: torch.dtype
    square: tuple[int, ...]
    factors: tuple[int, ...]

    def __call__(self, call: DeltaCall, out: Tensor) -> None:
        """Fill `out` and the slots."""
        bounds, track = call.bounds()
        inverse = call.v.new_empty(self.square, dtype=self.between)
        scores = call.v.new_empty(self.square, dtype=self.between)
        factors = call.v.new_empty(self.factors, dtype=torch.float32)
        rate, bias = gate_tensors(call.gate, factors)
        between = (inverse, scores, factors)
        self.chunks(call.q, call.k, call.a, call.b, rate, bias, bounds, *between, out)
        self.walk(
            call.q, call.k, call.v, *between, call.state, call.src, call.dst, bounds, track, out
        )


def plan_recurrent(call: DeltaCall, tuning: Tuning, layout: str) -> Launch:
    """The sequential form, a program for every row, head and tile of values, and for the pads."""
    dims, rows = call.dims, call.src.shape[0]
    config = tuning.pick("delta_rule.recurrent", rows * dims.HV)
    BV = min(config.blocks["BV"], block(dims.V))
    points = call.points
    numbers = (
        *(rows, call.q.shape[0], points, *call.q.stride()[:2], *call.k.stride()[:2]),
        *(*call.v.stride()[:2], *call.a.stride()[:2], call.b.stride(0)),
        *(*result_strides(call.out, dims), *state_strides(call.state, layout)),
        *gate_numbers(call.gate, dims.K),
    )
    constants = {
        **{"HV": dims.HV, "R": dims.ratio, "K": dims.K, "V": dims.V, "BK": block(dims.K)},
        **{"BV": BV, "L2": call.qk_l2norm, "TRACK": points > 0},
        **gate_constants(call.gate, call.a),
    }
    programs = (rows + 1) * dims.HV * -(-dims.V // BV)
    return Launch(delta_recurrent, programs, numbers, constants, config.options, call.v.device)


def plan_chunked(call: DeltaCall, tuning: Tuning, layout: str) -> _Chunked:
    """The chunked form; every row has chunks of its own, so that the grid follows the tokens."""
    rows, tokens, dims = call.src.shape[0], call.q.shape[0], call.dims
    BT = tuning.pick(_table_name("delta_rule.chunks", call), tokens * dims.HV).blocks["BT"]
    tiles = tokens // BT + rows + 1
    return _Chunked(
        _plan_chunks(call, tuning, tiles, BT),
        _plan_walk(call, tuning, layout, BT),
        torch.float32 if _is_exact(call) else torch.float16,
        (tiles, dims.HV, BT, BT),
        (tiles, dims.HV, 4, BT),
    )


def _plan_chunks(call: DeltaCall, tuning: Tuning, tiles: int, BT: int) -> Launch:
    rows, tokens, dims = call.src.shape[0], call.q.shape[0], call.dims
    config = tuning.pick(_table_name("delta_rule.chunks", call), tokens * dims.HV)
    numbers = (
        *(rows, tokens, call.q.stride(1), call.k.stride(1), call.a.stride(0), call.b.stride(0)),
        *(result_strides(call.out, dims)[1], *gate_numbers(call.gate, dims.K)),
    )
    constants = {
        **_shared_constants(call, BT),
        **{"BV": block(dims.V), "GATE": gate_constants(call.gate, call.a)["GATE"]},
        **{"L2": call.qk_l2norm, "SOLVE": "bf16x3" if _is_exact(call) else tuning.solve},
    }
    programs = tiles * dims.HV
    return Launch(delta_chunks, programs, numbers, constants, config.options, call.v.device)


def _plan_walk(call: DeltaCall, tuning: Tuning, layout: str, BT: int) -> Launch:
    rows, dims, points = call.src.shape[0], call.dims, call.points
    config = tuning.pick(_table_name("delta_rule.walk", call), rows * dims.HV)
    BV = min(config.blocks["BV"], block(dims.V, 16))
    s_slot, s_h, s_v, s_k = state_strides(call.state, layout)
    numbers = (
        *(points, call.q.stride(1), call.k.stride(1), call.v.stride(1)),
        *(result_strides(call.out, dims)[1], s_slot, s_h),
    )
    constants = {
        **_shared_constants(call, BT),
        **{"v_t": call.v.stride(0), "s_v": s_v, "s_k": s_k, "BV": BV, "TRACK": points > 0},
        "EXACT": _is_exact(call),
    }
    programs = rows * dims.HV * -(-dims.V // BV)
    return Launch(delta_walk, programs, numbers, constants, config.options, call.v.device)


def _shared_constants(call: DeltaCall, BT: int) -> dict[str, object]:
    dims = call.dims
    return {
        **{"HV": dims.HV, "R": dims.ratio, "K": dims.K, "V": dims.V},
        **{"q_t": call.q.stride(0), "k_t": call.k.stride(0)},
        **{"out_t": result_strides(call.out, dims)[0], "BK": block(dims.K, 16), "BT": BT},
    }


def _table_name(operation: str, call: DeltaCall) -> str:
    """The table's name: float16 splits its products, wide keys need twice the registers."""
    split = f"{operation}.float16" if _is_exact(call) else operation
    return f"{split}.wide" if call.dims.K > 128 else split


def _is_exact(call: DeltaCall) -> bool:
    """Whether what passes between the kernels has to keep more than float16's digits."""
    return call.q.dtype == torch.float16
