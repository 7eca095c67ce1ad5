"""The torch functions of Hugging Face transformers: dense states, batches of equal rows."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from hal.bench.entrant import (
    Attempt,
    NotComparable,
    Outcome,
    batched,
    moved_args,
    pools_with,
    rows_of,
    starting,
)
from hal.bench.peers import Peer, Way
from hal.testing.case import Case
from hal.testing.plan import Trial

_MODELS: Final = "transformers.models."


def _plain(module: str, name: str) -> Callable[..., Any]:
    """A function of a model without what may replace it by a kernel of the hub."""
    there = importlib.import_module(f"{_MODELS}{module}.modeling_{module}")
    found: Callable[..., Any] = inspect.unwrap(getattr(there, name))
    return found


def _states(case: Case, place: torch.device) -> Tensor:
    """The starting states on the device, zeros where all rows are fresh."""
    states = starting(case)
    pool = case.args["state"]
    shape = (len(case.rows.src), *pool.shape[1:])
    return (torch.zeros(shape, dtype=pool.dtype) if states is None else states).to(place)


def _packed(result: Tensor, case: Case) -> Tensor:
    """`[B, T, ...]` as packed tokens."""
    return result.reshape(-1, *result.shape[2:]) if not case.decode else result.flatten(0, 1)


def _delta(trial: Trial, case: Case, place: torch.device, *, chunk: int = 0) -> Attempt:
    """A delta rule whose gate is ready; `chunk` is the one of the chunked form."""
    if case.args["gate"] is not None:
        raise NotComparable("takes gates that are ready")
    channel = case.args["a"].ndim == 3
    if chunk and not channel:
        raise NotComparable("64 is its best chunk of a scalar gate")
    given = batched(case, place, "q k v a b")
    form = "recurrent" if trial.decode else "chunk"
    if channel:
        function = _plain("kimi_linear", f"{form}_kimi_delta_attention")
    else:
        function = _plain("qwen3_next", f"torch_{form}_gated_delta_rule")
    start = _states(case, place).transpose(-1, -2).contiguous()  # [B, HV, K, V] there
    options: dict[str, Any] = {"chunk_size": chunk} if chunk else {}
    run = partial(function, *given.values(), initial_state=start, output_final_state=True,
                  use_qk_l2norm_in_kernel=True, **options)  # fmt: skip
    return Attempt(
        run,
        lambda got: Outcome(_packed(got[0], case), pools_with(case, got[1].transpose(-1, -2))),
    )


def _conv_decode(trial: Trial, case: Case, place: torch.device) -> Attempt:
    """Its state holds W inputs, the oldest of which no tap reads."""
    args, windows = moved_args(case, place), _states(case, place)
    held = torch.cat((torch.zeros_like(windows[..., :1]), windows), -1)
    x, activation = args["x"].unsqueeze(-1), case.options["activation"]
    update = _plain("qwen3_next", "causal_conv1d_update")
    run = partial(update, x, held, args["weight"], args["bias"], activation)
    return Attempt(run, lambda got: Outcome(got.squeeze(-1), pools_with(case, held[..., 1:])))


def _conv_prefill(trial: Trial, case: Case, place: torch.device) -> Attempt:
    """It starts from nothing and leaves no window."""
    if starting(case) is not None:
        raise NotComparable("its prompt starts from nothing")
    rows_of(case)
    args = moved_args(case, place)
    x = batched(case, place, "x")["x"].transpose(1, 2).contiguous()
    function = _plain("qwen3_next", "causal_conv1d_fn")
    run = partial(function, x, args["weight"], args["bias"], case.options["activation"])
    return Attempt(run, lambda got: Outcome(_packed(got.transpose(1, 2), case), None))


def _kind(case: Case) -> str:
    """Of a scan, by what it is given."""
    return "mamba1" if case.args["x"].ndim == 2 else "mamba2" if "dt" in case.args else ""


def _scan_decode(trial: Trial, case: Case, place: torch.device) -> Attempt:
    """Mamba-2's state update, with dt, D and its bias spread over a head."""
    if _kind(case) != "mamba2" or case.args["z"] is not None:
        raise NotComparable("its update is Mamba-2's without z")
    args, held = moved_args(case, place), _states(case, place)
    heads, P, N = held.shape[1:]
    wide = {name: args[name].unsqueeze(-1).expand(*args[name].shape, P)
            for name in ("dt", "D", "dt_bias")}  # fmt: skip
    rate = args["A"].view(heads, 1, 1).expand(heads, P, N)
    update = _plain("bamba", "mamba2_selective_state_update")
    run = partial(update, held, args["x"], wide["dt"], rate, args["B"], args["C"], wide["D"],
                  z=None, dt_bias=wide["dt_bias"], dt_softplus=True)  # fmt: skip
    return Attempt(run, lambda got: Outcome(got, pools_with(case, held)))


def _scan_prefill(trial: Trial, case: Case, place: torch.device, *, chunk: int = 256) -> Attempt:
    """Mamba-2 in chunks, or Mamba-1 token by token."""
    if _kind(case) == "mamba1":
        return _mamba1(case, place, chunk)
    if case.args["z"] is not None:
        raise NotComparable("its scan of Mamba-2 takes no z")
    args, given = moved_args(case, place), batched(case, place, "x dt B C")
    function = _plain("bamba", "mamba2_chunk_scan")
    run = partial(
        function, given["x"], given["dt"], args["A"], given["B"], given["C"], chunk_size=chunk,
        D=args["D"], dt_bias=args["dt_bias"], dt_softplus=True, return_final_states=True,
        initial_states=_states(case, place),
    )  # fmt: skip
    return Attempt(run, lambda got: Outcome(_packed(got[0], case), pools_with(case, got[1])))


def _mamba1(case: Case, place: torch.device, chunk: int) -> Attempt:
    if starting(case) is not None:
        raise NotComparable("its prompt starts from nothing")
    if chunk != 256:
        raise NotComparable("its scan of Mamba-1 has no chunks")
    args, given = moved_args(case, place), batched(case, place, "x dt B C z")
    flat = {name: value.flatten(2).transpose(1, 2).contiguous() for name, value in given.items()}
    function = _plain("mamba", "mamba_selective_scan")
    run = partial(
        function, flat["x"], flat["dt"], args["A"], flat["B"], flat["C"], args["D"], z=flat["z"],
        delta_bias=args["dt_bias"], delta_softplus=True, return_last_state=True,
    )  # fmt: skip
    return Attempt(
        run, lambda got: Outcome(_packed(got[0].transpose(1, 2), case), pools_with(case, got[1]))
    )


PEER: Final = Peer(
    "transformers",
    "transformers",
    ("cpu", "cuda", "rocm"),
    (
        Way("delta_rule.decode", _delta),
        Way("delta_rule.prefill", _delta),
        Way("delta_rule.prefill", partial(_delta, chunk=16), "chunk 16"),
        Way("conv.decode", _conv_decode),
        Way("conv.prefill", _conv_prefill),
        Way("scan.decode", _scan_decode),
        Way("scan.prefill", _scan_prefill),
        Way("scan.prefill", partial(_scan_prefill, chunk=64), "chunk 64"),
    ),
)
