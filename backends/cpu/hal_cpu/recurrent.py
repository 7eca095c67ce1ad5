"""One token a row: read, decay and update the state in place."""

from dataclasses import dataclass, replace
from typing import Final, Self

import torch
from torch import Tensor

from hal_cpu.keys import keys_and_queries
from hal_cpu.rows import Steps, gather, scatter, start_state

IN_PLACE_ELEMENTS: Final = 1 << 16
"""Slots at least this large are updated where they are: to copy them costs more than to call for
each row."""


@dataclass(frozen=True, slots=True, eq=False)
class Operands:
    """What one step needs, by row and key head; R value heads share a key head.

    readers `[n*H, R, 2, K]` (key, query), key `[n*H, 1, K, 1]`, dot key.query `[n*H, 1, 1]`, value
    `[n*H, R, V]`, fall exp(g) `[n*H, R, 1 or K, 1]`, beta `[n*H, R, 1]`.
    """

    readers: Tensor
    key: Tensor
    dot: Tensor
    value: Tensor
    fall: Tensor
    beta: Tensor
    key_heads: int

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, qk_l2norm: bool
    ) -> Self:
        """The operands of n rows; decay `[n, HV, 1 or K]` is exp(g), beta `[n, HV]`."""
        (count, heads, value_dim), key_heads = v.shape, q.shape[1]
        groups, ratio = count * key_heads, heads // key_heads
        both = keys_and_queries(q, k, qk_l2norm).view(groups, 1, 2, -1)
        key, query = both.unbind(2)
        return cls(
            both.expand(-1, ratio, -1, -1),
            key.unsqueeze(-1),
            (key * query).sum(-1, keepdim=True),
            v.float().reshape(groups, ratio, value_dim),
            decay.reshape(groups, ratio, -1, 1),
            beta.reshape(groups, ratio, 1),
            key_heads,
        )

    def row(self, number: int) -> Self:
        """The operands of one row, viewed."""
        mine = slice(number * self.key_heads, (number + 1) * self.key_heads)
        return replace(
            self,
            readers=self.readers[mine],
            key=self.key[mine],
            dot=self.dot[mine],
            value=self.value[mine],
            fall=self.fall[mine],
            beta=self.beta[mine],
        )


def advance_rows(operands: Operands, state: Tensor, steps: Steps) -> Tensor:
    """Advance each row by its token; state `[S, HV, K, V]`, result float32 `[n, HV, V]`.

    Value heads that share a key head lie side by side, so that the update repeats nothing for them.
    """
    if state[0].numel() < IN_PLACE_ELEMENTS:
        result = _all_at_once(state, steps, operands)
    else:
        result = _each_in_place(state, steps, operands)
    return result.view(len(steps.tokens), state.shape[1], state.shape[3])


def advance_held(operands: Operands, held: Tensor) -> tuple[Tensor, Tensor]:
    """Advance states `[n, HV, K, V]` that nobody else holds; results and updates `[n, HV, V]`."""
    count, heads, _, value_dim = held.shape
    if held[0].numel() < IN_PLACE_ELEMENTS:
        found = [_advance(held, operands)]
    else:
        found = [_advance(held[i : i + 1], operands.row(i)) for i in range(count)]
    results, updates = (
        torch.cat(part).view(count, heads, value_dim) for part in zip(*found, strict=True)
    )
    return results, updates


def _all_at_once(state: Tensor, steps: Steps, operands: Operands) -> Tensor:
    """Copy the slots out in their own axis order, advance them together, copy them back."""
    turned = state.stride(-1) != 1
    held = state.transpose(-1, -2) if turned else state
    ends = gather(held, steps.sources)
    result, _ = _advance(ends.transpose(-1, -2) if turned else ends, operands)
    scatter(held, steps.targets, ends)
    return result


def _each_in_place(state: Tensor, steps: Steps, operands: Operands) -> Tensor:
    results = []
    for i, slots in enumerate(zip(steps.sources, steps.targets, strict=True)):
        target = start_state(state, *slots).unsqueeze(0)
        results.append(_advance(target, operands.row(i))[0])
    return torch.cat(results)


def _advance(state: Tensor, operands: Operands) -> tuple[Tensor, Tensor]:
    """Update states `[n, HV, K, V]` in place; what queries read, and u, both `[n*H, HV/H, V]`.

    The query reads the new state as `S q + (k.q) u`, so that one product of the decayed state
    serves key and query. Decay comes first: to stream over the state is the cheapest fetch.
    """
    groups, ratio, value_dim = operands.value.shape
    flat = state.view(groups * ratio, -1, value_dim)
    grouped = flat.view(groups, ratio, -1, value_dim).mul_(operands.fall)
    read = torch.bmm(operands.readers.reshape(groups * ratio, 2, -1), flat)
    of_key, of_query = read.view(groups, ratio, 2, value_dim).unbind(2)
    update = (operands.value - of_key).mul_(operands.beta)
    grouped.addcmul_(operands.key, update.unsqueeze(2))
    return of_query.addcmul(operands.dot, update), update
