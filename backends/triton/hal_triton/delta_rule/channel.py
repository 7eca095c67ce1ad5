"""Plans and launches of chunked prefill where every key channel decays by itself."""

from dataclasses import dataclass
from typing import Final

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
from hal_triton.delta_rule.kernels.channel_chunk import channel_chunks
from hal_triton.delta_rule.kernels.channel_walk import channel_walk
from hal_triton.launch import Launch
from hal_triton.tuning import Config, Tuning, block

WIDEST: Final = 128
"""Largest K that is served in chunks: a wider tile of keys has no registers left."""


@dataclass(frozen=True, slots=True)
class ChannelChunked:
    """The two launches of the form, and the shapes of what passes between them."""

    chunks: Launch
    walk: Launch
    square: tuple[int, ...]
    panels: tuple[int, ...]
    factors: tuple[int, ...]

    def __call__(self, call: DeltaCall, out: Tensor) -> None:
        """Fill `out` and the slots."""
        bounds, track = call.bounds()
        new = call.v.new_empty
        inverse = new(self.square, dtype=torch.float16)
        scores = new(self.square, dtype=torch.float16)
        panels = new(self.panels, dtype=torch.float16)
        factors = new(self.factors, dtype=torch.float32)
        rate, bias = gate_tensors(call.gate, factors)
        between = (inverse, scores, panels, factors)
        self.chunks(call.q, call.k, call.a, call.b, rate, bias, bounds, *between, out)
        self.walk(call.v, *between, call.state, call.src, call.dst, bounds, track, out)


def plan_channel(call: DeltaCall, tuning: Tuning, layout: str) -> ChannelChunked:
    """Every row has chunks of its own, so that the grid follows the tokens."""
    rows, tokens, dims = call.src.shape[0], call.q.shape[0], call.dims
    config = tuning.pick("delta_rule.channel_chunks", tokens * dims.HV)
    BT, BK = config.blocks["BT"], block(dims.K, 16)
    tiles = tokens // BT + rows + 1
    return ChannelChunked(
        _plan_chunks(call, config, tiles),
        _plan_walk(call, tuning, layout, BT),
        (tiles, dims.HV, BT, BT),
        (tiles, dims.HV, 3, BT, BK),
        (tiles, dims.HV, BK + 2 * BT),
    )


def _plan_chunks(call: DeltaCall, config: Config, tiles: int) -> Launch:
    rows, tokens, dims = call.src.shape[0], call.q.shape[0], call.dims
    BT, BK = config.blocks["BT"], block(dims.K, 16)
    BS = BT // 2
    run = _run(BS, BK, config.warps)
    out_t, out_h = result_strides(call.out, dims)
    numbers = (
        *(rows, tokens, call.q.stride(1), call.k.stride(1), call.a.stride(1), call.b.stride(0)),
        *(out_h, *gate_numbers(call.gate, dims.K)),
    )
    constants = {
        **{"q_t": call.q.stride(0), "k_t": call.k.stride(0), "a_t": call.a.stride(0)},
        **{"out_t": out_t, "HV": dims.HV, "R": dims.ratio, "K": dims.K, "V": dims.V, "BK": BK},
        **{"BV": block(dims.V), "BS": BS, "RUN": run, "SHORT": run.bit_length() - 1},
        **{"LEVELS": BS.bit_length() - 1, "GATE": gate_constants(call.gate, call.a)["GATE"]},
        **{"L2": call.qk_l2norm, "SOLVE": _solve(call)},
    }
    programs = tiles * dims.HV
    return Launch(channel_chunks, programs, numbers, constants, config.options, call.v.device)


def _run(BS: int, BK: int, warps: int) -> int:
    """Tokens in a row of one thread, if threads of 8 channels each share a tile of BS evenly."""
    return max(1, min(BS // 2, BS * BK // (8 * 32 * warps)))


def _solve(call: DeltaCall) -> str:
    """The products of the solve: normed keys bound them, and bfloat16 hides what float16 loses."""
    return "float16" if call.qk_l2norm and call.q.dtype == torch.bfloat16 else "bf16x3"


def _plan_walk(call: DeltaCall, tuning: Tuning, layout: str, BT: int) -> Launch:
    rows, dims, points = call.src.shape[0], call.dims, call.points
    config = tuning.pick("delta_rule.channel_walk", rows * dims.HV)
    BV = min(config.blocks["BV"], block(dims.V, 16))
    s_slot, s_h, s_v, s_k = state_strides(call.state, layout)
    out_t, out_h = result_strides(call.out, dims)
    scale = gate_numbers(call.gate, dims.K)[0]
    numbers = (points, call.v.stride(1), out_h, s_slot, s_h, scale)
    constants = {
        **{"v_t": call.v.stride(0), "out_t": out_t, "s_v": s_v, "s_k": s_k},
        **{"HV": dims.HV, "K": dims.K, "V": dims.V, "BK": block(dims.K, 16), "BV": BV, "BT": BT},
        **{"L2": call.qk_l2norm, "TRACK": points > 0},
    }
    programs = rows * dims.HV * -(-dims.V // BV)
    return Launch(channel_walk, programs, numbers, constants, config.options, call.v.device)
