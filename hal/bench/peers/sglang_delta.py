"""SGLang's kernels of the delta rule: packed decodes, chunks, drafts and their accept."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from hal.bench.entrant import (
    CHANNELS,
    Attempt,
    Outcome,
    bound_of,
    fused_pools_with,
    moved_args,
    pools_with,
    raw_gate,
    ready_gates,
    slotted,
    windowed,
)
from hal.bench.peers import Way
from hal.model.spec import GateKind
from hal.testing.case import Case
from hal.testing.plan import Trial
from hal_registry import load

OPS: Final = "sglang.kernels.ops."
_FLA: Final = f"{OPS}attention.fla."

_LOOSE: Final = "chunked"
"""Limits for a beta, or for inputs, that are rounded to bfloat16 between two steps."""


def _decode(trial: Trial, case: Case, place: torch.device) -> Attempt:
    """A decode on mixed q, k and v, which are put together beforehand; KDA's has its own kernel.

    The other rounds beta to the dtype of its logit.
    """
    args, (pool, slots) = moved_args(case, place), slotted(case, place)
    mixed = torch.cat([args[name].flatten(1) for name in "qkv"], 1)
    out = torch.empty_like(args["v"]).unsqueeze(1)
    run = partial(_packed(case, args, (pool, slots), out), mixed)
    kind = "" if args["a"].ndim == 3 else _LOOSE
    return Attempt(run, lambda got: Outcome(out.squeeze(1), pools_with(case, pool[1:])), kind)


def _packed(
    case: Case, args: Mapping[str, Any], states: tuple[Tensor, Tensor], out: Tensor
) -> partial[Any]:
    """The kernel on everything but mixed q, k and v, which come first."""
    (pool, slots), place = states, out.device
    named: dict[str, Any] = {
        **{"b": args["b"], "scale": pool.shape[-1] ** -0.5, "initial_state": pool},
        **{"ssm_state_indices": slots, "out": out, "use_qk_l2norm_in_kernel": True},
    }
    if args["a"].ndim == 3:
        law, rule = raw_gate(case, place, *CHANNELS), "kda"
        named |= {"a": args["a"].flatten(1), "dt_bias": law.dt_bias.flatten(), **bound_of(law)}
    else:
        law, rule = raw_gate(case, place, GateKind.SCALAR), "gated_delta_rule"
        named |= {"a": args["a"], "dt_bias": law.dt_bias}
    path = f"{_FLA}fused_recurrent:fused_recurrent_{rule}_packed_decode"
    return partial(load(path), **named, A_log=law.A_log)


def _decode_fused(trial: Trial, case: Case, place: torch.device) -> Attempt:
    """Its two kernels in a row; the convolution writes over its input, rounded to its dtype."""
    args, (pool, slots) = moved_args(case, place), slotted(case, place)
    windows = windowed(case, place)
    out = torch.empty(len(slots), 1, *pool.shape[1:3], dtype=case.dtype, device=place)
    update = partial(
        load(f"{OPS}mamba.causal_conv1d_triton:causal_conv1d_update"), args["mixed_qkv"], windows,
        args["conv_weight"], args["conv_bias"], args["activation"], conv_state_indices=slots,
    )  # fmt: skip
    decode = _packed(case, args, (pool, slots), out)

    def read(got: object) -> Outcome:
        return Outcome(out.squeeze(1), fused_pools_with(case, pool[1:], windows[1:]))

    return Attempt(lambda: decode(update()), read, _LOOSE)


def _prefill(trial: Trial, case: Case, place: torch.device) -> Attempt:
    """Chunks in place by slot, on q, k and v that are split and scalar gates that are made.

    KDA's makes its gates; it writes the result over v, which later calls then read.
    """
    args = moved_args(case, place)
    named: dict[str, Any] = {name: args[name].unsqueeze(0) for name in "qkv"}
    if args["a"].ndim == 3:
        law = raw_gate(case, place, *CHANNELS)
        named |= {"g": args["a"].unsqueeze(0), "beta": args["b"].unsqueeze(0)}
        named |= {"A_log": law.A_log.view(1, 1, -1, 1), "dt_bias": law.dt_bias.flatten()}
        named |= {"beta_is_raw": True, **bound_of(law)}
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
    law = raw_gate(case, place, GateKind.SCALAR)
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
    Way("delta_rule.decode_fused", _decode_fused, "two kernels"),
    Way("delta_rule.prefill", _prefill),
    Way("delta_rule.verify", _verify),
)
