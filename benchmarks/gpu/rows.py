"""What is timed: shapes that matter, their inputs, and the floors beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from hal.bench.shapes import MIX
from hal.interfaces import Gate
from hal.model.spec import GateKind
from hal_cuda.provider import TritonProvider, arch_of, tuning
from hal_triton.tuning import Table

DEVICE = "cuda:0"
BF16, F32 = torch.bfloat16, torch.float32
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report: `make(provider)` gives its calls.

    `floor` makes calls that move the least bytes.
    """

    name: str
    make: Callable[[TritonProvider], Sequence[Call]]
    floor: Callable[[], Sequence[Call]] | None = None
    graph: bool = True
    goal: str = ""


def provider(swept: Table | None = None) -> TritonProvider:
    """The provider as shipped, or with the entries that a sweep found."""
    base = tuning(arch_of(DEVICE))
    tuned = replace(base, table={**base.table, **(swept or {})})
    return TritonProvider(DEVICE, {"tuning": tuned})


def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    """Random values on the device."""
    return torch.empty(shape, device=DEVICE, dtype=dtype).normal_(0, scale)


def gate(heads: int) -> Gate:
    """A gate under which states keep their memory."""
    A_log = torch.empty(heads, device=DEVICE).uniform_(-3, 0.5)
    return Gate(GateKind.SCALAR, A_log, torch.empty(heads, device=DEVICE).uniform_(-2, 0.5))


