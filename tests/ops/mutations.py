"""Wrong operators, each a right one with one mistake; a kit that passes any of them is blind.

A mutation takes the right call and returns a wrong one of the same arguments, whatever the
provider, in layouts "VK" and "CW".
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from support.ops import Call

Mutation = Callable[[Call], Call]
Args = dict[str, Any]


def _with(change: Callable[[Args], Args]) -> Mutation:
    """A mistake in what the operation is shown."""

    def mutate(call: Call) -> Call:
        return lambda **args: call(**{**args, **change(args)})

    return mutate


def _then(change: Callable[[Args, Tensor], Tensor]) -> Mutation:
    """A mistake in what is left behind."""

    def mutate(call: Call) -> Call:
        return lambda **args: change(args, call(**args))

    return mutate


def _none(index: Tensor) -> Tensor:
    return torch.full_like(index, -1)


def _stale(args: Args) -> Args:
    return {"src": torch.where(args["src"] < 0, args["dst"], args["src"])}


def _zeroed_by_product(args: Args) -> Args:
    fresh = args["dst"][(args["src"] < 0) & (args["dst"] >= 0)].tolist()
    args["state"][fresh] *= 0
    return _stale(args)


def _lengths(args: Args) -> list[int]:
    bounds = args.get("query_start_loc")
    return [1] * len(args["src"]) if bounds is None else bounds.diff().tolist()


def _pad_writes_last_slot(args: Args, result: Tensor) -> Tensor:
    for src, dst in zip(args["src"].tolist(), args["dst"].tolist(), strict=True):
        if src < 0 and dst < 0:
            args["state"][dst] = 0
    return result


def _empty_row_clears_its_slot(args: Args, result: Tensor) -> Tensor:
    for length, dst in zip(_lengths(args), args["dst"].tolist(), strict=True):
        if length == 0 and dst >= 0:
            args["state"][dst] = 0
    return result


def _fork_writes_its_source(args: Args, result: Tensor) -> Tensor:
    slots = zip(_lengths(args), args["src"].tolist(), args["dst"].tolist(), strict=True)
    for length, src, dst in slots:
        if length and src >= 0 and dst >= 0:
            args["state"][src] = args["state"][dst]
    return result


def _pads_keep_garbage(args: Args, result: Tensor) -> Tensor:
    bounds = args.get("query_start_loc")
    if bounds is None:
        result[(args["src"] < 0) & (args["dst"] < 0)] = float("nan")
    else:
        result[int(bounds[-1]) :] = float("nan")
    return result


def _short_window_off_by_one(args: Args, result: Tensor) -> Tensor:
    for length, dst in zip(_lengths(args), args["dst"].tolist(), strict=True):
        if 0 < length < args["state"].shape[-1] and dst >= 0:
            args["state"][dst] = args["state"][dst].roll(1, -1)
    return result


def _last_row_dropped(args: Args) -> Args:
    return {"dst": torch.cat((args["dst"][:-1], args["dst"].new_full((1,), -1)))}


def _norm(x: Tensor, scale: float = 1.0) -> Tensor:
    x = x.float()
    return x / ((x * x).sum(-1, keepdim=True).sqrt() + 1e-6) * scale


def _eps_outside(args: Args) -> Args:
    dtype = args["q"].dtype
    return {"q": _norm(args["q"]).to(dtype), "k": _norm(args["k"]).to(dtype), "qk_l2norm": False}


def _wrong_head_map(args: Args) -> Args:
    heads = torch.arange(args["v"].shape[1]) % args["q"].shape[1]
    return {"q": args["q"][:, heads], "k": args["k"][:, heads]}


def _beta_not_doubled(args: Args) -> Args:
    return {"gate": replace(args["gate"], beta_scale=1.0)}


def _clamped_softplus_for_safe(args: Args) -> Args:
    gate, a = args["gate"], args["a"].float()
    rate = gate.A_log.exp().unsqueeze(-1)
    g = (-rate * torch.nn.functional.softplus(a + gate.dt_bias)).clamp(min=gate.lower_bound)
    return {"a": g, "b": gate.beta_scale * args["b"].float().sigmoid(), "gate": None}


def _transposed(call: Call) -> Call:
    """Reads and writes the other layout's bytes."""

    def wrong(**args: Any) -> Tensor:
        state = args["state"]
        turned = state.transpose(-1, -2).reshape(state.shape).contiguous()
        result = call(**{**args, "state": turned})
        flipped = turned.view(*state.shape[:2], state.shape[3], state.shape[2]).transpose(-1, -2)
        for slot in set(args["dst"].tolist()) - {-1}:
            state[slot] = flipped[slot]
        return result

    return wrong


