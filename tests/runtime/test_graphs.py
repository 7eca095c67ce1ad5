"""A captured step replays any batch with room in it as an eager step would run it, bit for bit."""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hal.errors import StepOrderError
from hal.runtime import graphs
from hal.runtime.batch import Batch, Mode
from hal.runtime.packing import Frame
from hal.runtime.tape import Tape
from support.bound import FAMILIES
from support.captured import (
    SLOTS,
    WIDTH,
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

DECODED = sorted(FAMILIES)
VERIFIED = sorted(set(FAMILIES) - {"zamba"})
"""Zamba's scans run head by head, which has no verify."""
COUNTS = st.lists(st.integers(0, SLOTS), min_size=1, max_size=4)
"""Live rows of steps one after the other, so that tails of larger steps go stale."""


@pytest.fixture(params=DECODED, scope="module")
def decoding(request: pytest.FixtureRequest) -> Rig:
    return Rig(bound_for_graphs(request.param), Mode.DECODE, (2, 4, 8))


@pytest.fixture(params=VERIFIED, scope="module")
def verifying(request: pytest.FixtureRequest) -> Rig:
    return Rig(bound_for_graphs(request.param), Mode.VERIFY, (2, 8), WIDTH)


@pytest.fixture(params=["gated_delta_net", "mamba2", "short_conv", "cca"], scope="module")
def trees(request: pytest.FixtureRequest) -> Rig:
    """Trees with track points."""
    bound = bound_for_graphs(request.param, tree=True, track=True)
    return Rig(bound, Mode.VERIFY, (2, 8), WIDTH)


def eager(rig: Rig, batch: Batch, given: list[Tensor], rows: int) -> Tensor:
    """The step without a graph, with pads behind it up to the size of the captured one.

    torch rounds an element by its place in a vector, so that only tensors of one size are equal.
    """
    gap, tokens = rows - batch.rows, rows * rig.width if batch.parents is None else batch.tokens
    none = (-1,) * gap
    if batch.mode is Mode.DECODE or batch.parents is None:
        batch = replace(
            batch,
            lengths=(*batch.lengths, *(0,) * gap),
            start=(*batch.start, *(0,) * gap),
            src=(*batch.src, *none),
            dst=(*batch.dst, *none),
        )
    padded = [tensor.new_full((tokens, *tensor.shape[1:]), float("nan")) for tensor in given]
    for whole, part in zip(padded, given, strict=True):
        whole[: part.shape[0]].copy_(part)
    rig.bound.backend.begin(batch)
    return rig.bound.call(padded)[: given[0].shape[0]].clone()


def close(got: Tensor, want: Tensor) -> bool:
    """Equal within a few roundings of float32."""
    return float((got - want).norm()) <= 1e-6 * float(want.norm())


def check_decode(rig: Rig, batch: Batch, replayed: Batch) -> None:
    """Eager first, then replayed from the same states; pads are exactly zero."""
    given = rig.bound.inputs(batch.rows)
    with put_back(rig.bound) as alone:
        rig.bound.backend.begin(batch)
        unpadded = rig.bound.call(given)
    with put_back(rig.bound) as want:
        out = eager(rig, batch, given, rig.fitting(batch))
    _, got = rig.replay(replayed, given)
    assert torch.equal(got[: batch.rows], out)
    assert close(out, unpadded)
    assert not got[batch.rows :].any()
    assert same(states(rig.bound), want)
    assert same(want, alone)


def check_verify(rig: Rig, batch: Batch, rng: Random) -> None:
    """As `check_decode`; the commit's counts stay on the host or on the device, in any size."""
    given, backend = rig.bound.inputs(batch.tokens), rig.bound.backend
    counts, tips = acceptance(rng, batch)
    backend.abandon()  # of an example that failed
    with put_back(rig.bound) as want:
        out = eager(rig, batch, given, rig.fitting(batch))
        gap = [] if tips is not None else [0] * (rig.fitting(batch) - batch.rows)
        backend.commit(counts + gap, tips)
    before = [tensor.clone() for tensor in states(rig.bound)]
    captured, got = rig.replay(batch if rng.random() < 0.5 else on_device(batch), given)
    assert same(states(rig.bound), before)
    assert torch.equal(got[: batch.tokens], out) or (
        tips is not None and close(got[: batch.tokens], out)
    )
    assert not got[batch.tokens :].any()
    garbage = [7] * (captured.rows - batch.rows)
    pick = rng.choice(("host", "live", "all"))
    more = garbage if pick == "all" else []
    passed = counts if pick == "host" else torch.tensor(counts + more, dtype=torch.int32)
    if tips is not None and pick != "host":
        tips = torch.tensor(tips + more, dtype=torch.int32)
    backend.commit(passed, tips)
    assert same(states(rig.bound), want)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1 << 20), counts=COUNTS)
