"""Captured decode and verify steps of bound layers give what eager steps give, with any padding."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from torch import Tensor

import hal
from hal.model.spec import DeltaDims, ShortConvDims
from hal.runtime.backend import Backend
from hal.runtime.batch import Batch, DeviceSlots, Mode
from hal.runtime.layers import DeltaLayer, ShortConvLayer
from hal.runtime.params import ShortConvParams
from hal.runtime.staging import Ring
from hal.runtime.step import make_step
from hal_cuda.plugin import MANIFEST
from support.bound import LFM2_CONFIG, delta_params
from support.device_bound import DELTA_CONFIG, Place

pytestmark = pytest.mark.cuda
SLOTS, ROWS, WIDTH = 70, 64, 4
VERIFIES = "delta_rule.verify" in MANIFEST.offers and "conv.verify" in MANIFEST.offers
needs_verify = pytest.mark.skipif(not VERIFIES, reason="the CUDA provider offers no verify yet")


@dataclass(frozen=True)
class Rig:
    """A layer with random states, and how to make its inputs and call it."""

    backend: Backend
    call: Callable[[list[Tensor]], Tensor]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype

    def inputs(self, tokens: int) -> list[Tensor]:
        device = self.backend.device
        return [torch.randn(tokens, *s, device=device).to(self.dtype) for s in self.shapes]

    def states(self) -> list[Tensor]:
        pool = self.backend.pool
        return [pool.tensors(spec.layer)[spec.name] for spec in pool.states]


def backend(config: dict[str, object], dtype: torch.dtype, verify: bool) -> Backend:
    place = Place()
    options: dict[str, object] = {"speculative": hal.Speculative(WIDTH)} if verify else {}
    name = str(dtype).removeprefix("torch.")
    selection = hal.select(
        place.device, config, dtype=name, registry=place.registry, graphs=True, **options
    )
    made = selection.backend(slots=SLOTS, max_batch=ROWS, max_tokens=ROWS * WIDTH)
    for spec in made.pool.states:
        made.pool.tensors(spec.layer)[spec.name].normal_()
    return made


def delta(dtype: torch.dtype, verify: bool = False) -> Rig:
    made = backend(DELTA_CONFIG, dtype, verify)
    spec = next(made.selection.model.stateful_layers())
    assert isinstance(spec.dims, DeltaDims)
    dims, params = spec.dims, delta_params(spec.dims)
    gate, device = params.gate, made.device
    gate = replace(gate, A_log=gate.A_log.to(device), dt_bias=gate.dt_bias.to(device))
    weight, norm = params.conv_weight.to(device, dtype), params.norm_weight
    assert norm is not None
    params = replace(params, gate=gate, conv_weight=weight, norm_weight=norm.to(device))
    layer = made.layer(spec.index, params)
    assert isinstance(layer, DeltaLayer)
    channels = sum(size for _, size in dims.segments)
    shapes = ((channels,), (dims.HV,), (dims.HV,), (dims.HV, dims.V))
    return Rig(made, lambda given: layer(*given), shapes, dtype)


def short_conv(dtype: torch.dtype, verify: bool = False) -> Rig:
    made = backend(LFM2_CONFIG, dtype, verify)
    spec = next(made.selection.model.stateful_layers())
    assert isinstance(spec.dims, ShortConvDims)
    hidden = spec.dims.hidden
    weight = torch.randn(hidden, spec.dims.W, device=made.device).to(dtype)
    layer = made.layer(spec.index, ShortConvParams(weight, None))
    assert isinstance(layer, ShortConvLayer)
    return Rig(made, lambda given: layer(*given), ((hidden,),) * 3, dtype)


MAKERS = {"delta": delta, "short_conv": short_conv}


def batch_of(rng: Random, mode: Mode, rows: int) -> Batch:
    """Rows that go on, start fresh, or fork from slot 1."""
    slots = rng.sample(range(2, SLOTS + 1), rows)
    most = WIDTH if mode is Mode.VERIFY else 1
    lengths = [rng.randint(1 if most == 1 else 0, most) for _ in range(rows)]
    src = [rng.choice((slot, slot, 1) if most > 1 else (slot, slot, 1, -1)) for slot in slots]
    start = [rng.randint(8, 99) if slot >= 0 else 0 for slot in src]
    return Batch(mode, lengths, start, src, slots)


def on_device(batch: Batch, device: torch.device) -> Batch:
    src, dst = (
        torch.tensor(ids, dtype=torch.int32, device=device) for ids in (batch.src, batch.dst)
    )
    return replace(batch, src=(), dst=(), held=DeviceSlots(src, dst, SLOTS))


@contextmanager
def put_back(rig: Rig) -> Iterator[list[Tensor]]:
    """Run the block and restore the states; the list then holds what the block made of them."""
    before, after = [tensor.clone() for tensor in rig.states()], list[Tensor]()
    yield after
    for tensor, old in zip(rig.states(), before, strict=True):
        after.append(tensor.clone())
        tensor.copy_(old)


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def padded(batch: Batch, rows: int) -> Batch:
    gap = rows - batch.rows
    none, zero = (-1,) * gap, (0,) * gap
    return replace(
        batch,
        lengths=(*batch.lengths, *zero),
        start=(*batch.start, *zero),
        src=(*batch.src, *none),
        dst=(*batch.dst, *none),
    )


class Captured:
    """The captured step of one size, warmed up first."""

    def __init__(self, rig: Rig, mode: Mode, rows: int, width: int = 1) -> None:
        self.rig, self.rows, self.width = rig, rows, width
        self.inputs = rig.inputs(rows * width)
        with put_back(rig):
            rig.backend.begin(padded(Batch(mode), rows))
            rig.call(self.inputs)
            if mode is Mode.VERIFY:
                rig.backend.commit([0] * rows)
        with rig.backend.capture(mode, rows, width):
            self.out = rig.call(self.inputs)

    def fill(self, given: list[Tensor]) -> None:
        for static, fresh in zip(self.inputs, given, strict=True):
            static.fill_(float("nan"))
            static[: fresh.shape[0]].copy_(fresh)
        self.out.fill_(float("nan"))

    def eager(self, batch: Batch, given: list[Tensor]) -> Tensor:
        """The same step without a graph, as large as the capture."""
        wide = [t.new_full((self.rows * self.width, *t.shape[1:]), float("nan")) for t in given]
        for whole, part in zip(wide, given, strict=True):
            whole[: part.shape[0]].copy_(part)
        self.rig.backend.begin(padded(batch, self.rows))
        return self.rig.call(wide)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_a_replayed_decode_of_1_to_64_rows_equals_an_eager_one(
    kind: str, dtype: torch.dtype
) -> None:
    rig, rng = MAKERS[kind](dtype), Random(1)
    sizes = {rows: Captured(rig, Mode.DECODE, rows) for rows in (1, 8, 64)}
    for rows in (*range(64, 0, -1), 64, 1, 33, 8):
        batch, given = batch_of(rng, Mode.DECODE, rows), rig.inputs(rows)
        captured = sizes[min(size for size in sizes if size >= rows)]
        with put_back(rig) as want:
            out = captured.eager(batch, given)
        captured.fill(given)
        rig.backend.replay(batch if rows % 2 else on_device(batch, rig.backend.device))
        assert torch.equal(captured.out, out)
        assert not captured.out[rows:].any()
        assert same(rig.states(), want)


@needs_verify
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_a_replayed_verify_of_1_to_64_rows_equals_an_eager_one_and_commits(
    kind: str, dtype: torch.dtype
) -> None:
    rig, rng = MAKERS[kind](dtype, verify=True), Random(2)
    captured = Captured(rig, Mode.VERIFY, ROWS, WIDTH)
    for rows in (64, 40, 63, 1, 0, 17):
        batch = batch_of(rng, Mode.VERIFY, rows)
        given = rig.inputs(batch.tokens)
        accepted = [rng.randint(0, length) for length in batch.lengths]
        with put_back(rig) as want:
            out = captured.eager(batch, given)
            rig.backend.commit(accepted + [0] * (ROWS - rows))
        captured.fill(given)
        before = [tensor.clone() for tensor in rig.states()]
        rig.backend.replay(batch)
        assert same(rig.states(), before)
        counts = torch.tensor(accepted, dtype=torch.int32, device=rig.backend.device)
        rig.backend.commit(counts if rows % 2 else accepted)
        assert torch.equal(captured.out, out)
        assert same(rig.states(), want)


@needs_verify
def test_a_commit_in_the_block_is_part_of_the_graph() -> None:
    rig, rng = delta(torch.bfloat16, verify=True), Random(3)
    warm = Captured(rig, Mode.VERIFY, 8, WIDTH)
    counts = torch.zeros(8, dtype=torch.int32, device=rig.backend.device)
    with rig.backend.capture(Mode.VERIFY, 8, WIDTH):
        rig.call(warm.inputs)
        rig.backend.commit(counts + 1)
    for rows in (8, 3, 5):
        batch = batch_of(rng, Mode.VERIFY, rows)
        given = rig.inputs(batch.tokens)
        accepted = [rng.randint(0, length) for length in batch.lengths]
        with put_back(rig) as want:
            warm.eager(batch, given)
            rig.backend.commit(accepted + [0] * (8 - rows))
        warm.fill(given)
        counts.fill_(9)
        counts[:rows] = torch.tensor([c - 1 for c in accepted], device=counts.device)
        rig.backend.replay(batch)
        assert same(rig.states(), want)


@contextmanager
def no_sync() -> Iterator[None]:
    """An error for every call that waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_steps_and_replays_never_wait_for_the_device() -> None:
    rig, rng = delta(torch.bfloat16), Random(4)
    captured, given = Captured(rig, Mode.DECODE, 8), rig.inputs(5)
    batches = [batch_of(rng, Mode.DECODE, 5) for _ in range(12)]
    held = [on_device(batch, rig.backend.device) for batch in batches]
    with no_sync():
        for batch in (*batches, *held):
            rig.backend.begin(batch)
            rig.call(given)
            rig.backend.replay(batch)
    captured.fill(given)


