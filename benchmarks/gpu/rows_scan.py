"""What is timed of the scan: Mamba-2 with 128 heads of 64, state 128, 8 groups, and Mamba-1."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from rows import (
    BF16,
    DEVICE,
    F32,
    MIX,
    Call,
    Row,
    bounds,
    normal,
    slot_sets,
)
from torch import Tensor

from hal_cuda.provider import TritonProvider

H, P, N, G = 128, 64, 128, 8
INNER, STATE = 8192, 16
WIDTH = H * P + 2 * G * N


def _law(heads: int) -> dict[str, Tensor]:
    """Rates of a layer under which states keep their memory."""
    return {
        "A": -torch.empty(heads, device=DEVICE).uniform_(1, 16),
        "D": normal(heads, dtype=F32),
        "dt_bias": torch.empty(heads, device=DEVICE).uniform_(-6, -2),
    }


def _slots(rows: int) -> Tensor:
    return torch.randperm(rows + 8, device=DEVICE)[:rows].to(torch.int32) + 1


def _tokens(count: int) -> dict[str, Tensor]:
    """x, B and C as slices of the convolution's result, and dt."""
    x, B, C = normal(count, WIDTH).split([H * P, G * N, G * N], 1)
    return {
        **{"x": x.unflatten(1, (H, P)), "B": B.unflatten(1, (G, N)), "C": C.unflatten(1, (G, N))},
        "dt": normal(count, H),
    }


def _heads(ops: TritonProvider, batch: int, dtype: torch.dtype) -> list[Call]:
    """Decode of the recurrence alone, a graph over disjoint slots."""
    sets = slot_sets(batch, H * P * N * dtype.itemsize)
    state = normal(len(sets) * batch + 1, H, P, N, scale=0.3, dtype=dtype)
    law, out = _law(H), torch.empty(batch, H, P, device=DEVICE, dtype=BF16)
    return [
        partial(ops.scan.decode, **_tokens(batch), **law, z=None, state=state, src=slots,
                dst=slots, out=out)
        for slots in sets
    ]  # fmt: skip


def _channels(ops: TritonProvider, batch: int) -> list[Call]:
    """Mamba-1's decode, z inside."""
    sets = slot_sets(batch, INNER * STATE * 4)
    state = normal(len(sets) * batch + 1, INNER, STATE, scale=0.3, dtype=F32)
    law = _law(INNER) | {"A": -torch.empty(INNER, STATE, device=DEVICE).uniform_(1, 16)}
    x, dt, z = (normal(batch, INNER) for _ in range(3))
    B, C = normal(2, batch, 1, STATE).unbind(0)
    return [
        partial(ops.scan.decode, x=x, dt=dt, B=B, C=C, **law, z=z, state=state, src=slots,
                dst=slots, out=torch.empty_like(x))
        for slots in sets
    ]  # fmt: skip


def _multiply(elements: int, batch: int, dtype: torch.dtype) -> list[Call]:
    """The floor of a decode: an in-place multiply of the same states."""
    sets = slot_sets(batch, elements * dtype.itemsize)
    state = normal(len(sets) * batch, elements, dtype=dtype)
    return [partial(part.mul_, 1.00001) for part in state.split(batch)]


def _prefill(ops: TritonProvider, lengths: Sequence[int]) -> list[Call]:
    """The scan with initial states by slot, on views of the convolution's result."""
    tokens, slots = sum(lengths), _slots(len(lengths))
    state = normal(len(lengths) + 9, H, P, N, scale=0.3, dtype=F32)
    out = torch.empty(tokens, H, P, device=DEVICE, dtype=BF16)
    return [partial(ops.scan.prefill, **_tokens(tokens), **_law(H), z=None, state=state, src=slots,
                    dst=slots, query_start_loc=bounds(lengths), max_len=max(lengths),
                    out=out)]  # fmt: skip