def test_a_replayed_decode_of_any_size_equals_an_eager_one(
    decoding: Rig, seed: int, counts: list[int]
) -> None:
    torch.manual_seed(seed)
    rng = Random(seed)
    for rows in counts:
        batch = decode_batch(rng, rows)
        held = rng.random() < 0.5
        check_decode(decoding, batch, on_device(batch) if held else batch)
    assert decoding.runs == len(decoding.sizes)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1 << 20), counts=COUNTS)
def test_a_replayed_verify_of_any_size_equals_an_eager_one_and_commits(
    verifying: Rig, seed: int, counts: list[int]
) -> None:
    torch.manual_seed(seed)
    rng = Random(seed)
    for rows in counts:
        check_verify(verifying, verify_batch(rng, rows), rng)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1 << 20), counts=COUNTS)
def test_a_replayed_tree_equals_an_eager_one_its_track_points_too(
    trees: Rig, seed: int, counts: list[int]
) -> None:
    torch.manual_seed(seed)
    rng = Random(seed)
    for rows in counts:
        check_verify(trees, verify_batch(rng, rows, tree=rng.random() < 0.7, track=True), rng)


def test_an_eager_step_between_replays_changes_nothing(verifying: Rig) -> None:
    rng = Random(3)
    for rows in (4, 2, 3):
        check_verify(verifying, verify_batch(rng, rows), rng)
        check_verify(verifying, verify_batch(rng, 1), rng)


def test_a_commit_in_the_block_is_part_of_every_replay() -> None:
    """Counts are found on the device; what stands behind the live rows may be garbage."""
    bound = bound_for_graphs("gated_delta_net", track=True)
    backend, inputs = bound.backend, bound.inputs(4 * WIDTH)
    counts = torch.zeros(4, dtype=torch.int32)
    with backend.capture(Mode.VERIFY, 4, WIDTH) as captured:
        bound.call(inputs)
        backend.commit(counts + 1)
    assert captured.committed
    rng = Random(5)
    for rows in (4, 1, 0, 3):
        batch = verify_batch(rng, rows, track=True)
        accepted, _ = acceptance(rng, batch)
        with put_back(bound) as want:
            backend.begin(batch)
            bound.call([tensor[: batch.tokens] for tensor in inputs])
            backend.commit(accepted)
        counts.fill_(9)
        counts[:rows] = torch.tensor([count - 1 for count in accepted], dtype=torch.int32)
        backend.replay(batch)
        assert same(states(bound), want)
        with pytest.raises(StepOrderError, match="commit without a verify"):
            backend.commit(accepted)


def test_a_commit_in_the_block_takes_no_counts_of_the_host() -> None:
    bound = bound_for_graphs("short_conv")
    with pytest.raises(ValueError, match="a commit in the block takes counts and tips on the dev"):
        with bound.backend.capture(Mode.VERIFY, 1, 2):
            bound.call(bound.inputs(2))
            bound.backend.commit([0])
    with pytest.raises(StepOrderError, match="no VERIFY step was captured"):
        bound.backend.replay(Batch(Mode.VERIFY))