def naive(*, late_decay: bool = False, old_state: bool = False, base_two: bool = False) -> Mutation:
    """A plain float32 loop for ready gates in place of the call, with the asked mistake."""

    def token(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
        fall = (torch.exp2 if base_two else torch.exp)(g).view(-1, 1, 1)
        seen = S if late_decay else S * fall
        u = beta.unsqueeze(-1) * (v - (seen * k.unsqueeze(1)).sum(-1))
        new = S * fall + u.unsqueeze(-1) * k.unsqueeze(1)
        return new, ((S * fall if old_state else new) * q.unsqueeze(1)).sum(-1)

    def run(**args: Any) -> Tensor:
        q, k, v = args["q"], args["k"], args["v"]
        ratio = v.shape[1] // q.shape[1]
        q, k = (_norm(x).repeat_interleave(ratio, 1) for x in (q, k))
        result, bounds = torch.zeros_like(v), args["query_start_loc"].tolist()
        for i, (src, dst) in enumerate(zip(args["src"], args["dst"], strict=True)):
            S = args["state"][src].clone() if src >= 0 else torch.zeros_like(args["state"][0])
            for t in range(bounds[i], bounds[i + 1]):
                ins = (q[t] * q.shape[-1] ** -0.5, k[t], v[t].float(), args["a"][t], args["b"][t])
                S, result[t] = token(S, *ins)
            if dst >= 0 and bounds[i + 1] > bounds[i]:
                args["state"][dst] = S
        return result

    return lambda call: run


COMMON: Final[dict[str, Mutation]] = {
    "start state ignored": _with(lambda args: {"src": _none(args["src"])}),
    "stale start state": _with(_stale),
    "fresh rows zeroed by a product": _with(_zeroed_by_product),
    "end state of the last row dropped": _with(_last_row_dropped),
    "fork writes its source": _then(_fork_writes_its_source),
    "pads keep garbage": _then(_pads_keep_garbage),
}
"""Mistakes of any operation with the row rule."""

PACKED: Final[dict[str, Mutation]] = {
    "row without tokens clears its slot": _then(_empty_row_clears_its_slot)
}
"""Mistakes of operations with `query_start_loc`."""

TOKENS: Final[dict[str, Mutation]] = {"pad writes the last slot": _then(_pad_writes_last_slot)}
"""Mistakes of decode."""

CONV: Final[dict[str, Mutation]] = {
    "taps reversed": _with(lambda args: {"weight": args["weight"].flip(1)}),
    "bias ignored": _with(lambda args: {"bias": None}),
    "activation ignored": _with(lambda args: {"activation": None}),
    "window off by one in short rows": _then(_short_window_off_by_one),
}
"""Mistakes of a convolution with bias and activation."""

DELTA: Final[dict[str, Mutation]] = {
    "state transposed": _transposed,
    "scale missing": _then(lambda args, result: result.mul_(args["q"].shape[-1] ** 0.5)),
    "head map h % H": _with(_wrong_head_map),
    "norm missing": _with(lambda args: {"qk_l2norm": False}),
    "keys and queries swapped": _with(lambda args: {"q": args["k"], "k": args["q"]}),
}
"""Mistakes of a delta rule with several key heads and K != V."""

READY: Final[dict[str, Mutation]] = {
    "decay after the read": naive(late_decay=True),
    "output reads the old state": naive(old_state=True),
    "exp2 for exp": naive(base_two=True),
    "ready gate gated again": _with(lambda args: {"b": args["b"].sigmoid()}),
}
"""Mistakes that ready gates show."""

SCALED: Final[dict[str, Mutation]] = {"eps outside the root": _with(_eps_outside)}
"""Mistakes that inputs scaled by 1e-4 show."""

DOUBLED: Final[dict[str, Mutation]] = {"beta not doubled": _with(_beta_not_doubled)}
"""Mistakes that beta_scale 2 shows."""

SAFE: Final[dict[str, Mutation]] = {"safe gate as clamped": _with(_clamped_softplus_for_safe)}
"""Mistakes that the safe gate shows."""


def _groups_interleaved(args: Args) -> Args:
    """Head h reads group h % G."""
    heads, groups = args["x"].shape[1], args["B"].shape[1]
    order = torch.arange(heads) % groups
    return {"B": args["B"][:, order], "C": args["C"][:, order]}


UNLIMITED: Final = (0.0, float("inf"))

SCAN: Final[dict[str, Mutation]] = {
    "group map h % G": _with(_groups_interleaved),
    "D dropped": _with(lambda args: {"D": None}),
    "dt_bias dropped": _with(lambda args: {"dt_bias": None}),
    "z ignored": _with(lambda args: {"z": None}),
    "z gated twice": _then(
        lambda args, result: result.mul_(torch.nn.functional.silu(args["z"]))
    ),
    "dt clamp dropped": _with(lambda args: {"dt_limit": UNLIMITED}),
    "lower limit dropped": _with(lambda args: {"dt_limit": (0.0, args["dt_limit"][1])}),
    "softplus dropped": _with(lambda args: {"dt_softplus": False}),
    "A without its sign": _with(lambda args: {"A": -args["A"]}),
    "B and C swapped": _with(lambda args: {"B": args["C"], "C": args["B"]}),
    "dt in act": _with(lambda args: {"dt": (args["dt"] + args["dt_bias"]).bfloat16(),
                                     "dt_bias": None}),
}  # fmt: skip
"""Mistakes of a scan with z, D, bias, limits that bind, and several groups."""
