"""Verify and commit: what a step of speculation costs, together and apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import rows as lines
import torch
from torch import Tensor

from hal.interfaces import Gate, Scratch
from hal.model.spec import GateKind
from hal_cuda.provider import TritonProvider

Call = Callable[[], object]


def scratch(ops: TritonProvider, interface: str, shapes: dict[str, Any], batch: int, width: int
            ) -> list[Tensor]:  # fmt: skip
    """What the provider asks for, on the device."""
    asked: Sequence[Scratch] = ops.scratch_spec(interface, shapes, batch, width)
    return [torch.zeros(s.shape, dtype=getattr(torch, s.dtype), device=lines.DEVICE) for s in asked]


def delta(
    ops: TritonProvider, batch: int, width: int, H: int, HV: int, part: str = "both",
    gate: Gate | None = None,
) -> list[Call]:  # fmt: skip
    """Verify, then commit of every token, K = V = 128, on views of mixed_qkv."""
    sets, channels = lines.slot_sets(batch, HV * 128 * 128 * 4), 128 * (2 * H + HV)
    tokens, count = batch * width, len(sets) * batch + 1
    state = lines.normal(count, HV, 128, 128, scale=0.3, dtype=lines.F32)
    law, channel = gate or lines.gate(HV), gate is not None
    x, b = lines.normal(len(sets), tokens, channels), lines.normal(len(sets), tokens, HV)
    a = lines.normal(len(sets), tokens, *((HV, 128) if channel else (HV,)))
    shapes = {"recurrent": (HV, 128, 128), "conv": (4, channels)}
    kept = scratch(ops, "delta_rule", shapes, batch, width)
    starts, out = lines.bounds([width] * batch), lines.normal(tokens, HV, 128)
    last = torch.full((batch,), width - 1, device=lines.DEVICE, dtype=torch.int32)
    given = (state, kept, starts, last, width, out, law)
    qkv = [tokens.unflatten(1, (-1, 128)).split([H, H, HV], 1) for tokens in x]
    _delta(ops, "verify", sets[0], qkv[0], a[0], b[0], *given)  # commit replays what it keeps
    return [
        partial(_delta, ops, part, slots, qkv[i], a[i], b[i], *given)
        for i, slots in enumerate(sets)
    ]


def _delta(
    ops: TritonProvider, part: str, slots: Tensor, qkv: Sequence[Tensor], a: Tensor, b: Tensor,
    state: Tensor, kept: list[Tensor], starts: Tensor, last: Tensor, width: int, out: Tensor,
    law: Gate,
) -> None:  # fmt: skip
    if part != "commit":
        ops.delta_rule.verify(*qkv, a, b, law, state, slots, starts, width, kept, out=out)
    if part != "verify":
        ops.delta_rule.commit(state, kept, slots, slots, starts, last)


def kda(heads: int) -> Gate:
    """A channel gate under which states keep their memory."""
    A_log = torch.empty(heads, device=lines.DEVICE).uniform_(-3, 0.5)
    bias = torch.empty(heads, 128, device=lines.DEVICE).uniform_(-2, 0.5)
    return Gate(GateKind.CHANNEL, A_log, bias)


def channels(
    ops: TritonProvider, batch: int, width: int, HV: int, part: str = "both"
) -> list[Call]:
    """The same with a channel gate and as many key heads as value heads."""
    return delta(ops, batch, width, HV, HV, part, kda(HV))


def conv(ops: TritonProvider, batch: int, width: int, channels: int, part: str = "both"
         ) -> list[Call]:  # fmt: skip
    """The convolution's verify, then commit of every token, W 4 with SiLU, on a ring."""
    sets, tokens = lines.slot_sets(batch, 4 * channels * 2, 400 << 20), batch * width
    ring = lines.normal(len(sets) * batch + 1, 4, channels)
    weight = ops.prepare({"conv_weight": lines.normal(channels, 4, scale=0.5)})["conv_weight"]
    x, out = lines.normal(len(sets), tokens, channels), lines.normal(tokens, channels)
    start = torch.randint(4, 4000, (batch,), device=lines.DEVICE).int()
    kept = scratch(ops, "conv", {"conv": (4, channels)}, batch, width)
    starts = lines.bounds([width] * batch)
    last = torch.full((batch,), width - 1, device=lines.DEVICE, dtype=torch.int32)

    def step(new: Tensor, slots: Tensor, part: str) -> None:
        if part != "commit":
            ops.conv.verify(new, weight, None, ring, slots, start, starts, width, kept,
                            activation="silu", out=out)  # fmt: skip
        if part != "verify":
            ops.conv.commit(ring, kept, slots, slots, start, starts, last)

    step(x[0], sets[0], "verify")  # commit writes what it keeps
    return [partial(step, x[i], slots, part) for i, slots in enumerate(sets)]


def rows() -> list[lines.Row]:
    """Both halves, and the whole step that the targets are of."""
    found, Row = [], lines.Row
    for width, goal in ((4, "260 / 200"), (8, "300 / 220")):
        make = partial(delta, batch=128, width=width, H=16, HV=32)
        name = f"HV32 T={width} B=128"
        found.append(Row(f"verify alone {name}", partial(make, part="verify")))
        found.append(
            Row(
                f"commit alone {name}",
                partial(make, part="commit"),
                floor=partial(lines.multiply, 128, 32),
            )
        )
        found.append(
            Row(f"verify + commit {name}", make, floor=partial(lines.multiply, 128, 32), goal=goal)
        )
    for batch in (1, 32):
        make = partial(delta, batch=batch, width=4, H=16, HV=32)
        found.append(
            Row(
                f"verify + commit HV32 T=4 B={batch}",
                make,
                floor=partial(lines.multiply, batch, 32),
            )
        )
    make = partial(delta, batch=128, width=16, H=16, HV=32)
    found.append(Row("verify + commit HV32 T=16 B=128", make))
    make = partial(channels, batch=128, width=4, HV=32)
    found.append(Row("KDA verify + commit HV32 T=4 B=128", make))
    make = partial(conv, batch=128, width=4, channels=8192)
    found.append(Row("conv verify alone T=4 B=128", partial(make, part="verify")))
    found.append(Row("conv commit alone T=4 B=128", partial(make, part="commit")))
    return found