def test_tracked_rows_of_a_replayed_decode_are_stored() -> None:
    bound = bound_for_graphs("gated_delta_net", track=True)
    rig = Rig(bound, Mode.DECODE, (4,))
    batch = Batch(Mode.DECODE, [1, 1], [5, 7], [2, 3], [2, 3], [(1, 8, 5), (0, 6, 4), (0, 6, -1)])
    rig.replay(batch, bound.inputs(2))
    for tensor in states(bound):
        assert torch.equal(tensor[5], tensor[3])
        assert torch.equal(tensor[4], tensor[2])
    check_decode(rig, batch, on_device(batch))
    after = [tensor.clone() for tensor in states(bound)]
    rig.replay(Batch(Mode.DECODE), bound.inputs(0))
    assert same(states(bound), after)


@pytest.mark.parametrize("ends", [True, False])
def test_an_engine_that_runs_its_own_graph_ends_the_step_to_store_what_is_tracked(
    ends: bool,
) -> None:
    bound = bound_for_graphs("short_conv", track=True)
    backend, inputs = bound.backend, bound.inputs(2)
    with backend.capture(Mode.DECODE, 2, record=False) as captured:
        out = bound.call(inputs)
    assert not captured.recorded
    out.fill_(7)
    before = [tensor.clone() for tensor in states(bound)]
    backend.replay(Batch(Mode.DECODE, [1], [5], [2], [2], [(0, 6, 4)]))
    assert (out == 7).all() and same(states(bound), before)
    for tensor in states(bound):
        tensor[2] = 3
    if ends:
        backend.end()
    else:
        backend.begin(Batch(Mode.IDLE))
    assert all((tensor[4] == 3).all() for tensor in states(bound))


@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.VERIFY])
def test_a_graph_of_the_engine_around_the_block_rewrites_no_metadata(mode: Mode) -> None:
    backend, engine = bound_for_graphs("short_conv").backend, Tape()
    opened = backend.capture(mode, 4, record=False)
    with engine, opened as captured:
        pass
    batch = Batch(mode, [1, 1], [9, 9], [2, 3], [2, 3])
    backend.stage(batch)
    want = captured.packed.clone()
    engine.replay()
    assert torch.equal(captured.packed, want)
    assert captured.step is not None and captured.step.pads is not None
    assert captured.step.pads.tolist() == [False, False, True, True]


def neutral(batch: Batch, frame: Frame) -> dict[str, list[int]]:
    """What every field has to hold, written down field by field."""
    gap = frame.rows - batch.rows
    empty = [length == 0 for length in batch.lengths]
    bounds = list(range(frame.rows + 1))
    if batch.mode is Mode.VERIFY:
        bounds = [sum(batch.lengths[:row]) for row in range(batch.rows + 1)]
        bounds += [bounds[-1]] * gap
    fields = {
        "query_start_loc": bounds,
        "src": [-1 if e else s for e, s in zip(empty, batch.src, strict=True)] + [-1] * gap,
        "dst": [-1 if e else s for e, s in zip(empty, batch.dst, strict=True)] + [-1] * gap,
        "start": [*batch.start, *[0] * gap],
    }
    if frame.tree:
        links = batch.parents or [list(range(-1, length - 1)) for length in batch.lengths]
        flat = [parent for row in links for parent in row]
        fields["parents"] = flat + [-1] * (frame.tokens - len(flat))
    if frame.points:
        slots = [-1] * frame.rows
        for row, _, slot in batch.track:
            slots[row] = slot
        fields["slots"] = slots
    return fields


def read(captured: graphs.Captured) -> dict[str, list[int]]:
    """The fields as a kernel would find them, the tables behind the live tokens cut off."""
    step = captured.step
    assert step is not None
    names = ("query_start_loc", "src", "dst", "start")
    fields = {name: getattr(step, name).tolist() for name in names}
    if step.parents is not None:
        fields["parents"] = step.parents.tolist()
    for slots, _ in step.points:
        fields["slots"] = slots.tolist()
    return fields


