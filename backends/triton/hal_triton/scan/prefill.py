"""Plans and launches of prefill: in chunks where heads decay as a whole, else token by token."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hal.runtime.checks import dtype_name
from hal_triton.launch import Launch, Plans
from hal_triton.scan.call import (
    ScanCall,
    bounds,
    forms,
    input_strides,
    inputs,
    limits,
    points,
    state_strides,
)
from hal_triton.scan.kernels.prepare import scan_prepare
from hal_triton.scan.kernels.recurrent import scan_recurrent
from hal_triton.scan.kernels.walk import scan_sums, scan_walk
from hal_triton.tuning import Config, Tuning, block

Run = Callable[[ScanCall, Tensor], None]


class PrefillRunner:
    """Runs packed calls; a signature is checked and planned once.

    Mamba-2 and lightning run in chunks, Mamba-1 token by token.
    """

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._plans: Plans[Run] = Plans()

    def __call__(self, call: ScanCall) -> Tensor:
        """Any mixture of rows, act of x's shape."""
        key = call.signature()
        run = self._plans.get(key)
        if run is None:
            call.check()
            if not call.is_tidy():
                result = self(call.tidied())
                return result if call.out is None else call.out.copy_(result)
            run = self._plans.put(key, self._plan(call))
        out = call.x.new_empty(call.x.shape) if call.out is None else call.out
        if call.x.shape[0]:
            run(call, out)
        return out

    def _plan(self, call: ScanCall) -> Run:
        if call.by_channel:
            return _Recurrent(_plan_recurrent(call, self._tuning))
        return _plan_chunked(call, self._tuning)


@dataclass(frozen=True, slots=True)
class _Recurrent:
    """The one launch of the sequential form."""

    launch: Launch

    def __call__(self, call: ScanCall, out: Tensor) -> None:
        """Fill `out` and the slots."""
        places = (call.state, call.src, call.dst, bounds(call), _track(call))
        self.launch(*inputs(call), *places, out)


@dataclass(frozen=True, slots=True)
class _Chunked:
    """The launches of the chunked form, and the shapes of what passes between them.

    Rows are cut into segments where there is a launch for their sums.
    """

    prepare: Launch
    sums: Launch | None
    walk: Launch
    between: torch.dtype
    scores: tuple[int, ...]
    factors: tuple[int, ...]
    segments: tuple[int, ...]

    def __call__(self, call: ScanCall, out: Tensor) -> None:
        """Fill `out` and the slots."""
        x, dt, A, B, C, D, dt_bias, z = inputs(call)
        ends, state = bounds(call), call.state
        scores = x.new_empty(self.scores, dtype=self.between)
        factors = x.new_empty(self.factors, dtype=torch.float32)
        self.prepare(dt, A, B, C, dt_bias, ends, scores, factors, out)
        sums = falls = factors
        if self.sums is not None:
            sums = x.new_empty(self.segments, dtype=torch.float32)
            falls = x.new_empty(self.segments[:2], dtype=torch.float32)
            self.sums(x, B, factors, state, call.src, ends, sums, falls)
        places = (state, call.src, call.dst, ends, _track(call))
        self.walk(x, B, C, D, z, scores, factors, sums, falls, *places, out)


