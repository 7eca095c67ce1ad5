"""Verify and commit: every draft token is the end of a path that is run as a row of its own.

Here verify leaves its scratch as a result: `ends`, a list with the whole slot after every token, in
float64 (None for pads). It takes no `scratch` and gives `(result, ends)`; `commit` takes the list
and gives the pool.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hal.interfaces import Gate
from hal.reference.conv import conv_prefill
from hal.reference.delta_rule import delta_rule_prefill
from hal.reference.scan import scan_prefill

Ends = list[Tensor | None]
Prefill = Callable[..., tuple[Tensor, Tensor]]


def path_to(parents: Sequence[int] | None, token: int) -> list[int]:
    """The row-relative tokens from a root to `token`; without parents all before it."""
    if parents is None:
        return list(range(token + 1))
    path = [token]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def _replay(
    prefill: Prefill,
    tokens: Mapping[str, Tensor | None],
    like: Tensor,
    state: Tensor,
    src: Tensor,
    start: Tensor | None,
    query_start_loc: Tensor,
    parents: Tensor | None,
) -> tuple[Tensor, Ends]:
    """Run the path to every token as a fork of `src` into a blank slot."""
    result = torch.zeros(like.shape, dtype=torch.float64)
    ends: Ends = [None] * like.shape[0]
    given = None if parents is None else parents.tolist()
    for row, (begin, end) in enumerate(pairwise(query_start_loc.tolist())):
        slot = int(src[row])
        pool = torch.stack((state[max(slot, 0)], torch.zeros_like(state[0])))
        for token in range(end - begin):
            path = path_to(None if given is None else given[begin:end], token)
            places = torch.tensor(path) + begin
            out, new = prefill(
                **{name: None if t is None else t[places] for name, t in tokens.items()},
                **({} if start is None else {"start": start[row : row + 1]}),
                state=pool,
                src=torch.tensor([min(slot, 0)]),
                dst=torch.tensor([1]),
                query_start_loc=torch.tensor([0, len(path)]),
                max_len=len(path),
            )
            result[begin + token], ends[begin + token] = out[-1], new[1]
    return result, ends


def conv_verify(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    src: Tensor,
    start: Tensor,
    query_start_loc: Tensor,
    max_len: int,
    *,
    parents: Tensor | None = None,
    activation: str | None = None,
    layout: str = "CW",
) -> tuple[Tensor, Ends]:
    """Convolve each token over the window of its path, `[T, C]`; a ring's free row ends as 0."""

    def prefill(**args: Any) -> tuple[Tensor, Tensor]:
        return conv_prefill(weight=weight, bias=bias, activation=activation, layout=layout, **args)

    return _replay(prefill, {"x": x}, x, state, src, start, query_start_loc, parents)


def delta_rule_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gate: Gate | None,
    state: Tensor,
    src: Tensor,
    query_start_loc: Tensor,
    max_len: int,
    *,
    parents: Tensor | None = None,
    qk_l2norm: bool = True,
    layout: str = "VK",
) -> tuple[Tensor, Ends]:
    """Run each token from the state after its parent, `[T, HV, V]`."""

    def prefill(**args: Any) -> tuple[Tensor, Tensor]:
        return delta_rule_prefill(gate=gate, qk_l2norm=qk_l2norm, layout=layout, **args)

    tokens = {"q": q, "k": k, "v": v, "a": a, "b": b}
    return _replay(prefill, tokens, v, state, src, None, query_start_loc, parents)


def scan_verify(
    x: Tensor,
    dt: Tensor | None,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    z: Tensor | None,
    state: Tensor,
    src: Tensor,
    query_start_loc: Tensor,
    max_len: int,
    *,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    dt_softplus: bool = True,
    parents: Tensor | None = None,
) -> tuple[Tensor, Ends]:
    """Run each token from the state after its parent; x's shape, D skip and z included."""

    def prefill(**args: Any) -> tuple[Tensor, Tensor]:
        return scan_prefill(
            A=A, D=D, dt_bias=dt_bias, dt_limit=dt_limit, dt_softplus=dt_softplus, **args
        )

    tokens = {"x": x, "dt": dt, "B": B, "C": C, "z": z}
    return _replay(prefill, tokens, x, state, src, None, query_start_loc, parents)


def commit(state: Tensor, ends: Ends, dst: Tensor, query_start_loc: Tensor, last: Tensor) -> Tensor:
    """The pool with `dst` of every row at its row-relative token `last`; -1 writes nothing."""
    new = state.double().clone()
    bounds = pairwise(query_start_loc.tolist())
    for (begin, end), slot, token in zip(bounds, dst.tolist(), last.tolist(), strict=True):
        found = ends[begin + token] if begin < end and slot >= 0 and token >= 0 else None
        if found is not None:
            new[slot] = found
    return new
