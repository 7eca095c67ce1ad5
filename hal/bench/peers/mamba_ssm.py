"""mamba_ssm in Triton: the state update by slots, and the scan of equal rows."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch

from hal.bench.entrant import (
    Attempt,
    NotComparable,
    Outcome,
    batched,
    moved_args,
    pools_with,
    slotted,
)
from hal.bench.peers import Peer, Way
from hal.testing.case import Case
from hal.testing.plan import Trial
from hal_registry import load


def hold_to_mamba2(case: Case, what: str) -> None:
    """Refuse a scan that is not Mamba-2's, or one with z."""
    if case.args["x"].ndim != 3 or case.args["z"] is not None or case.args["dt"] is None:
        raise NotComparable(f"its {what} is Mamba-2's without z here")


def state_update(
    path: str,
    trial: Trial,
    case: Case,
    place: torch.device,
    *,
    given: bool = False,
    one_dtype: bool = False,
    **more: Any,
) -> Attempt:
    """The update that several libraries have with the same names; `given` passes a result.

    With `one_dtype` dt is widened beforehand to the dtype of D and dt_bias.
    """
    hold_to_mamba2(case, "update")
    args, (pool, slots) = moved_args(case, place), slotted(case, place)
    heads, P, N = pool.shape[1:]
    args["dt"] = args["dt"].to(args["D"].dtype) if one_dtype else args["dt"]
    wide = {name: args[name].unsqueeze(-1).expand(*args[name].shape, P)
            for name in ("dt", "D", "dt_bias")}  # fmt: skip
    out = {"out": torch.empty_like(args["x"])} if given else {}
    run = partial(
        load(path), state=pool, x=args["x"], B=args["B"], C=args["C"], z=None, dt_softplus=True,
        A=args["A"].view(heads, 1, 1).expand(heads, P, N), state_batch_indices=slots, **wide,
        **out, **more,
    )  # fmt: skip
    return Attempt(run, lambda got: Outcome(out.get("out", got), pools_with(case, pool[1:])))


def _ssd(trial: Trial, case: Case, place: torch.device) -> Attempt:
    """A batch of equal rows from states gathered beforehand; its packed form takes none."""
    hold_to_mamba2(case, "scan")
    args, (pool, _) = moved_args(case, place), slotted(case, place)
    named = batched(case, place, "x dt B C")
    run = partial(
        load("mamba_ssm.ops.triton.ssd_combined:mamba_chunk_scan_combined"), **named, A=args["A"],
        D=args["D"], dt_bias=args["dt_bias"], chunk_size=256, initial_states=pool[1:].contiguous(),
        dt_softplus=True, return_final_states=True,
    )  # fmt: skip
    return Attempt(run, lambda got: Outcome(got[0].flatten(0, 1), pools_with(case, got[1])))


PEER: Final = Peer(
    "mamba_ssm",
    "mamba-ssm",
    ("cuda",),
    (
        Way("scan.prefill", _ssd, "equal rows", equal=True),
        Way(
            "scan.decode",
            partial(
                state_update, "mamba_ssm.ops.triton.selective_state_update:selective_state_update"
            ),
        ),
    ),
)
