"""SGLang's kernels: the delta rule, the Triton convolution, LFM2's and Mamba-2's operations."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Final

import torch

from hal.bench.entrant import Attempt, Outcome, moved_args, pools_with, slotted
from hal.bench.peers import Peer, Way
from hal.bench.peers.mamba_ssm import hold_to_mamba2, state_update
from hal.bench.peers.sglang_delta import OPS, WAYS
from hal.testing.case import Case
from hal.testing.plan import Trial
from hal_registry import load


def _conv_decode(trial: Trial, case: Case, place: torch.device) -> Attempt:
    args, (pool, slots) = moved_args(case, place), slotted(case, place)
    update = load(f"{OPS}mamba.causal_conv1d_triton:causal_conv1d_update")
    run = partial(update, args["x"], pool, args["weight"], args["bias"],
                  case.options["activation"], conv_state_indices=slots)  # fmt: skip
    return Attempt(run, lambda got: Outcome(got, pools_with(case, pool[1:])))


def _conv_prefill(trial: Trial, case: Case, place: torch.device) -> Attempt:
    """Channels first: a view of the packed tokens."""
    args, (pool, slots) = moved_args(case, place), slotted(case, place)
    has = torch.ones(len(slots), dtype=torch.bool, device=place)
    function = load(f"{OPS}mamba.causal_conv1d_triton:causal_conv1d_fn")
    run = partial(
        function, args["x"].t(), args["weight"], args["bias"], pool, args["query_start_loc"],
        list(case.rows.lengths), activation=case.options["activation"], cache_indices=slots,
        has_initial_state=has,
    )  # fmt: skip
    return Attempt(run, lambda got: Outcome(got.t(), pools_with(case, pool[1:])))


def _short(trial: Trial, case: Case, place: torch.device) -> Attempt:
    """LFM2's whole short convolution; its gates are slices of one projection there."""
    args, (pool, slots) = moved_args(case, place), slotted(case, place)
    gates = torch.cat([args[name] for name in ("B", "C", "x")], 1).chunk(3, 1)
    path = f"{OPS}mamba.lfm_short_conv:fused_lfm_short_conv_"
    if trial.decode:
        run = partial(load(path + "decode"), *gates, args["weight"], pool, slots)
    else:
        has = torch.ones(len(slots), dtype=torch.bool, device=place)
        run = partial(load(path + "prefill"), *gates, args["weight"], pool,
                      args["query_start_loc"], slots, has, args["max_len"])  # fmt: skip
    return Attempt(run, lambda got: Outcome(got, pools_with(case, pool[1:])))


def _ssd(trial: Trial, case: Case, place: torch.device) -> Attempt:
    """Packed rows from states that are gathered beforehand; chunks are cut where a row begins."""
    hold_to_mamba2(case, "scan")
    args, (pool, slots) = moved_args(case, place), slotted(case, place)
    bounds = args["query_start_loc"]
    named = {name: args[name].unsqueeze(0) for name in ("x", "dt", "B", "C")}
    order = torch.arange(len(slots), dtype=torch.int32, device=place)
    pieces = _pieces(case, _CHUNK).to(place)
    out = torch.empty_like(named["x"])
    run = partial(
        load(f"{OPS}mamba.triton_ops.ssd_combined:mamba_chunk_scan_combined"), **named,
        A=args["A"], D=args["D"], dt_bias=args["dt_bias"], z=None, chunk_size=_CHUNK,
        seq_idx=order.repeat_interleave(bounds.diff()).unsqueeze(0), cu_seqlens=bounds,
        chunk_indices=pieces[0], chunk_offsets=pieces[1], initial_states=pool[1:].contiguous(),
        dt_softplus=True, return_final_states=False, return_varlen_states=True, out=out,
        state_dtype=pool.dtype,
    )  # fmt: skip
    return Attempt(run, lambda got: Outcome(out.squeeze(0), pools_with(case, got)))


_CHUNK: Final = 256


def _pieces(case: Case, size: int) -> torch.Tensor:
    """Chunks of the packed tokens and offsets in them, `[2, P]`, cut where a row begins."""
    begins = [0, *accumulate(case.rows.lengths)]
    starts = sorted({*range(0, begins[-1], size), *begins[:-1]})
    return (
        torch.tensor([divmod(start, size) for start in starts], dtype=torch.int32).t().contiguous()
    )


PEER: Final = Peer(
    "sglang",
    "sglang",
    ("cuda",),
    (
        *WAYS,
        Way("conv.decode", _conv_decode),
        Way("conv.prefill", _conv_prefill),
        Way("short_conv.decode", _short),
        Way("short_conv.prefill", _short),
        Way("scan.prefill", _ssd, "states gathered before"),
        Way(
            "scan.decode",
            partial(
                state_update,
                f"{OPS}mamba.triton_ops.mamba_ssm:selective_state_update",
                given=True,
            ),
        ),
    ),
)