def _prefill_channels(ops: TritonProvider, lengths: Sequence[int]) -> list[Call]:
    """Mamba-1's prefill, z inside."""
    tokens, slots = sum(lengths), _slots(len(lengths))
    state = normal(len(lengths) + 9, INNER, STATE, scale=0.3, dtype=F32)
    law = _law(INNER) | {"A": -torch.empty(INNER, STATE, device=DEVICE).uniform_(1, 16)}
    x, dt, z = (normal(tokens, INNER) for _ in range(3))
    B, C = normal(2, tokens, 1, STATE).unbind(0)
    return [partial(ops.scan.prefill, x=x, dt=dt, B=B, C=C, **law, z=z, state=state, src=slots,
                    dst=slots, query_start_loc=bounds(lengths), max_len=max(lengths),
                    out=torch.empty_like(x))]  # fmt: skip


def _drafts(ops: TritonProvider, batch: int, width: int, commit: bool) -> list[Call]:
    """Verify of chains, or the commit of all their tokens."""
    sets = slot_sets(batch, H * P * N * 4)
    state = normal(len(sets) * batch + 1, H, P, N, scale=0.3, dtype=F32)
    scratch = [
        torch.empty(each.shape, device=DEVICE, dtype=getattr(torch, each.dtype))
        for each in ops.scratch_spec("scan", {"scan": (H, P, N)}, batch, width)
    ]
    ends, law = bounds([width] * batch), _law(H)
    tokens = _tokens(batch * width)
    out = torch.empty(batch * width, H, P, device=DEVICE, dtype=BF16)
    verify = partial(ops.scan.verify, **tokens, **law, z=None, state=state, query_start_loc=ends,
                     max_len=width, scratch=scratch, out=out)  # fmt: skip
    if not commit:
        return [partial(verify, src=slots) for slots in sets]
    verify(src=sets[0])
    last = torch.full((batch,), width - 1, device=DEVICE, dtype=torch.int32)
    return [
        partial(ops.scan.commit, state, scratch, slots, slots, ends, last) for slots in sets
    ]  # fmt: skip


def rows() -> list[Row]:
    """Every line of the scan, with goals in microseconds."""
    return [*_decode_rows(), *_prefill_rows(), *_draft_rows()]


def _decode_rows() -> list[Row]:
    found = []
    for dtype, name, goals in (
        (F32, "float32", {1: "4.9 / 4.1", 8: "", 32: "", 128: "275 / 262"}),
        (BF16, "bfloat16", {1: "", 32: "", 128: "140 / 133"}),
    ):
        for batch, goal in goals.items():
            make = partial(_heads, batch=batch, dtype=dtype)
            floor = partial(_multiply, H * P * N, batch, dtype)
            found.append(Row(f"scan decode {name} state B={batch}", make, floor=floor, goal=goal))
    for batch in (1, 128):
        make = partial(_channels, batch=batch)
        floor = partial(_multiply, INNER * STATE, batch, F32)
        found.append(Row(f"scan decode mamba1 B={batch}", make, floor=floor))
    return found


def _prefill_rows() -> list[Row]:
    found = []
    for name, lengths, goal in (
        ("16x2048", [2048] * 16, "1000 / 800"),
        ("1x8192", [8192], "400 / 220 on the device"),
        ("mix", MIX, ""),
    ):
        make = partial(_prefill, lengths=lengths)
        alone = len(lengths) == 1
        found.append(Row(f"scan prefill {name}", make, graph=alone, goal=goal))
    for name, lengths in (("1x2048", [2048]), ("16x2048", [2048] * 16)):
        make = partial(_prefill_channels, lengths=lengths)
        found.append(Row(f"scan prefill mamba1 {name}", make, graph=False))
    return found


def _draft_rows() -> list[Row]:
    found = []
    for batch, width in ((32, 4), (128, 4), (128, 8)):
        for verb, commit in (("verify", False), ("commit", True)):
            make = partial(_drafts, batch=batch, width=width, commit=commit)
            found.append(Row(f"scan {verb} T={width} B={batch}", make))
    return found
