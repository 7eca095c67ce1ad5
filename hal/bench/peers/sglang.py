"""SGLang's kernels: the packed decode, the Triton convolution, LFM2's and Mamba-2's steps."""

from __future__ import annotations

from functools import partial
from typing import Final

import torch

from hal.bench.entrant import Attempt, Outcome, moved_args, pools_with, raw_gate, slotted
from hal.bench.peers import Peer, Way
from hal.bench.peers.mamba_ssm import state_update
from hal.model.spec import GateKind
from hal.testing.case import Case
from hal.testing.plan import Trial
from hal_registry import load

_OPS: Final = "sglang.kernels.ops."


def _decode(trial: Trial, case: Case, place: torch.device) -> Attempt:
    """The decode on mixed q, k and v, which are put together beforehand."""
    law = raw_gate(case, GateKind.SCALAR, place)
    args, (pool, slots) = moved_args(case, place), slotted(case, place)
    mixed = torch.cat([args[name].flatten(1) for name in "qkv"], 1)
    out = torch.empty_like(args["v"]).unsqueeze(1)
    name = "fused_recurrent_gated_delta_rule_packed_decode"
    run = partial(
        load(f"{_OPS}attention.fla.fused_recurrent:{name}"), mixed_qkv=mixed, a=args["a"],
        b=args["b"], A_log=law.A_log, dt_bias=law.dt_bias, scale=args["q"].shape[-1] ** -0.5,
        use_qk_l2norm_in_kernel=True, initial_state=pool, ssm_state_indices=slots, out=out,
    )  # fmt: skip
    return Attempt(run, lambda got: Outcome(out.squeeze(1), pools_with(case, pool[1:])))


def _conv_decode(trial: Trial, case: Case, place: torch.device) -> Attempt:
    args, (pool, slots) = moved_args(case, place), slotted(case, place)
    update = load(f"{_OPS}mamba.causal_conv1d_triton:causal_conv1d_update")
    run = partial(update, args["x"], pool, args["weight"], args["bias"],
                  case.options["activation"], conv_state_indices=slots)  # fmt: skip
    return Attempt(run, lambda got: Outcome(got, pools_with(case, pool[1:])))


def _conv_prefill(trial: Trial, case: Case, place: torch.device) -> Attempt:
    """Channels first: a view of the packed tokens."""
    args, (pool, slots) = moved_args(case, place), slotted(case, place)
    has = torch.ones(len(slots), dtype=torch.bool, device=place)
    function = load(f"{_OPS}mamba.causal_conv1d_triton:causal_conv1d_fn")
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
    path = f"{_OPS}mamba.lfm_short_conv:fused_lfm_short_conv_"
    if trial.decode:
        run = partial(load(path + "decode"), *gates, args["weight"], pool, slots)
    else:
        has = torch.ones(len(slots), dtype=torch.bool, device=place)
        run = partial(load(path + "prefill"), *gates, args["weight"], pool,
                      args["query_start_loc"], slots, has, args["max_len"])  # fmt: skip
    return Attempt(run, lambda got: Outcome(got, pools_with(case, pool[1:])))


PEER: Final = Peer(
    "sglang",
    "sglang",
    ("cuda",),
    (
        Way("delta_rule.decode", _decode),
        Way("conv.decode", _conv_decode),
        Way("conv.prefill", _conv_prefill),
        Way("short_conv.decode", _short),
        Way("short_conv.prefill", _short),
        Way(
            "scan.decode",
            partial(
                state_update,
                f"{_OPS}mamba.triton_ops.mamba_ssm:selective_state_update",
                given=True,
            ),
        ),
    ),
)