def slot_sets(batch: int, slot_bytes: int, pool_bytes: int = 640 << 20) -> list[Tensor]:
    """Sets of slots that share none and skip slot 0, enough to overflow the L2 cache."""
    sets = max(2, min(256, pool_bytes // (slot_bytes * batch)))
    ids = torch.randperm(sets * batch, device=DEVICE).int() + 1
    return [part.clone() for part in ids.split(batch)]


def bounds(lengths: Sequence[int]) -> Tensor:
    """query_start_loc of these lengths."""
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()


def _i32(values: Tensor) -> Tensor:
    return values.to(torch.int32)


# Every builder returns calls on disjoint slots, so that a graph replay finds cold states.


def fused_decode(
    ops: TritonProvider, batch: int, H: int, HV: int, norm: bool = False
) -> list[Call]:
    """Fused decode of a whole layer, K = V = 128, width 4."""
    sets, channels = slot_sets(batch, HV * 128 * 128 * 4), 128 * (2 * H + HV)
    count = len(sets) * batch + 1
    state, ring = normal(count, HV, 128, 128, scale=0.3, dtype=F32), normal(count, 4, channels)
    weight, law = normal(channels, 4, scale=0.5), gate(HV)
    weight = ops.prepare({"conv_weight": weight})["conv_weight"]
    x, a, b = (normal(len(sets), batch, n) for n in (channels, HV, HV))
    out = torch.empty(batch, HV, 128, device=DEVICE, dtype=BF16)
    start = _i32(torch.randint(4, 4000, (batch,), device=DEVICE))
    extra = {"z": normal(batch, HV, 128), "norm_weight": normal(128, dtype=F32)} if norm else {}
    return [
        partial(ops.delta_rule.decode_fused, x[i], a[i], b[i], weight, None, "silu", law, ring,
                state, slots, slots, start, out=out, **extra)
        for i, slots in enumerate(sets)
    ]  # fmt: skip


def plain_decode(ops: TritonProvider, batch: int, H: int, HV: int) -> list[Call]:
    """Decode of the recurrence alone, on views of mixed_qkv."""
    sets, channels = slot_sets(batch, HV * 128 * 128 * 4), 128 * (2 * H + HV)
    state = normal(len(sets) * batch + 1, HV, 128, 128, scale=0.3, dtype=F32)
    law, out = gate(HV), torch.empty(batch, HV, 128, device=DEVICE, dtype=BF16)
    x, a, b = (normal(len(sets), batch, n) for n in (channels, HV, HV))
    calls: list[Call] = []
    for i, slots in enumerate(sets):
        q, k, v = x[i].unflatten(1, (-1, 128)).split([H, H, HV], 1)
        calls.append(partial(ops.delta_rule.decode, q, k, v, a[i], b[i], law, state, slots, slots,
                             out=out))  # fmt: skip
    return calls


def multiply(batch: int, HV: int) -> list[Call]:
    """The floor of a decode: an in-place multiply of the same states."""
    sets = slot_sets(batch, HV * 128 * 128 * 4)
    state = normal(len(sets) * batch, HV, 128, 128, dtype=F32)
    return [partial(part.mul_, 1.00001) for part in state.split(batch)]


def prefill(ops: TritonProvider, lengths: Sequence[int], H: int, HV: int) -> list[Call]:
    """The whole operation: strided mixed_qkv after the conv, raw gates, slots in and out."""
    tokens, channels = sum(lengths), 128 * (2 * H + HV)
    mixed, a, b = normal(tokens, channels), normal(tokens, HV), normal(tokens, HV)
    state = normal(len(lengths) + 9, HV, 128, 128, scale=0.3, dtype=F32)
    slots = _i32(torch.randperm(len(lengths) + 8, device=DEVICE)[: len(lengths)] + 1)
    out = torch.empty(tokens, HV, 128, device=DEVICE, dtype=BF16)
    return [partial(ops.delta_rule.prefill_fused, mixed, a, b, gate(HV), state, slots, slots,
                    bounds(lengths), max(lengths), out=out)]  # fmt: skip


def conv_prefill(ops: TritonProvider, lengths: Sequence[int], channels: int) -> list[Call]:
    """Convolution with SiLU, width 4, windows by slot."""
    tokens, rows = sum(lengths), len(lengths)
    x, out = normal(tokens, channels), torch.empty(tokens, channels, device=DEVICE, dtype=BF16)
    weight = ops.prepare({"conv_weight": normal(channels, 4, scale=0.5)})["conv_weight"]
    ring, slots = normal(rows + 1, 4, channels), torch.arange(1, rows + 1, device=DEVICE).int()
    start = torch.full((rows,), 8, device=DEVICE, dtype=torch.int32)
    return [partial(ops.conv.prefill, x, weight, None, ring, slots, slots, start, bounds(lengths),
                    max(lengths), activation="silu", out=out)]  # fmt: skip


def short_prefill(ops: TritonProvider, lengths: Sequence[int], hidden: int = 2048) -> list[Call]:
    """LFM2's whole short convolution, width 3, B, C and x as slices of one projection."""
    tokens, rows = sum(lengths), len(lengths)
    B, C, x = normal(tokens, 3 * hidden).split(hidden, 1)
    out = torch.empty(tokens, hidden, device=DEVICE, dtype=BF16)
    weight = ops.prepare({"weight": normal(hidden, 3, scale=0.5)})["weight"]
    ring, slots = normal(rows + 1, 3, hidden), torch.arange(1, rows + 1, device=DEVICE).int()
    start = torch.full((rows,), 8, device=DEVICE, dtype=torch.int32)
    return [partial(ops.short_conv.prefill, B, C, x, weight, None, ring, slots, slots, start,
                    bounds(lengths), max(lengths), out=out)]  # fmt: skip


def conv_decode(ops: TritonProvider, batch: int, channels: int) -> list[Call]:
    """One token a row, width 4, SiLU."""
    sets = slot_sets(batch, 4 * channels * 2, 400 << 20)
    ring = normal(len(sets) * batch + 1, 4, channels)
    weight = ops.prepare({"conv_weight": normal(channels, 4, scale=0.5)})["conv_weight"]
    x, out = normal(len(sets), batch, channels), normal(batch, channels)
    start = _i32(torch.randint(4, 4000, (batch,), device=DEVICE))
    return [partial(ops.conv.decode, x[i], weight, None, ring, slots, slots, start,
                    activation="silu", out=out) for i, slots in enumerate(sets)]  # fmt: skip


def short_decode(ops: TritonProvider, batch: int, hidden: int = 2048) -> list[Call]:
    """LFM2's short convolution of one token a row, width 3."""
    sets = slot_sets(batch, 3 * hidden * 2, 400 << 20)
    ring, x = normal(len(sets) * batch + 1, 3, hidden), normal(len(sets), batch, 3 * hidden)
    weight = ops.prepare({"weight": normal(hidden, 3, scale=0.5)})["weight"]
    out, start = normal(batch, hidden), _i32(torch.randint(3, 4000, (batch,), device=DEVICE))
    calls: list[Call] = []
    for i, slots in enumerate(sets):
        B, C, new = x[i].split(hidden, 1)
        calls.append(partial(ops.short_conv.decode, B, C, new, weight, None, ring, slots, slots,
                             start, out=out))  # fmt: skip
    return calls


def copy(tokens: int, channels: int, reads: int = 1) -> list[Call]:
    """A copy that moves the bytes of a conv: `reads` inputs and one output of this shape."""
    elements = tokens * channels * (reads + 1) // 2
    x, y = normal(elements), normal(elements)
    return [partial(y.copy_, x)]


def rows() -> list[Row]:
    """Every line, the ones that a target exists for first."""
    import rows_hopper
    import rows_kda
    import rows_scan
    import rows_verify

    long, mix, even = [32768], MIX, [2048] * 16
    found = []
    for batch, goal in ((1, "4.4 / 3.8"), (8, ""), (32, "39.7 / 37.5"), (128, "143 / 138")):
        name = f"fused decode HV32 B={batch}"
        make = partial(fused_decode, batch=batch, H=16, HV=32)
        floor = partial(multiply, batch, 32)
        found.append(Row(name, make, floor=floor, goal=goal))
    for batch in (1, 8, 128):
        make = partial(fused_decode, batch=batch, H=16, HV=32, norm=True)
        found.append(Row(f"fused decode, norm, HV32 B={batch}", make))
    make = partial(fused_decode, batch=1, H=4, HV=8)
    found.append(Row("fused decode HV8 B=1", make))
    for batch, goal in ((1, ""), (32, ""), (128, "136 / 132")):
        make = partial(plain_decode, batch=batch, H=16, HV=32)
        found.append(
            Row(f"decode HV32 B={batch}", make, floor=partial(multiply, batch, 32), goal=goal)
        )
    for name, lengths, goal in (("16x2048", even, "1500 / 1000"), ("1x8192", [8192], ""),
                                ("mix", mix, "")):  # fmt: skip
        make = partial(prefill, lengths=lengths, H=16, HV=32)
        found.append(Row(f"prefill walk HV32 {name}", make, graph=False, goal=goal))
    for name, lengths, goal in (("1x32768", long, "320 / 285"), ("mix", mix, "160 / 145")):
        make = partial(conv_prefill, lengths=lengths, channels=8192)
        found.append(
            Row(
                f"conv prefill {name}",
                make,
                floor=partial(copy, sum(lengths), 8192),
                graph=False,
                goal=goal,
            )
        )
    for name, lengths, goal in (("1x32768", long, "160 / 145"), ("mix", mix, "90 / 75")):
        make = partial(short_prefill, lengths=lengths)
        found.append(
            Row(
                f"short conv prefill {name}",
                make,
                floor=partial(copy, sum(lengths), 2048, 3),
                graph=False,
                goal=goal,
            )
        )
    for batch, goal in ((512, "23 / 19.5"), (1, "")):
        make = partial(conv_decode, batch=batch, channels=8192)
        found.append(Row(f"conv decode B={batch}", make, goal=goal))
    make = partial(short_decode, batch=512)
    found.append(Row("short conv decode B=512", make, goal="6.2"))
    return [*found, *rows_hopper.rows(), *rows_kda.rows(), *rows_scan.rows(), *rows_verify.rows()]
