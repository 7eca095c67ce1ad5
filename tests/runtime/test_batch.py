"""A step is checked on the host, whole, before anything of it can run."""

from dataclasses import replace
from random import Random
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.runtime.batch import LAST_POSITION, Batch, Limits, Mode, check

LIMITS = Limits(
    slots=8,
    max_batch=4,
    max_tokens=32,
    modes=frozenset({Mode.DECODE, Mode.EXTEND, Mode.MIXED, Mode.IDLE}),
    track=4,
)
GOOD = Batch(Mode.MIXED, (5, 1, 0), (0, 7, 3), (-1, 3, 4), (2, 3, 4))


def refused(batch: Batch, limits: Limits = LIMITS) -> str:
    """The message of the refusal."""
    with pytest.raises(ValueError) as caught:
        check(batch, limits)
    return str(caught.value)


def test_a_mixed_step_with_an_empty_row_is_legal() -> None:
    check(GOOD, LIMITS)


@pytest.mark.parametrize("mode", sorted(LIMITS.modes))
def test_no_rows_are_legal_in_every_mode(mode: Mode) -> None:
    check(Batch(mode), LIMITS)


def test_a_word_outside_the_modes_is_an_invalid_forward_mode() -> None:
    stray = replace(GOOD, mode=cast("Mode", "SPLIT_PREFILL"))
    assert refused(stray) == "Invalid forward mode: SPLIT_PREFILL"


@pytest.mark.parametrize("mode", [Mode.VERIFY, Mode.DRAFT_EXTEND])
def test_a_declared_mode_that_was_not_selected_is_refused_by_name(mode: Mode) -> None:
    assert refused(replace(GOOD, mode=mode)) == (
        f"begin: mode {mode} was not selected for, served are DECODE, EXTEND, IDLE, MIXED"
    )


@pytest.mark.parametrize("name", ["start", "src", "dst"])
def test_every_per_row_field_has_an_entry_a_row(name: str) -> None:
    assert refused(replace(GOOD, **{name: (-1,)})) == f"begin: 3 lengths, 1 entries in {name}"


def test_a_step_beyond_the_backend_shows_both_numbers() -> None:
    rows = Batch(Mode.EXTEND, (1,) * 5, (0,) * 5, (-1,) * 5, (-1,) * 5)
    assert refused(rows) == "begin: 5 rows, the backend was built for 4"
    tokens = Batch(Mode.EXTEND, (33,), (0,), (-1,), (1,))
    assert refused(tokens) == "begin: 33 tokens, the backend was built for 32"


def test_negative_lengths_and_positions_are_refused() -> None:
    assert refused(replace(GOOD, lengths=(5, -1, 0))) == (
        "begin: row 1: length -1, start 7: expected >= 0"
    )
    assert refused(replace(GOOD, start=(0, -7, 0))) == (
        "begin: row 1: length 1, start -7: expected >= 0"
    )
    going_on = Batch(Mode.EXTEND, (5, -1), (8, 7), (2, 3), (2, 3))
    assert refused(going_on) == "begin: row 1: length -1, start 7: expected >= 0"


def test_a_fresh_row_starts_at_position_zero() -> None:
    assert refused(replace(GOOD, start=(2, 7, 3))) == "begin: row 0 starts at 2 without a src slot"


def test_a_decode_row_has_one_token_unless_it_is_padding() -> None:
    check(Batch(Mode.DECODE, (1, 0, 1), (3, 0, 0), (1, -1, -1), (1, -1, -1)), LIMITS)
    two = Batch(Mode.DECODE, (2,), (3,), (1,), (1,))
    assert refused(two) == "begin: row 0 has 2 tokens in a DECODE step, expected 1"
    live = Batch(Mode.DECODE, (0,), (3,), (1,), (1,))
    assert refused(live) == "begin: row 0 has 0 tokens in a DECODE step, expected 1"


def test_an_idle_step_has_no_tokens() -> None:
    check(Batch(Mode.IDLE, (0,), (0,), (-1,), (-1,)), LIMITS)
    assert refused(Batch(Mode.IDLE, (1,), (0,), (-1,), (1,))) == (
        "begin: row 0 has 1 tokens in an IDLE step"
    )


@pytest.mark.parametrize("slot", [0, 9, 1 << 31])
@pytest.mark.parametrize("name", ["src", "dst"])
def test_a_slot_outside_the_pool_is_refused_not_clamped(name: str, slot: int) -> None:
    slots = (-1, slot, 4)
    assert refused(replace(GOOD, **{name: slots})) == (
        f"begin: slot {slot} in {name}, pool has slots 1..8"
    )


