"""Slots that stay on the device serve every mode, and nobody looks at them."""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hal.runtime.batch import Batch, DeviceSlots, Mode
from support.backends import Bound, backend_for
from support.bound import GDN_CONFIG
from support.captured import (
    SLOTS,
    Rig,
    acceptance,
    bound_for_graphs,
    decode_batch,
    on_device,
    put_back,
    same,
    states,
    verify_batch,
)


@pytest.fixture(params=["gated_delta_net", "mamba2", "short_conv", "cca"], scope="module")
def bound(request: pytest.FixtureRequest) -> Bound:
    return bound_for_graphs(request.param, track=True)


def extend_batch(rng: Random, rows: int) -> Batch:
    """Rows of 1 to 5 tokens that go on, start or fork, some with a track point."""
    free = rng.sample(range(2, SLOTS + 1), SLOTS - 1)
    src, dst, start, lengths, track = [], [], [], [], []
    for row in range(min(rows, 3)):
        slot = free.pop()
        src.append(rng.choice((slot, 1, -1)))
        dst.append(slot)
        start.append(rng.randint(3, 40) if src[-1] >= 0 else 0)
        lengths.append(rng.randint(1, 5))
        if rng.random() < 0.5 and len(free) > 3:
            track.append((row, start[-1] + rng.randint(1, lengths[-1]), free.pop(0)))
    mode = rng.choice((Mode.EXTEND, Mode.MIXED, Mode.DRAFT_EXTEND))
    return Batch(mode, lengths, start, src, dst, track)


MAKERS: list[Callable[[Random, int], Batch]] = [decode_batch, verify_batch, extend_batch]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 20), rows=st.integers(0, 5), kind=st.sampled_from([0, 1, 2]))
def test_slots_on_the_device_give_what_slots_on_the_host_give(
    bound: Bound, seed: int, rows: int, kind: int
) -> None:
    rng = Random(seed)
    batch = MAKERS[kind](rng, rows)
    given, counts = bound.inputs(batch.tokens), None
    if batch.mode is Mode.VERIFY:
        counts = acceptance(rng, batch)[0]

    def run(step: Batch) -> Tensor:
        bound.backend.begin(step)
        out = bound.call(given)
        if counts is not None:
            bound.backend.commit(counts)
        return out

    with put_back(bound) as want:
        out = run(batch)
    assert torch.equal(run(on_device(batch)), out)
    assert same(states(bound), want)


def test_a_tracked_decode_row_copies_the_slot_that_the_device_knows() -> None:
    bound = bound_for_graphs("gated_delta_net", track=True)
    batch = Batch(Mode.DECODE, [1, 1], [5, 7], [2, 3], [2, 3], [(1, 8, 5)])
    bound.backend.begin(on_device(batch))
    bound.call(bound.inputs(2))
    assert all(torch.equal(tensor[5], tensor[3]) for tensor in states(bound))


@pytest.mark.parametrize("replayed", [False, True])
def test_a_tracked_decode_row_that_the_device_knows_to_have_no_dst_keeps_nothing(
    replayed: bool,
) -> None:
    bound = bound_for_graphs("gated_delta_net", track=True)
    rig = Rig(bound, Mode.DECODE, (4,))
    ids = (torch.tensor([2, 3], dtype=torch.int32), torch.tensor([2, -1], dtype=torch.int32))
    batch = Batch(
        Mode.DECODE, [1, 1], [5, 7], track=[(1, 8, 5), (0, 6, 4)], held=DeviceSlots(*ids, SLOTS)
    )
    before = [tensor.clone() for tensor in states(bound)]
    if replayed:
        rig.replay(batch, bound.inputs(2))
    else:
        bound.backend.begin(batch)
        bound.call(bound.inputs(2))
    for tensor, old in zip(states(bound), before, strict=True):
        assert torch.equal(tensor[4], tensor[2])
        assert torch.equal(tensor[5], old[5])


class Unread(Tensor):
    """A tensor that nobody may bring to the host."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in {"tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__index__"}:
            raise AssertionError(f"{func.__name__} would wait for the device")
        return super().__torch_function__(func, types, args, kwargs or {})


def unread(*ids: int) -> Tensor:
    return torch.tensor(ids, dtype=torch.int32).as_subclass(Unread)


def held(src: Tensor, dst: Tensor, bound: int = SLOTS) -> DeviceSlots:
    return DeviceSlots(src, dst, bound)


@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.EXTEND, Mode.VERIFY])
def test_begin_and_replay_never_bring_them_to_the_host(mode: Mode) -> None:
    bound = bound_for_graphs("short_conv", track=True)
    backend, slots = bound.backend, held(unread(2, -1), unread(2, 3))
    batch = Batch(mode, [1, 1], [4, 0], held=slots)
    with pytest.raises(AssertionError, match="would wait for the device"):
        slots.src.tolist()
    backend.begin(batch)
    backend.abandon()
    if mode is not Mode.EXTEND:
        with backend.capture(mode, 4, record=False) as captured:
            pass
        backend.stage(batch)
        assert captured.step is not None
        assert captured.step.src.tolist() == [2, -1, -1, -1]
        assert captured.step.dst.tolist() == [2, 3, -1, -1]


def test_their_shape_dtype_place_and_bound_are_checked() -> None:
    backend = backend_for(GDN_CONFIG)
    good = torch.tensor([1, 2], dtype=torch.int32)
    batch = Batch(Mode.DECODE, [1, 1], [4, 4], held=held(good, good))
    backend.begin(batch)
    cases: list[tuple[DeviceSlots, type[Exception], str]] = [
        (held(good.long(), good), TypeError, "src held is torch.int64, expected torch.int32"),
        (held(good, good[:1]), ValueError, r"2 lengths, dst held is \[1\]"),
        (held(good.to("meta"), good), ValueError, "src held is on meta, the backend on cpu"),
        (held(good, good, 7), ValueError, r"are bounded by 7, pool has slots 1\.\.6"),
    ]
    for slots, error, message in cases:
        with pytest.raises(error, match=message):
            backend.begin(replace(batch, held=slots))


def test_slots_are_given_once() -> None:
    backend = backend_for(GDN_CONFIG)
    ids = torch.tensor([1], dtype=torch.int32)
    twice = Batch(Mode.DECODE, [1], [4], [1], [1], held=held(ids, ids))
    with pytest.raises(ValueError, match="begin: 1 entries in src beside slots held on the device"):
        backend.begin(twice)


def test_a_pad_of_a_decode_is_the_devices_to_mark() -> None:
    backend = backend_for(GDN_CONFIG)
    ids = torch.tensor([1], dtype=torch.int32)
    with pytest.raises(ValueError, match="row 0 has 0 tokens in a DECODE step, expected 1"):
        backend.begin(Batch(Mode.DECODE, [0], [0], held=held(ids, ids)))


def test_what_the_host_knows_is_checked_as_ever() -> None:
    backend = backend_for(GDN_CONFIG, prefix_cache=True)
    ids = torch.tensor([1], dtype=torch.int32)
    for change, message in (
        ({"start": [-1]}, "row 0: length 2, start -1"),
        ({"track": [(0, 5, 9)]}, "slot 9 in track, pool has slots"),
        ({"track": [(0, 5, 3), (0, 6, 3)]}, "slot 3 is a track point of row 0 and a track point"),
        ({"lengths": [300]}, "300 tokens, the backend was built for 256"),
    ):
        fields: dict[str, Any] = {"lengths": [2], "start": [4], **change}
        with pytest.raises(ValueError, match=message):
            backend.begin(Batch(Mode.EXTEND, held=held(ids, ids), **fields))
