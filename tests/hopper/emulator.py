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
from hal_cuda.hopper.arguments import CHANNEL_RECORD, RECORD, SQUARE, Arguments
from hal_cuda.hopper.driver import Kernel, View
from hal_cuda.hopper.variant import JOIN, PREFILL, SAFE, Form, Variant

DIM = 128
PROCESSORS = 132


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
    forms: list[Form] = field(default_factory=list)
    programs: list[int] = field(default_factory=list)
    launched: list[tuple[str, int]] = field(default_factory=list)

    @property
    def variants(self) -> list[Variant]:
        """What the kernels that hold states were compiled for."""
        return [variant_of(form) for form in self.forms if form.name == PREFILL]

    def get(self, form: Form, index: int) -> Kernel:
        self.forms.append(form)
        return Kernel(len(self.forms), 512, 0)

    def processors(self, index: int) -> int:
        return PROCESSORS

    def map(self, at: int, view: View) -> None:
        assert at % 64 == 0
        assert view.pointer % 16 == 0
        assert all(step % 16 == 0 and 0 < step < 2**40 for step in view.strides)
        assert all(0 < n <= 256 for n in view.box) and view.box[0] * 2 <= 128
        self.maps[at] = view

    def move(self, at: int, pointer: int) -> None:
        self.map(at, replace(self.maps[at], pointer=pointer))

    def chain(self, kernel: Kernel, programs: int, arguments: int, stream: int) -> None:
        assert self.launched, "nothing to be chained to"
        self.launch(kernel, programs, arguments, 0, stream)

    def launch(
        self, kernel: Kernel, programs: int, arguments: int, index: int, stream: int
    ) -> None:
        (address,) = (ctypes.c_void_p * 1).from_address(arguments)
        form, given = self.forms[kernel.function - 1], Arguments.from_address(address)
        self.programs.append(programs)
        self.launched.append((form.name, given.phase))
        if form.name == PREFILL and not dict(form.defines)["PREPARED"]:
            assert programs == (given.rows + 1) * given.HV * (2 // variant_of(form).consumers)
            _run(self, address, variant_of(form))
            return
        _check_cut(form, given, programs)
        if form.name == PREFILL and given.phase:
            _run(self, address, variant_of(form))


def variant_of(form: Form) -> Variant:
    """What a form that holds states serves."""
    names = ("NCONS", "TRACK", "GATE_READY", "A_F32", "B_F32", "USE_L2", "PREPARED")
    given = dict(form.defines)
    count, *flags = (given[name] for name in names)
    return Variant(count, *map(bool, flags), channel=given["GATE"])


def _check_cut(form: Form, given: Arguments, programs: int) -> None:
    """What the kernels of a cut rely on: the blocks of each, and room for what passes between."""
    rows, heads, parts = given.rows, given.HV, given.parts
    items = (given.tokens // 64 + rows) * heads
    channel = dict(form.defines)["CHANNEL"]
    walks = {0: rows * (2 * parts - 3), 1: rows * max(parts - 1, 1) + 1}[given.phase]
    assert (
        programs
        == {
            "gdn_prepare": min(items, 3 * PROCESSORS),
            "kda_prepare": items,
            JOIN: rows * heads * 8,
            PREFILL: walks * heads * 2 // dict(form.defines).get("NCONS", 1),
        }[form.name]
    )
    fill(given.records, items * (CHANNEL_RECORD if channel else RECORD))
    assert given.records % 16 == 0
    if parts > 1:
        assert given.waves > 0 and given.sums % 16 == 0
        fill(given.sums, rows * 2 * parts * heads * SQUARE * 4)


def fill(pointer: int, size: int) -> None:
    """Write all of a workspace, so that one which is too short is found."""
    ctypes.memset(pointer, 0x7F, size)


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
    assert given.scale == torch.tensor(DIM**-0.5)
    i32 = torch.int32
    src, dst = (at(p, i32, [rows], [1]).clone() for p in (given.src, given.dst))
    bounds = at(given.query_start_loc, i32, [rows + 1], [1]).clone()
    assert (given.points > 0) == variant.track
    track = at(given.track, i32, [given.points, 3], [3, 1]).clone() if variant.track else None
    wide = [torch.float32 if w else torch.bfloat16 for w in (variant.wide_a, variant.wide_b)]
    wide_a = [given.a_h, 1] if variant.channel else [1]
    if variant.channel:
        assert given.a % (2 * wide[0].itemsize) == given.a_t % 2 == given.a_h % 2 == 0
    a = at(given.a, wide[0], [tokens, heads, DIM][: 1 + len(wide_a)], [given.a_t, *wide_a])
    b = at(given.b, wide[1], [tokens, heads], [given.b_t, 1])
    gate = None if variant.ready else _gate(given, variant)
    if not rows:
        at(given.out, torch.bfloat16, [tokens, heads, DIM], [given.out_t, given.out_h, 1]).zero_()
        return
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


def _gate(given: Arguments, variant: Variant) -> Gate:
    """The gate whose numbers the kernels read."""
    heads = given.HV
    wide = [heads, DIM] if variant.channel else [heads]
    strides = [DIM, 1] if variant.channel else [1]
    A_log = at(given.A_log, torch.float32, [heads], [1])
    dt_bias = at(given.dt_bias, torch.float32, wide, strides)
    kind = [GateKind.SCALAR, None, GateKind.CHANNEL, GateKind.SAFE][variant.channel]
    assert kind is not None
    bound = given.lower_bound if variant.channel == SAFE else None
    return Gate(kind, A_log, dt_bias, bound, given.beta_scale)


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
