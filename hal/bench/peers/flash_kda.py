"""FlashKDA: prompts of Kimi Delta Attention whose gates have a bound, from contiguous states."""

from __future__ import annotations

from functools import partial
from typing import Final

import torch

from hal.bench.entrant import (
    Attempt,
    NotComparable,
    Outcome,
    moved_args,
    pools_with,
    raw_gate,
    slotted,
)
from hal.bench.peers import Peer, Way
from hal.model.spec import GateKind
from hal.testing.case import Case
from hal.testing.plan import Trial
from hal_registry import load

_DIM: Final = 128


def _prefill(trial: Trial, case: Case, place: torch.device) -> Attempt:
    """Gates and norms inside; states are gathered beforehand and new ones are made."""
    law = raw_gate(case, place, GateKind.SAFE)
    args, (pool, _) = moved_args(case, place), slotted(case, place)
    if args["q"].shape != args["v"].shape or args["v"].shape[-1] != _DIM:
        raise NotComparable("it takes as many heads of q as of v, of 128 channels each")
    starts = pool[1:].contiguous()
    ends = torch.empty_like(starts)
    names = {"q": "q", "k": "k", "v": "v", "g": "a", "beta": "b"}
    named = {name: args[own].contiguous().unsqueeze(0) for name, own in names.items()}
    out = torch.empty_like(named["v"])
    run = partial(
        load("flash_kda:fwd"), **named, scale=_DIM**-0.5, out=out, A_log=law.A_log,
        dt_bias=law.dt_bias, lower_bound=law.lower_bound, initial_state=starts, final_state=ends,
        cu_seqlens=args["query_start_loc"].long(),
    )  # fmt: skip
    return Attempt(run, lambda got: Outcome(out.squeeze(0), pools_with(case, ends)))


PEER: Final = Peer(
    "flash_kda",
    "flash_kda",
    ("cuda",),
    (Way("delta_rule.prefill", _prefill, "states gathered before"),),
)
