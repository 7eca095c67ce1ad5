"""One token a row: read, decay and update the state in place."""

from typing import Final

import torch
from torch import Tensor

from hal_cpu.keys import keys_and_queries
from hal_cpu.rows import Steps, gather, scatter, start_state

IN_PLACE_ELEMENTS: Final = 1 << 16
"""Slots at least this large are updated where they are: to copy them costs more than to call for
each row."""


def advance_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    steps: Steps,
    qk_l2norm: bool,
) -> Tensor:
    """Advance each row by its token; state `[S, HV, K, V]`, result float32 `[n, HV, V]`.

    decay `[n, HV, 1 or K]` is exp(g), beta `[n, HV]`. Value heads that share a key head lie side by
    side, so that the update repeats nothing for them.
    """
    (count, heads, value_dim), key_heads = v.shape, q.shape[1]
    groups, ratio = count * key_heads, heads // key_heads
    both = keys_and_queries(q, k, qk_l2norm).view(groups, 1, 2, -1)
    fall = decay.reshape(groups, ratio, 1, -1)
    key, query = both.unbind(2)
    operands = (
        both.expand(-1, ratio, -1, -1),
        key.unsqueeze(-1),
        (key * query).sum(-1, keepdim=True),
        v.float().reshape(groups, ratio, value_dim),
        fall.transpose(-1, -2),
        beta.reshape(groups, ratio, 1),
    )
    if heads * q.shape[-1] * value_dim < IN_PLACE_ELEMENTS:
        result = _all_at_once(state, steps, operands)
    else:
        result = _each_in_place(state, steps, key_heads, operands)
    return result.view(count, heads, value_dim)


def _all_at_once(state: Tensor, steps: Steps, operands: tuple[Tensor, ...]) -> Tensor:
    """Copy the slots out in their own axis order, advance them together, copy them back."""
    turned = state.stride(-1) != 1
    held = state.transpose(-1, -2) if turned else state
    ends = gather(held, steps.sources)
    result = _advance(ends.transpose(-1, -2) if turned else ends, *operands)
    scatter(held, steps.targets, ends)
    return result


def _each_in_place(
    state: Tensor, steps: Steps, key_heads: int, operands: tuple[Tensor, ...]
) -> Tensor:
    results = []
    for i, slots in enumerate(zip(steps.sources, steps.targets, strict=True)):
        mine = slice(i * key_heads, (i + 1) * key_heads)
        target = start_state(state, *slots).unsqueeze(0)
        results.append(_advance(target, *(operand[mine] for operand in operands)))
    return torch.cat(results)


def _advance(
    state: Tensor,
    readers: Tensor,
    key: Tensor,
    dot: Tensor,
    value: Tensor,
    fall: Tensor,
    beta: Tensor,
) -> Tensor:
    """Update states `[n, HV, K, V]` in place; return what the queries read, `[n*H, HV/H, V]`.

    The query reads the new state as `S q + (k.q) u`, so that one product of the decayed state
    serves key and query. Decay comes first: to stream over the state is the cheapest fetch.
    """
    groups, ratio, value_dim = value.shape
    flat = state.view(groups * ratio, -1, value_dim)
    grouped = flat.view(groups, ratio, -1, value_dim).mul_(fall)
    read = torch.bmm(readers.reshape(groups * ratio, 2, -1), flat)
    of_key, of_query = read.view(groups, ratio, 2, value_dim).unbind(2)
    update = (value - of_key).mul_(beta)
    grouped.addcmul_(key, update.unsqueeze(2))
    return of_query.addcmul(dot, update)