@pytest.mark.parametrize("slot", [0, 9, 1 << 31])
@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.EXTEND])
@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_slot_outside_the_pool_is_seen_among_rows_that_all_go_on(
    mode: Mode, slot: int, row: int
) -> None:
    good = Batch(mode, (1, 1, 1), (4, 4, 4), (2, 3, 4), (2, 3, 4))
    check(good, LIMITS)
    stray = tuple(slot if place == row else good.src[place] for place in range(3))
    for names in (("src",), ("dst",), ("src", "dst")):
        assert refused(replace(good, **dict.fromkeys(names, stray))) == (
            f"begin: slot {slot} in {names[0]}, pool has slots 1..8"
        )


def test_two_rows_with_one_dst_are_refused() -> None:
    assert refused(replace(GOOD, dst=(3, 3, 4))) == "begin: slot 3 is dst of row 0 and dst of row 1"


def test_a_row_that_reads_what_another_writes_is_a_race() -> None:
    raced = replace(GOOD, src=(-1, 2, 4))
    assert refused(raced) == "begin: row 1 reads slot 2, which row 0 writes"


def test_many_rows_may_fork_from_one_cached_slot() -> None:
    check(Batch(Mode.EXTEND, (2, 3), (8, 8), (5, 5), (1, 2)), LIMITS)


def test_a_row_without_tokens_may_name_live_slots() -> None:
    check(Batch(Mode.EXTEND, (2, 0), (0, 0), (-1, 1), (1, 1)), LIMITS)


def test_track_points_are_inside_their_row_on_the_grid_and_alone_in_their_slot() -> None:
    base = Batch(Mode.EXTEND, (8, 2), (4, 0), (1, -1), (1, 2))
    check(replace(base, track=((0, 8, 5), (0, 12, 6), (9, 9, -1))), LIMITS)
    cases = {
        ((0, 13, 5),): "begin: track point (row 0, count 9), row 0 has 8 tokens",
        ((0, 4, 5),): "begin: track point (row 0, count 0), row 0 has 8 tokens",
        ((0, 9, 5),): "begin: track point (row 0, position 9) is not a multiple of 4",
        ((2, 4, 5),): "begin: track point of row 2, the batch has 2 rows",
        ((0, 8, 0),): "begin: slot 0 in track, pool has slots 1..8",
        ((0, 12, 1),): "begin: slot 1 is dst of row 0 and a track point of row 0",
        ((0, 8, 5), (0, 12, 5)): (
            "begin: slot 5 is a track point of row 0 and a track point of row 0"
        ),
    }
    for track, message in cases.items():
        assert refused(replace(base, track=track)) == message


def test_a_track_point_lies_on_the_grid_of_its_row_too_or_at_its_end() -> None:
    base = Batch(Mode.EXTEND, (8,), (2,), (1,), (1,))
    assert refused(replace(base, track=((0, 4, 5),))) == (
        "begin: track point (row 0, position 4) is 2 tokens into the row, expected a multiple of 4 "
        "or its end, 8: start the row at a multiple of 4 or end it there"
    )
    check(replace(base, lengths=(6,), track=((0, 8, 5),)), LIMITS)
    check(replace(base, track=((0, 4, 5),)), replace(LIMITS, track=1))


def test_no_row_reads_a_slot_that_a_track_point_writes() -> None:
    own = Batch(Mode.EXTEND, (4,), (4,), (1,), (2,), track=((0, 8, 1),))
    assert refused(own) == "begin: row 0 reads slot 1, which a track point of row 0 writes"


def test_tracking_that_was_not_selected_is_refused() -> None:
    point = Batch(Mode.EXTEND, (4,), (0,), (-1,), (1,), track=((0, 4, 2),))
    assert refused(point, replace(LIMITS, track=None)) == (
        "begin: track points need a selection with prefix_cache"
    )


@given(st.data())
def test_whatever_passes_has_distinct_targets_that_no_other_row_reads(data: st.DataObject) -> None:
    rows = data.draw(st.integers(0, 4))
    ids = st.lists(st.integers(-2, 9), min_size=rows, max_size=rows)
    counts = st.lists(st.integers(0, 3), min_size=rows, max_size=rows)
    batch = Batch(
        data.draw(st.sampled_from(sorted(LIMITS.modes))),
        data.draw(counts),
        data.draw(counts),
        data.draw(ids),
        data.draw(ids),
    )
    try:
        check(batch, LIMITS)
    except ValueError:
        return
    live = [i for i in range(rows) if batch.lengths[i]]
    targets = [batch.dst[i] for i in live if batch.dst[i] >= 0]
    assert len(set(targets)) == len(targets)
    assert all(1 <= slot <= 8 for slot in targets)
    for i in live:
        others = {batch.dst[j] for j in live if j != i and batch.dst[j] >= 0}
        assert batch.src[i] not in others