def test_a_replay_allocates_nothing_and_launches_one_copy_before_its_graph() -> None:
    rig, rng = delta(torch.bfloat16), Random(5)
    Captured(rig, Mode.DECODE, 64)
    batches = [batch_of(rng, Mode.DECODE, 40) for _ in range(6)]
    rig.backend.replay(batches[0])
    torch.cuda.synchronize()
    taken = torch.cuda.memory_stats()["allocation.all.allocated"]
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for batch in batches:
            rig.backend.stage(batch)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    launches = [name for name in names if "LaunchKernel" in name or "cudaMemcpyAsync" in name]
    assert len(launches) <= len(batches), launches
    for batch in batches:
        rig.backend.replay(batch)
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == taken


def test_a_busy_device_copies_every_steps_own_integers() -> None:
    """The copies queue behind a kernel that runs long; the host is rounds of the ring ahead."""
    device, rng = torch.device("cuda:0"), Random(6)
    ring = Ring(device, 4 * ROWS + 1)
    batches = [batch_of(rng, Mode.DECODE, rng.randint(1, ROWS)) for _ in range(20)]
    torch.cuda._sleep(200_000_000)
    steps = [make_step(batch, ring) for batch in batches]
    for step, batch in zip(steps, batches, strict=True):
        assert step.src.tolist() == list(batch.src)
        assert step.dst.tolist() == list(batch.dst)
        assert step.start.tolist() == list(batch.start)


def test_an_engine_may_record_the_block_itself() -> None:
    rig, rng = short_conv(torch.bfloat16), Random(7)
    warm = Captured(rig, Mode.DECODE, 4)
    graph = torch.cuda.CUDAGraph()
    opened = rig.backend.capture(Mode.DECODE, 4, record=False)
    with torch.cuda.graph(graph), opened:
        out = rig.call(warm.inputs)
    for rows in (4, 1, 3):
        batch, given = batch_of(rng, Mode.DECODE, rows), rig.inputs(rows)
        with put_back(rig) as want:
            eager = warm.eager(batch, given)
        warm.fill(given)
        assert not rig.backend.replay(batch).recorded
        graph.replay()
        rig.backend.end()
        assert torch.equal(out, eager)
        assert same(rig.states(), want)
