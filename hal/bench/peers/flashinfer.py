"""FlashInfer: the gated delta rule on split q, k and v, and Mamba-2's state update."""

from __future__ import annotations

from functools import partial
from typing import Final

import torch

from hal.bench.entrant import (
    Attempt,
    Outcome,
    moved_args,
    pools_with,
    raw_gate,
    ready_gates,
    slotted,
)
from hal.bench.peers import Peer, Way
from hal.bench.peers.mamba_ssm import state_update
from hal.model.spec import GateKind
from hal.testing.case import Case
from hal.testing.plan import Trial
from hal_registry import load


def _decode(trial: Trial, case: Case, place: torch.device) -> Attempt:
    """Float32 states by slot, in the layout of `hal`'s "VK"."""
    law = raw_gate(case, place, GateKind.SCALAR)
    args, (pool, slots) = moved_args(case, place), slotted(case, place)
    named = {name: args[name].unsqueeze(1) for name in ("q", "k", "v", "a", "b")}
    out = torch.empty_like(named["v"])
    run = partial(
        load("flashinfer.gdn_decode:gated_delta_rule_decode_pretranspose"), **named, state=None,
        A_log=law.A_log, dt_bias=law.dt_bias, scale=args["q"].shape[-1] ** -0.5, output=out,
        use_qk_l2norm=True, initial_state=pool, initial_state_indices=slots,
    )  # fmt: skip
    return Attempt(run, lambda got: Outcome(out.squeeze(1), pools_with(case, pool[1:])))


def _prefill(trial: Trial, case: Case, place: torch.device) -> Attempt:
    """The core alone, cut as it likes: q, k and v are split, and alpha and beta made, before."""
    args, (pool, slots) = moved_args(case, place), slotted(case, place)
    decay, beta = ready_gates(case, place)
    out = torch.empty_like(args["v"])
    run = partial(
        load("flashinfer.gdn_prefill:chunk_gated_delta_rule"),
        **{name: args[name].contiguous() for name in "qkv"}, g=decay.exp(), beta=beta,
        scale=args["q"].shape[-1] ** -0.5, initial_state=pool, output_state=pool,
        state_indices=slots, output_final_state=True, cu_seqlens=args["query_start_loc"].long(),
        use_qk_l2norm_in_kernel=True, output=out, max_seqlen=args["max_len"], use_cp="auto",
    )  # fmt: skip
    return Attempt(run, lambda got: Outcome(out, pools_with(case, pool[1:])))


PEER: Final = Peer(
    "flashinfer",
    "flashinfer-python",
    ("cuda",),
    (
        Way("delta_rule.decode", _decode),
        Way("delta_rule.prefill", _prefill, "q, k, v and gates made before"),
        Way(
            "scan.decode",
            partial(
                state_update,
                "flashinfer.mamba.selective_state_update:selective_state_update",
                given=True,
                one_dtype=True,
                algorithm="auto",
            ),
        ),
    ),
)
