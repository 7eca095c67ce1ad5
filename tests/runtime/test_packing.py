"""The packed fields of a step are what its batch says, entry by entry."""

from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.runtime.batch import Batch, Mode
from hal.runtime.packing import Frame, frame_of, pack
from hal.runtime.staging import Ring
from hal.runtime.step import make_step

CPU = torch.device("cpu")


def random_batch(seed: int) -> Batch:
    """Any mode, rows without tokens, ids far below -1, points with and without a slot."""
    rng = Random(seed)
    mode, rows = rng.choice(list(Mode)), rng.randint(0, 5)
    lengths = [1 if mode is Mode.DECODE else rng.randint(0, 4) for _ in range(rows)]
    if mode is Mode.IDLE:
        lengths = [0] * rows
    start = [rng.randint(0, 50) for _ in range(rows)]
    src, dst = ([rng.choice((-(2**40), -1, rng.randint(1, 9))) for _ in range(rows)] for _ in "ab")
    track = [
        (row, start[row] + rng.randint(1, lengths[row]), rng.choice((-1, 3, 7)))
        for row in range(rows)
        if lengths[row]
        for _ in range(rng.randint(0, 2))
    ]
    parents = None
    if mode is Mode.VERIFY and rng.random() < 0.5:
        parents = [[rng.randint(-1, t - 1) for t in range(length)] for length in lengths]
    return Batch(mode, lengths, start, src, dst, track, parents)


def path(parents: list[int], token: int) -> list[int]:
    """The tokens from a root to `token`."""
    found = []
    while token >= 0:
        found.append(token)
        token = parents[token]
    return found[::-1]


@settings(max_examples=300)
@given(st.integers(0, 1 << 30))
def test_a_step_holds_what_its_batch_says(seed: int) -> None:
    batch = random_batch(seed)
    step = make_step(batch, Ring(CPU, 1))
    bounds = [sum(batch.lengths[:row]) for row in range(batch.rows + 1)]
    assert step.query_start_loc.tolist() == bounds
    assert step.start.tolist() == list(batch.start)
    assert (step.rows, step.tokens) == (batch.rows, bounds[-1])
    assert step.max_len == max(batch.lengths, default=0)
    for ids, given_ids in ((step.src, batch.src), (step.dst, batch.dst)):
        for row, slot in enumerate(ids.tolist()):
            named = given_ids[row] if batch.lengths[row] else -1
            assert slot == max(named, -1)
    live = [(row, pos - batch.start[row], slot) for row, pos, slot in batch.track if slot >= 0]
    if batch.mode in (Mode.DECODE, Mode.VERIFY) or not live:
        assert step.track is None
    else:
        assert step.track is not None and step.track.tolist() == [list(point) for point in live]
    if batch.parents is None:
        assert step.parents is None
    else:
        assert step.parents is not None
        assert step.parents.tolist() == [parent for links in batch.parents for parent in links]


@settings(max_examples=300)
@given(st.integers(0, 1 << 30))
def test_every_point_of_a_verify_is_found_from_every_tip(seed: int) -> None:
    batch = random_batch(seed)
    if batch.mode is not Mode.VERIFY:
        return
    step = make_step(batch, Ring(CPU, 1))
    found = []
    for slots, table in step.points:
        for row, slot in enumerate(slots.tolist()):
            begin, length = sum(batch.lengths[:row]), batch.lengths[row]
            links = list(batch.parents[row]) if batch.parents else list(range(-1, length - 1))
            if slot < 0:
                continue
            answers = table[begin : begin + length].tolist()
            counts = [
                count
                for count in range(1, length + 1)
                if all(
                    (path(links, tip)[count - 1] if len(path(links, tip)) >= count else -1) == last
                    for tip, last in enumerate(answers)
                )
            ]
            found.append((row, counts, slot))
    wanted = [(row, pos - batch.start[row], slot) for row, pos, slot in batch.track if slot >= 0]
    assert len(found) == len(wanted)
    for row, count, slot in wanted:
        assert any(r == row and count in counts and s == slot for r, counts, s in found)


@given(st.integers(0, 1 << 30), st.integers(0, 3), st.integers(0, 4))
def test_a_larger_frame_only_adds_neutral_entries(seed: int, rows: int, tokens: int) -> None:
    batch = random_batch(seed)
    own = frame_of(batch)
    tokens = rows if batch.mode is Mode.DECODE else tokens
    frame = Frame(own.rows + rows, own.tokens + tokens, own.track, own.tree, own.points)
    exact = torch.tensor(pack(batch, own), dtype=torch.int32).split_with_sizes(own.sizes)
    wide = torch.tensor(pack(batch, frame), dtype=torch.int32).split_with_sizes(frame.sizes)
    for place, (short, long) in enumerate(zip(exact, wide, strict=True)):
        assert torch.equal(long[: len(short)], short)
        rest = long[len(short) :].tolist()
        if place == 0 and batch.mode is Mode.DECODE:
            assert rest == list(range(own.rows + 1, frame.rows + 1))
        elif place == 0:
            assert rest == [own.tokens] * rows
        else:
            assert rest == [0 if place == 3 else -1] * len(rest)


def test_the_size_of_a_frame_is_that_of_its_buffer() -> None:
    for seed in range(50):
        batch = random_batch(seed)
        assert len(pack(batch, frame_of(batch))) == frame_of(batch).size