def check_fields(rig: Rig, seed: int) -> None:
    """Shrinking steps, each of which leaves a longer tail; no layer's result is looked at."""
    rng = Random(seed)
    backend = rig.bound.backend
    for rows in (5, 3, 1, 0):
        if rig.mode is Mode.DECODE:
            batch = decode_batch(rng, rows)
        else:
            batch = verify_batch(rng, rows, tree=True, track=True)
        captured = backend.stage(batch)
        backend.abandon()
        assert read(captured) == neutral(batch, captured.frame)
        tables = [table for _, table in captured.step.points] if captured.step else []
        assert all((table[batch.tokens :] == -1).all() for table in tables)


def one_size(mode: Mode) -> Rig:
    bound = bound_for_graphs("short_conv", tree=True, track=True)
    return Rig(bound, mode, (8,), WIDTH if mode is Mode.VERIFY else 1)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 20))
@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.VERIFY])
def test_every_field_is_neutral_behind_the_batch_after_a_larger_one(mode: Mode, seed: int) -> None:
    check_fields(one_size(mode), seed)


Pack = Callable[[Batch, Frame], Any]


def leave_stale(pack: Pack, field: int) -> Pack:
    """A mutant of `pack`: one field keeps what the step before left behind this one's rows."""
    last: dict[Frame, Any] = {}

    def packed(batch: Batch, frame: Frame) -> Any:
        values = pack(batch, frame)
        old = last.get(frame)
        if old is not None:
            sizes = frame.sizes
            begin, by_token = sum(sizes[:field]), sizes[field] == frame.tokens != frame.rows
            live = batch.tokens if by_token else batch.rows + (field == 0)
            values[begin + live : begin + sizes[field]] = old[begin + live : begin + sizes[field]]
        last[frame] = values[:]
        return values

    return packed


NAMES = ("query_start_loc", "src", "dst", "start", "track", "parents", "slots", "table")
FIELDS = {name: place for place, name in enumerate(NAMES) if name != "track"}
"""Places in the buffer of a VERIFY step; a captured one has no points of an EXTEND."""


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_a_stale_tail_of_any_field_is_seen(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "pack", leave_stale(graphs.pack, FIELDS[field]))
    with pytest.raises(AssertionError):
        for seed in range(20):
            check_fields(one_size(Mode.VERIFY), seed)


@pytest.mark.parametrize("field", ["src", "dst"])
def test_a_stale_slot_behind_a_decode_is_seen_in_outputs_or_states(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "pack", leave_stale(graphs.pack, FIELDS[field]))
    rig = Rig(bound_for_graphs("gated_delta_net"), Mode.DECODE, (8,))
    rng = Random(1)
    with pytest.raises(AssertionError):
        for rows in (5, 1) * 5:
            batch = decode_batch(rng, rows)
            check_decode(rig, batch, batch)


def test_stale_bounds_behind_a_verify_are_seen_in_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "pack", leave_stale(graphs.pack, FIELDS["query_start_loc"]))
    rig = Rig(bound_for_graphs("gated_delta_net"), Mode.VERIFY, (8,), WIDTH)
    rng = Random(1)
    with pytest.raises((AssertionError, ValueError)):
        for rows in (5, 1) * 3:
            check_verify(rig, verify_batch(rng, rows), rng)


def test_addresses_never_move(decoding: Rig) -> None:
    def addresses(rows: int) -> list[int]:
        step = decoding.bound.backend.stage(decode_batch(Random(0), rows)).step
        assert step is not None
        fields = (step.query_start_loc, step.src, step.dst, step.start, step.pads)
        tensors = [*fields, *decoding.inputs[8], decoding.results[8]]
        return [tensor.data_ptr() for tensor in tensors if tensor is not None]

    first = addresses(6)
    assert all(addresses(rows) == first for rows in (5, 6, 5))
