"""SGLang's kernels of the delta rule: packed decodes, chunks, drafts and their accept."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from hal.bench.entrant import (
    Attempt,
    Outcome,
    moved_args,
    pools_with,
    raw_gate,
    ready_gates,
    slotted,
)
from hal.bench.peers import Way
from hal.model.spec import GateKind
from hal.testing.case import Case
from hal.testing.plan import Trial
from hal_registry import load

OPS: Final = "sglang.kernels.ops."
_FLA: Final = f"{OPS}attention.fla."


def _decode(trial: Trial, case: Case, place: torch.device) -> Attempt:
    """A decode on mixed q, k and v, which are put together beforehand; KDA's has its own kernel."""
    channel = case.args["a"].ndim == 3
    law = raw_gate(case, GateKind.CHANNEL if channel else GateKind.SCALAR, place)
    args, (pool, slots) = moved_args(case, place), slotted(case, place)
    out = torch.empty_like(args["v"]).unsqueeze(1)
    named: dict[str, Any] = {
        **{"mixed_qkv": torch.cat([args[name].flatten(1) for name in "qkv"], 1), "b": args["b"]},
        **{"A_log": law.A_log, "scale": args["q"].shape[-1] ** -0.5, "initial_state": pool},
        **{"ssm_state_indices": slots, "out": out},
    }
    if channel:
        named |= {"a": args["a"].flatten(1), "dt_bias": law.dt_bias.flatten()}
        named |= {"num_q_heads": args["q"].shape[1]}
        path = f"{OPS}attention.kda_packed_decode:kda_packed_decode"
    else:
        named |= {"a": args["a"], "dt_bias": law.dt_bias, "use_qk_l2norm_in_kernel": True}
        path = f"{_FLA}fused_recurrent:fused_recurrent_gated_delta_rule_packed_decode"
    run = partial(load(path), **named)
    return Attempt(run, lambda got: Outcome(out.squeeze(1), pools_with(case, pool[1:])))


def _prefill(trial: Trial, case: Case, place: torch.device) -> Attempt:
    """Chunks in place by slot, on q, k and v that are split and scalar gates that are made.

    KDA's makes its gates; it writes the result over v, which later calls then read.
    """
    args = moved_args(case, place)
    named: dict[str, Any] = {name: args[name].unsqueeze(0) for name in "qkv"}
    if args["a"].ndim == 3:
        law = raw_gate(case, GateKind.CHANNEL, place)
        named |= {"g": args["a"].unsqueeze(0), "beta": args["b"].unsqueeze(0)}
        named |= {"A_log": law.A_log.view(1, 1, -1, 1), "dt_bias": law.dt_bias.flatten()}
        named |= {"beta_is_raw": True}
        path = f"{_FLA}kda:chunk_kda"
    else:
        g, beta = ready_gates(case, place)
        named |= {"g": g.unsqueeze(0), "beta": beta.unsqueeze(0), "head_first": False}
        path = f"{_FLA}chunk:chunk_gated_delta_rule"
    pool, slots = slotted(case, place)
    run = partial(
        load(path), **named, scale=args["q"].shape[-1] ** -0.5, initial_state=pool,
        initial_state_indices=slots, cu_seqlens=args["query_start_loc"],
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return Attempt(run, lambda got: Outcome(_first(got).squeeze(0), pools_with(case, pool[1:])))


def _first(got: Any) -> Tensor:
    """The result, where states of chunks may come with it."""
    result: Tensor = got[0] if isinstance(got, tuple) else got
    return result


def _verify(trial: Trial, case: Case, place: torch.device) -> Attempt:
    """Drafts with the state after each token kept, then the accept step of all of them."""
    law = raw_gate(case, GateKind.SCALAR, place)
    args, (pool, slots) = moved_args(case, place), slotted(case, place)
    rows, steps = len(slots), max(case.rows.lengths)
    order = torch.arange(rows, dtype=torch.int32, device=place)
    last = (args["query_start_loc"].diff() - 1).to(torch.int32)
    kept = torch.zeros(rows, steps, *pool.shape[1:], device=place)
    verify = partial(
        load(f"{OPS}attention.linear.fused_sigmoid_gating_recurrent:"
             "fused_sigmoid_gating_delta_rule_update"),
        **{name: args[name].unsqueeze(0) for name in "qkv"}, a=args["a"], b=args["b"],
        A_log=law.A_log, dt_bias=law.dt_bias, softplus_beta=1.0, softplus_threshold=20.0,
        scale=args["q"].shape[-1] ** -0.5, use_qk_l2norm_in_kernel=True,
        initial_state_source=pool, initial_state_indices=slots, disable_state_update=True,
        cu_seqlens=args["query_start_loc"], intermediate_states_buffer=kept,
        intermediate_state_indices=order, cache_steps=steps,
    )  # fmt: skip
    accept = load(f"{OPS}mamba.mamba_state_scatter_triton:fused_mamba_state_scatter_with_mask")
    commit = partial(accept, pool[None], kept[None], slots, last, order)

    def step() -> Tensor:
        out: Tensor = verify()
        commit()
        return out

    def read(got: Tensor) -> Outcome:
        return Outcome(got.reshape(args["v"].shape), pools_with(case, pool[1:]))

    return Attempt(step, read)


WAYS: Final = (
    Way("delta_rule.decode", _decode),
    Way("delta_rule.prefill", _prefill),
    Way("delta_rule.verify", _verify),
)
