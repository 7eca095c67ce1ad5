"""flash-linear-attention: contiguous states in, new states out, gates inside the kernels."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch

from hal.bench.entrant import (
    CHANNELS,
    Attempt,
    NotComparable,
    Outcome,
    bound_of,
    moved_args,
    pools_with,
    raw_gate,
    starting,
)
from hal.bench.peers import Peer, Way
from hal.model.spec import GateKind
from hal.testing.case import Case
from hal.testing.plan import Trial
from hal_registry import load

_GATES: Final = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


def _delta(trial: Trial, case: Case, place: torch.device) -> Attempt:
    """A decode is a batch of rows of one token; a prompt is packed with its bounds."""
    channel = case.args["a"].ndim == 3
    law = raw_gate(case, place, *(CHANNELS if channel else (GateKind.SCALAR,)))
    args, states = moved_args(case, place), starting(case)
    axis = 1 if trial.decode else 0
    named: dict[str, Any] = {name: args[name].unsqueeze(axis) for name in "qkv"}
    named |= {"g": args["a"].unsqueeze(axis), "beta": args["b"].unsqueeze(axis), **_GATES}
    named |= {"A_log": law.A_log, "dt_bias": law.dt_bias.flatten()}
    named |= {"scale": args["q"].shape[-1] ** -0.5, **bound_of(law)}
    if states is not None:
        named["initial_state"] = states.contiguous().to(place)
    if not trial.decode:
        bounds = args["query_start_loc"].long()
        named |= {"cu_seqlens": bounds, "cu_seqlens_cpu": bounds.cpu()}
        named |= {"safe_gate": True} if law.kind is GateKind.SAFE else {}
    form = "fused_recurrent" if trial.decode else "chunk"
    path = f"kda:{form}_kda" if channel else f"gated_delta_rule:{form}_gated_delta_rule"
    run = partial(load(f"fla.ops.{path}"), **named, output_final_state=True, state_v_first=True,
                  use_qk_l2norm_in_kernel=True)  # fmt: skip
    return Attempt(run, lambda got: Outcome(got[0].squeeze(axis), pools_with(case, got[1])))


def _conv(trial: Trial, case: Case, place: torch.device) -> Attempt:
    """Its state holds W inputs, the oldest of which no tap reads."""
    windows = starting(case)
    if windows is None:
        raise NotComparable("its rows continue from states")
    held = torch.cat((torch.zeros_like(windows[..., :1]), windows), -1).to(place)
    args = moved_args(case, place)
    update = load("fla.modules.causal_conv1d:causal_conv1d_update")
    run = partial(update, args["x"], held, weight=args["weight"],
                  activation=case.options["activation"])  # fmt: skip
    return Attempt(run, lambda got: Outcome(got[0], pools_with(case, held[..., 1:])))


PEER: Final = Peer(
    "fla",
    "fla-core",
    ("cuda",),
    (
        Way("delta_rule.decode", _delta),
        Way("delta_rule.prefill", _delta),
        Way("conv.decode", _conv),
    ),
)
