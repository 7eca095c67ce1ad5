"""Kimi Delta Attention: every key channel decays by itself, gates computed inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import rows as lines
import torch

from hal.interfaces import Gate
from hal.model.spec import GateKind
from hal_cuda.provider import TritonProvider

Call = Callable[[], object]
HEADS, DIM = 32, 128


def gate(kind: GateKind) -> Gate:
    """A gate under which states keep their memory."""
    A_log = torch.empty(HEADS, device=lines.DEVICE).uniform_(-3, 0.5)
    bias = torch.empty(HEADS, DIM, device=lines.DEVICE).uniform_(-2, 0.5)
    return Gate(kind, A_log, bias, -5.0 if kind is GateKind.SAFE else None)


def prefill(
    ops: TritonProvider, lengths: Sequence[int], kind: GateKind = GateKind.CHANNEL
) -> list[Call]:
    """The whole operation: strided mixed_qkv after the conv, raw gates, slots in and out."""
    tokens, rows = sum(lengths), len(lengths)
    mixed, a = lines.normal(tokens, 3 * HEADS * DIM), lines.normal(tokens, HEADS, DIM)
    b = lines.normal(tokens, HEADS)
    state = lines.normal(rows + 9, HEADS, DIM, DIM, scale=0.3, dtype=lines.F32)
    slots = (torch.randperm(rows + 8, device=lines.DEVICE)[:rows] + 1).int()
    out = torch.empty(tokens, HEADS, DIM, device=lines.DEVICE, dtype=lines.BF16)
    return [partial(ops.delta_rule.prefill_fused, mixed, a, b, gate(kind), state, slots, slots,
                    lines.bounds(lengths), max(lengths), out=out)]  # fmt: skip


def decode(ops: TritonProvider, batch: int) -> list[Call]:
    """Decode of the recurrence alone, on views of mixed_qkv."""
    sets = lines.slot_sets(batch, HEADS * DIM * DIM * 4)
    count = len(sets) * batch + 1
    state = lines.normal(count, HEADS, DIM, DIM, scale=0.3, dtype=lines.F32)
    law = gate(GateKind.CHANNEL)
    out = torch.empty(batch, HEADS, DIM, device=lines.DEVICE, dtype=lines.BF16)
    x, b = lines.normal(len(sets), batch, 3 * HEADS * DIM), lines.normal(len(sets), batch, HEADS)
    a = lines.normal(len(sets), batch, HEADS, DIM)
    calls: list[Call] = []
    for i, slots in enumerate(sets):
        q, k, v = x[i].unflatten(1, (-1, DIM)).split(HEADS, 1)
        calls.append(partial(ops.delta_rule.decode, q, k, v, a[i], b[i], law, state, slots, slots,
                             out=out))  # fmt: skip
    return calls


def rows() -> list[lines.Row]:
    """Decode beside its floor, and prefill."""
    found = []
    for batch, goal in ((1, "4.6 / 3.6"), (32, "42 / 37"), (128, "155 / 138")):
        make = partial(decode, batch=batch)
        found.append(
            lines.Row(
                f"KDA decode 32 heads B={batch}",
                make,
                floor=partial(lines.multiply, batch, HEADS),
                goal=goal,
            )
        )
    shapes = (("16x2048", [2048] * 16, "2600 / 1500"), ("1x8192", [8192], "900 / 600"),
              ("mix", lines.MIX, ""))  # fmt: skip
    for name, lengths, goal in shapes:
        make = partial(prefill, lengths=lengths)
        found.append(lines.Row(f"KDA prefill {name}", make, graph=False, goal=goal))
    make = partial(prefill, lengths=[2048] * 16, kind=GateKind.SAFE)
    found.append(lines.Row("KDA prefill safe gate 16x2048", make, graph=False))
    return found
