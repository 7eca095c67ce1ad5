"""A driver on the host: it keeps every rule of the hardware and computes with the oracle."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import torch
from torch import Tensor

from hal import reference
from hal.interfaces import Gate
from hal.model.spec import GateKind
from hal_cuda.hopper import prefill
from hal_cuda.hopper.arguments import Arguments
from hal_cuda.hopper.driver import Kernel, View
from hal_cuda.hopper.variant import Variant

DIM = 128


def at(pointer: int, dtype: torch.dtype, shape: list[int], strides: list[int]) -> Tensor:
    """The tensor that lies at an address; an empty one lies nowhere."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    span = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * (max(span, 1) * dtype.itemsize)).from_address(pointer)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


@dataclass
class Emulator:
    """Stands in for the driver and for the loaded kernels."""

    maps: dict[int, View] = field(default_factory=dict)
    variants: list[Variant] = field(default_factory=list)
    programs: list[int] = field(default_factory=list)

    def get(self, variant: Variant, index: int) -> Kernel:
        self.variants.append(variant)
        return Kernel(len(self.variants), 512, 0)

    def map(self, at: int, view: View) -> None:
        assert at % 64 == 0
        assert view.pointer % 16 == 0
        assert all(step % 16 == 0 and 0 < step < 2**40 for step in view.strides)
        assert all(0 < n <= 256 for n in view.box) and view.box[0] * 2 <= 128
        self.maps[at] = view

    def move(self, at: int, pointer: int) -> None:
        self.map(at, replace(self.maps[at], pointer=pointer))

    def launch(
        self, kernel: Kernel, programs: int, arguments: int, index: int, stream: int
    ) -> None:
        self.programs.append(programs)
        (address,) = (ctypes.c_void_p * 1).from_address(arguments)
        _run(self, address, self.variants[kernel.function - 1])


def _tokens(view: View, halves: int) -> Tensor:
    """What a tensor map shows, `[T, H, 128]`."""
    assert view.box == (64, 64, halves, 1)
    half, tokens, count, heads = view.sizes
    token, apart, head = (step // 2 for step in view.strides)
    shape, strides = [tokens, heads, count, half], [token, head, apart, 1]
    return at(view.pointer, torch.bfloat16, shape, strides).flatten(2)


def _run(device: Emulator, address: int, variant: Variant) -> None:
    given = Arguments.from_address(address)
    views = [device.maps[address + 128 * i] for i in range(3)]
    halves = (2, 2, variant.consumers)
    q, k, v = (_tokens(view, n) for view, n in zip(views, halves, strict=True))
    rows, tokens, heads = given.rows, given.tokens, given.HV
    assert v.shape == (tokens, heads, DIM) and heads == q.shape[1] * given.R
    assert device.programs[-1] == (rows + 1) * heads * (2 // variant.consumers)
    assert given.scale == torch.tensor(DIM**-0.5)
    i32 = torch.int32
    src, dst = (at(p, i32, [rows], [1]).clone() for p in (given.src, given.dst))
    bounds = at(given.query_start_loc, i32, [rows + 1], [1]).clone()
    assert (given.points > 0) == variant.track
    track = at(given.track, i32, [given.points, 3], [3, 1]).clone() if variant.track else None
    wide = [torch.float32 if w else torch.bfloat16 for w in (variant.wide_a, variant.wide_b)]
    a = at(given.a, wide[0], [tokens, heads], [given.a_t, 1])
    b = at(given.b, wide[1], [tokens, heads], [given.b_t, 1])
    law = [at(p, torch.float32, [heads], [1]) for p in (given.A_log, given.dt_bias)]
    gate = None if variant.ready else Gate(GateKind.SCALAR, *law, beta_scale=given.beta_scale)
    ids = [*src.tolist(), *dst.tolist(), *([] if track is None else track[:, 2].tolist())]
    shape, strides = [max([0, *ids]) + 1, heads, DIM, DIM], [given.s_slot, given.s_h, DIM, 1]
    assert given.state % 8 == given.s_slot % 2 == given.s_h % 2 == 0
    state = at(given.state, torch.float32, shape, strides)
    out, after = reference.delta_rule_prefill(
        q, k, v, a, b, gate, state.clone(), src, dst, bounds, tokens,
        qk_l2norm=variant.l2, track=track, layout="VK",
    )  # fmt: skip
    assert given.out % 16 == given.out_t * 2 % 16 == 0 and (given.out_h * 2 % 16 == 0 or heads == 1)
    at(given.out, torch.bfloat16, [tokens, heads, DIM], [given.out_t, given.out_h, 1]).copy_(out)
    live = (bounds[1:] > bounds[:-1]).tolist()
    written = {slot for slot, alive in zip(dst.tolist(), live, strict=True) if alive}
    written |= set() if track is None else set(track[:, 2].tolist())
    for slot in (each for each in written if each >= 0):
        state[slot] = after[slot].float()


@contextmanager
def emulated() -> Iterator[Emulator]:
    """Let prefill plan and launch on the host."""
    device = Emulator()
    with (
        patch.object(prefill, "KERNELS", device),
        patch.object(prefill, "driver", lambda: device),
        patch.object(prefill, "_raw_stream", lambda index: 0),
        patch.object(torch.cuda, "current_device", lambda: -1),
    ):
        yield device