def _plan_recurrent(call: ScanCall, tuning: Tuning) -> Launch:
    """A program for every row, group and tile of channels, and for the pads."""
    dims, rows = call.dims, call.src.shape[0]
    config = tuning.pick("scan.recurrent", rows * dims.H * dims.P)
    BP = min(config.blocks["BP"], block(dims.P))
    numbers = (
        *(rows, call.x.shape[0], points(call), *input_strides(call)),
        *(*state_strides(call.state, dims), *limits(call)),
    )
    constants = {
        **{"H": dims.H, "R": dims.ratio, "P": dims.P, "N": dims.N, "BP": BP},
        **{"BN": block(dims.N), "TRACK": points(call) > 0, **forms(call, tuning)},
    }
    programs = (rows + 1) * dims.H * -(-dims.P // BP)
    return Launch(scan_recurrent, programs, numbers, constants, config.options, call.x.device)


def _plan_chunked(call: ScanCall, tuning: Tuning) -> _Chunked:
    """Every row has chunks and segments of its own, so that the grids follow the tokens."""
    rows, tokens, dims = call.src.shape[0], call.x.shape[0], call.dims
    config = tuning.pick(_table_name("scan.walk", call), rows * dims.H)
    BT = config.blocks["BT"]
    segment = config.blocks.get("SEG", 0) if tokens > config.blocks.get("SEG", 0) else 0
    chunks, parts = tokens // BT + rows + 1, tokens // segment + rows + 1 if segment else rows
    return _Chunked(
        _plan_prepare(call, tuning, chunks, BT),
        _plan_sums(call, tuning, config, parts, BT) if segment else None,
        _plan_walk(call, tuning, config, parts, (BT, segment)),
        torch.bfloat16 if call.x.dtype == torch.bfloat16 else torch.float32,
        (chunks, dims.G, BT, BT),
        (chunks, dims.H, 3, BT),
        (parts, dims.H, dims.P, dims.N),
    )


def _plan_prepare(call: ScanCall, tuning: Tuning, chunks: int, BT: int) -> Launch:
    rows, tokens, dims = call.src.shape[0], call.x.shape[0], call.dims
    config = tuning.pick("scan.prepare", tokens * dims.G)
    _, _, dt_t, b_t, b_g, c_t, c_g, _, _, out_t, out_h = input_strides(call)
    numbers = (rows, tokens, dt_t, b_g, c_g, out_t, out_h, *limits(call))
    found = forms(call, tuning)
    constants = {
        **{"b_t": b_t, "c_t": c_t, "H": dims.H, "R": dims.ratio, "P": dims.P, "N": dims.N},
        **{"BP": block(dims.P), "BN": block(dims.N, 16), "BT": BT},
        **{"BR": min(config.blocks["BR"], block(dims.ratio))},
        **{"DT": found["DT"], "HAS_BIAS": found["HAS_BIAS"], "EXACT": _is_exact(call)},
    }
    programs = chunks * dims.G
    return Launch(scan_prepare, programs, numbers, constants, config.options, call.x.device)


def _plan_sums(call: ScanCall, tuning: Tuning, config: Config, parts: int, BT: int) -> Launch:
    rows, tokens, dims = call.src.shape[0], call.x.shape[0], call.dims
    x_t, x_h, _, b_t, b_g, *_ = input_strides(call)
    s_slot, s_h, s_p, s_n = state_strides(call.state, dims)
    BP = min(config.blocks["BP"], block(dims.P, 16))
    constants = {
        **{"x_t": x_t, "b_t": b_t, "s_p": s_p, "s_n": s_n, "SEG": config.blocks["SEG"]},
        **_products(call, tuning, BP, BT),
    }
    programs, numbers = parts * dims.H * -(-dims.P // BP), (rows, tokens, x_h, b_g, s_slot, s_h)
    return Launch(scan_sums, programs, numbers, constants, config.options, call.x.device)


def _plan_walk(
    call: ScanCall, tuning: Tuning, config: Config, parts: int, cut: tuple[int, int]
) -> Launch:
    rows, tokens, dims = call.src.shape[0], call.x.shape[0], call.dims
    x_t, x_h, _, b_t, b_g, c_t, c_g, z_t, z_h, out_t, out_h = input_strides(call)
    s_slot, s_h, s_p, s_n = state_strides(call.state, dims)
    BP = min(config.blocks["BP"], block(dims.P, 16))
    numbers = (rows, tokens, points(call), x_h, b_g, c_g, z_t, z_h, out_h, s_slot, s_h)
    found = forms(call, tuning)
    constants = {
        **{"x_t": x_t, "b_t": b_t, "c_t": c_t, "out_t": out_t, "s_p": s_p, "s_n": s_n},
        **{**_products(call, tuning, BP, cut[0]), "SEG": cut[1], "TRACK": points(call) > 0},
        "BJ": min(config.blocks.get("BJ", cut[0]), cut[0]),
        **{name: found[name] for name in ("HAS_D", "HAS_Z", "SILU")},
    }
    programs = parts * dims.H * -(-dims.P // BP)
    return Launch(scan_walk, programs, numbers, constants, config.options, call.x.device)


def _products(call: ScanCall, tuning: Tuning, BP: int, BT: int) -> dict[str, object]:
    """Dims, blocks, and how the products of both walking kernels are made.

    Float16 has neither bfloat16's range, which weights and states need, nor less digits than TF32:
    its operands go as float32.
    """
    dims, act = call.dims, call.x.dtype
    return {
        **{"H": dims.H, "R": dims.ratio, "P": dims.P, "N": dims.N, "BP": BP},
        **{"BN": block(dims.N, 16), "BT": BT},
        **{"PRECISION": tuning.solve if act == torch.float16 else "ieee"},
        **{"WIDE": act != torch.bfloat16, "EXACT": _is_exact(call)},
    }


def _table_name(operation: str, call: ScanCall) -> str:
    """The table's name: float32 operands and wide states need twice the registers."""
    act = dtype_name(call.x.dtype)
    split = operation if act == "bfloat16" else f"{operation}.{act}"
    return f"{split}.wide" if call.dims.N > 128 else split


def _is_exact(call: ScanCall) -> bool:
    """Whether float32's digits are to be kept."""
    return call.x.dtype == torch.float32


def _track(call: ScanCall) -> Tensor:
    """The track points; any index tensor stands in for those that are not there."""
    return call.src if call.track is None else call.track