def at_fault(batch: Batch) -> bool:
    """The rules of a step, row by row and pair by pair, without a short cut."""
    rows = range(batch.rows)
    live = [row for row in rows if batch.lengths[row] > 0]
    named = [*batch.src, *batch.dst, *(slot for _, _, slot in batch.track)]
    if any(slot == 0 or slot > LIMITS.slots for slot in named) or batch.tokens > LIMITS.max_tokens:
        return True
    for row in rows:
        length, src, dst = batch.lengths[row], batch.src[row], batch.dst[row]
        if length < 0 or batch.start[row] < 0 or batch.start[row] + length > LAST_POSITION:
            return True
        if length and ((src < 0 and batch.start[row]) or batch.mode is Mode.IDLE):
            return True
        if batch.mode is Mode.DECODE and length != 1 and (length or src >= 0 or dst >= 0):
            return True
    writes = [(row, batch.dst[row]) for row in live if batch.dst[row] >= 0]
    writes += [(-1, slot) for _, _, slot in batch.track]
    if len({slot for _, slot in writes}) < len(writes):
        return True
    return any(slot == batch.src[row] and writer != row for row in live for writer, slot in writes)


@settings(max_examples=400)
@given(st.integers(0, 1 << 30))
def test_a_step_is_refused_just_where_a_rule_is_broken(seed: int) -> None:
    rng = Random(seed)
    mode, rows = rng.choice(sorted(LIMITS.modes)), rng.randint(0, 4)
    wild = rng.random() < 0.3
    lengths = [rng.choice((1, 1, 0, 4)) if mode is not Mode.DECODE else 1 for _ in range(rows)]
    slots = rng.sample(range(1, 9), 8)
    src = [rng.choice((slots[row], slots[row], -1, rng.randint(1, 8))) for row in range(rows)]
    dst = [slots[row] if not wild else rng.randint(-1, 9) for row in range(rows)]
    start = [rng.choice((4, 8)) if slot >= 0 or wild else 0 for slot in src]
    track = [
        (row, start[row] + lengths[row], rng.choice(slots))
        for row in range(rows)
        if lengths[row] == 4 and dst[row] >= 0 and start[row] % 4 == 0 and rng.random() < 0.3
    ]
    if wild and rows:
        place = rng.randrange(rows)
        start[place] = rng.choice((-1, LAST_POSITION, start[place]))
        lengths[place] = rng.choice((-1, 0, 2, lengths[place]))
        src[place] = rng.choice((0, 9, dst[place], src[place]))
        track = []
    batch = Batch(mode, lengths, start, src, dst, track)
    if at_fault(batch):
        refused(batch)
    else:
        check(batch, LIMITS)


VERIFYING = Limits(
    slots=8,
    max_batch=4,
    max_tokens=32,
    modes=frozenset(Mode),
    width=4,
    tree=True,
)


def test_a_verify_row_is_no_wider_than_was_selected() -> None:
    check(Batch(Mode.VERIFY, (4, 0), (9, 0), (1, 2), (1, 2)), VERIFYING)
    wide = Batch(Mode.VERIFY, (2, 5), (9, 9), (1, 2), (1, 2))
    assert refused(wide, VERIFYING) == "begin: row 1 verifies 5 tokens, the width is 4"


def test_parents_come_before_their_children_one_list_a_row() -> None:
    tree = Batch(Mode.VERIFY, (3, 2), (9, 9), (1, 2), (1, 2), parents=((-1, 0, 0), (-1, -1)))
    check(tree, VERIFYING)
    cases = {
        ((-1, 0, 2), (-1, 0)): "begin: row 0: parent 2 of token 2 does not come before it",
        ((-1, 0, -2), (-1, 0)): "begin: row 0: parent -2 of token 2 does not come before it",
        ((-1, 0, 0), (-1,)): "begin: row 1 has 2 tokens, 1 parents",
        ((-1, 0, 0),): "begin: 2 lengths, 1 entries in parents",
    }
    for parents, message in cases.items():
        assert refused(replace(tree, parents=parents), VERIFYING) == message
    chains = replace(VERIFYING, tree=False)
    assert refused(tree, chains) == "begin: parents need a selection with Speculative(tree=True)"
    stray = Batch(Mode.EXTEND, (1,), (9,), (1,), (1,), parents=((-1,),))
    assert refused(stray, VERIFYING) == "begin: parents belong to VERIFY, not to EXTEND"
