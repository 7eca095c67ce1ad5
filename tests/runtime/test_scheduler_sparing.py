"""Drafts and cached prefixes in the scheduler: no token changes, and no cached state is written."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.errors import StepOrderError
from hal.runtime.batch import Mode
from hal.runtime.drafts import Drafter
from hal.runtime.placement import PrefixCache
from hal.runtime.prefix import PrefixIndex
from hal.runtime.request import FinishReason, Request
from hal.runtime.scheduler import Scheduler
from support.scheduled import Drive, Setting, World, alone, next_token

# Few tokens and common beginnings, so that prompts share, part, and contain each other.
beginnings = st.sampled_from([[], [1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 9, 9, 9]])
prompts = st.builds(
    lambda begin, rest: begin + rest,
    beginnings,
    st.lists(st.integers(0, 2), min_size=1, max_size=12),
)
settings_of = st.builds(
    Setting,
    prompts=st.lists(
        st.tuples(prompts, st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=8
    ),
    slots=st.integers(1, 8),
    max_batch=st.integers(1, 4),
    budget=st.integers(1, 12),
    max_len=st.integers(24, 40),
    width=st.sampled_from([0, 2, 3, 5]),
    grid=st.sampled_from([0, 1, 2, 4]),
    cancels=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 30)), max_size=3),
    within=st.lists(
        st.tuples(st.integers(0, 7), st.integers(0, 30), st.integers(0, 2)), max_size=4
    ),
    failures=st.frozensets(st.integers(0, 30), max_size=1),
)


@settings(max_examples=250)
@given(settings_of)
def test_every_request_gets_its_own_tokens_whatever_is_cached_drafted_cancelled_or_fails(
    setting: Setting,
) -> None:
    Drive(setting).run()


@settings(max_examples=60)
@given(settings_of)
def test_drafts_and_prefixes_change_no_output(setting: Setting) -> None:
    setting.cancels, setting.within, setting.failures = [], [], frozenset()
    drive = Drive(setting).run()
    for request, number in enumerate(drive.submitted):
        prompt, new, _ = setting.prompts[number]
        assert drive.output[request] == alone(prompt, new, setting.max_len)


LONG = [1, 2, 3, 4, 5, 6, 8, 9, 10, 11]


def test_a_prompt_is_kept_where_it_parts_from_one_that_waits() -> None:
    drive = Drive(
        Setting([([*LONG, 1], 3, 0), ([*LONG, 2], 3, 0)], max_batch=1, grid=1, budget=20)
    ).run()
    first = drive.plans[0].batch
    assert [position for _, position, _ in first.track] == [10]
    second = next(plan.batch for plan in drive.plans if plan.requests == (1,))
    assert (second.start, second.lengths, second.src) == ((10,), (1,), (first.track[0][2],))
    assert second.dst != second.src
    assert second.mode is Mode.DECODE


def test_a_prompt_served_before_is_fed_but_for_its_last_token() -> None:
    drive = Drive(Setting([(LONG, 3, 0), (LONG, 3, 20)], max_batch=1, grid=1, budget=20)).run()
    second = next(plan.batch for plan in drive.plans if plan.requests == (1,))
    assert (second.start, second.lengths) == ((9,), (1,))
    assert drive.cache.stats.hits == 1
    assert drive.cache.stats.saved == 9
    assert [counts.saved for counts in drive.scheduler.counts] == [0, 9]


def test_a_conversation_goes_on_from_the_state_that_its_answer_left() -> None:
    answer = alone(LONG, 4, 60)
    again = [*LONG, *answer, 1, 2]
    drive = Drive(Setting([(LONG, 4, 0), (again, 2, 20)], max_batch=1, grid=1, budget=20)).run()
    second = next(plan.batch for plan in drive.plans if plan.requests == (1,))
    assert second.start == (len(LONG) + len(answer) - 1,)


@pytest.mark.parametrize("grid", [2, 3, 4, 7])
def test_points_are_on_the_grid_and_rows_end_at_them(grid: int) -> None:
    drive = Drive(
        Setting([(LONG * 2, 4, 0), (LONG * 2, 4, 0), ([*LONG, 1, 2], 4, 0)], grid=grid, budget=5)
    ).run()
    points = [point for plan in drive.plans for point in plan.batch.track]
    assert points
    assert all(position % grid == 0 for _, position, _ in points)


def test_a_state_given_up_while_a_step_is_planned_is_not_tracked_off_the_grid() -> None:
    """The row was cut when the state was still kept, so that it does not end where it would be."""
    prompts = [([0, 2, 0, 0, 1, 0, 1], 6, 0), ([0], 6, 3)]
    prompts += [([1, 2, 9, 9, 9, 2, 2], 1, 4), ([1, 2, 9, 0], 1, 4)]
    drive = Drive(Setting(prompts, slots=5, max_batch=4, budget=4, max_len=40, width=2, grid=3))
    drive.run()
    assert drive.cache is not None and drive.cache.stats.evicted
    for request, (prompt, new, _) in enumerate(prompts):
        assert drive.output[request] == alone(prompt, new, 40)


def test_a_prefix_is_stored_once_a_step() -> None:
    prompts = [([*LONG, i], 2, 0) for i in range(3)]
    drive = Drive(Setting(prompts, slots=9, max_batch=3, grid=1, budget=40)).run()
    assert [position for _, position, _ in drive.plans[0].batch.track] == [10]


def test_cached_states_give_way_to_requests_and_then_requests_wait() -> None:
    prompts = [([i, *LONG], 6, 0) for i in range(4)]
    drive = Drive(Setting(prompts, slots=2, max_batch=4, grid=1, budget=30)).run()
    assert drive.cache.stats.evicted > 0
    assert max(plan.batch.rows for plan in drive.plans) == 2


def test_the_only_slot_is_moved_on_in_place_where_it_is_the_prefix_itself() -> None:
    drive = Drive(Setting([(LONG, 1, 0), ([*LONG, 1, 2], 2, 9)], slots=1, max_batch=1, grid=1))
    drive.run()
    second = next(plan.batch for plan in drive.plans if plan.requests == (1,))
    assert second.start == (10,)
    assert second.src == second.dst == (1,)
    assert drive.cache.stats.hits == 1


def test_a_state_that_a_step_reads_is_not_given_up_for_another_row() -> None:
    """Two slots for two hits: the second hit finds its prefix held, and waits."""
    prompts = [(LONG, 1, 0), ([*LONG, 1], 2, 9), ([*LONG, 2], 2, 9)]
    drive = Drive(Setting(prompts, slots=2, max_batch=2, grid=1)).run()
    assert drive.cache.stats.hits == 2


def test_without_room_nothing_is_tracked_and_nobody_waits_for_it() -> None:
    prompts = [([i, *LONG], 4, 0) for i in range(2)]
    drive = Drive(Setting(prompts, slots=2, max_batch=2, grid=1, budget=30)).run()
    assert drive.plans[0].batch.rows == 2
    assert drive.plans[0].batch.track == ()


def test_a_failed_step_leaves_the_cached_states_that_it_read() -> None:
    setting = Setting(
        [(LONG, 1, 0), ([*LONG, 1, 2, 3], 2, 5), ([*LONG, 5], 2, 20)],
        grid=1,
        budget=30,
        failures=frozenset({1}),
    )
    drive = Drive(setting).run()
    assert drive.reasons[1] is FinishReason.CANCELLED
    assert drive.cache.stats.hits == 2
    assert drive.plans[-1].requests == (2,)


def test_a_failed_step_gives_back_the_slots_that_it_was_to_fill() -> None:
    drive = Drive(Setting([(LONG, 2, 0)], grid=1, budget=30, failures=frozenset({0}))).run()
    assert drive.plans[0].batch.track
    assert drive.world.used == set()


def test_a_request_cancelled_within_a_step_leaves_no_state_behind() -> None:
    world, index = World(4), PrefixIndex()
    cache = PrefixCache(world, index, "model")
    scheduler = Scheduler(world, 2, 30, 40, placement=cache)
    scheduler.submit(LONG, 4)
    plan = scheduler.schedule()
    assert plan is not None and plan.batch.track
    scheduler.cancel(0)
    assert scheduler.complete(world.run(plan)) == []
    assert index.slots == ()
    assert world.free_slots == 4
    assert index.longest("model", (*LONG, 1)) is None


def test_a_prefix_that_others_read_is_not_taken_over_where_it_has_the_only_slot() -> None:
    world, index = World(1), PrefixIndex()
    cache = PrefixCache(world, index, "model")
    (slot,) = world.alloc()
    index.store("model", tuple(LONG), slot)
    index.hold(slot)
    request = Request(0, (*LONG, 1), 2)
    assert not cache.admit(request)
    assert (request.slot, request.source, request.fed, request.counts.saved) == (None, None, 0, 0)
    assert (index.slots, index.holders(slot)) == ((slot,), 1)
    index.release(slot)
    assert cache.admit(request)
    assert (request.slot, request.source, request.fed, index.slots) == (slot, None, len(LONG), ())


REPEATS = [3, 4, 5, 6] * 4


def test_steps_with_drafts_alternate_with_steps_that_feed_prompts() -> None:
    drive = Drive(
        Setting([(REPEATS, 20, 0), ([9] * 16, 2, 4)], width=4, budget=5, max_batch=2, slots=2)
    ).run()
    modes = [plan.batch.mode for plan in drive.plans]
    chunks = [
        i
        for i, plan in enumerate(drive.plans)
        if 1 in plan.requests and plan.requests.index(1) not in plan.samples
    ]
    under_way = modes[chunks[0] : chunks[-1] + 1]
    assert Mode.VERIFY in under_way
    assert all(Mode.MIXED in pair for pair in pairwise(under_way))
    assert 0 in drive.plans[chunks[0]].requests


def test_rows_without_drafts_verify_their_one_token() -> None:
    prompts = [(REPEATS, 12, 0), ([9, 1], 12, 0)]
    drive = Drive(Setting(prompts, width=4, budget=12, slots=2, max_batch=2)).run()
    lengths = [plan.batch.lengths for plan in drive.plans if plan.batch.mode is Mode.VERIFY]
    assert any(1 in row and max(row) > 1 for row in lengths)


def test_a_step_without_any_draft_is_a_plain_decode() -> None:
    drive = Drive(Setting([([1], 3, 0)], width=4)).run()
    assert Mode.VERIFY not in {plan.batch.mode for plan in drive.plans}
    assert Mode.DECODE in {plan.batch.mode for plan in drive.plans}


@settings(max_examples=60)
@given(st.lists(st.integers(3, 6), min_size=4, max_size=20), st.integers(2, 6), st.integers(1, 9))
def test_no_draft_goes_beyond_what_the_request_may_say(
    prompt: list[int], width: int, new: int
) -> None:
    drive = Drive(Setting([(prompt, new, 0)], width=width, budget=30)).run()
    for plan in drive.plans:
        if plan.batch.mode is Mode.VERIFY:
            end = plan.batch.start[0] + plan.batch.lengths[0]
            assert end < len(prompt) + new
            assert plan.batch.lengths[0] <= width


def test_the_counts_are_those_of_the_steps() -> None:
    drive = Drive(Setting([(REPEATS, 12, 0)], width=4, budget=9)).run()
    steps = [plan for plan in drive.plans if plan.batch.mode is Mode.VERIFY]
    (counts,) = drive.scheduler.counts
    assert drive.scheduler.verified == len(steps)
    assert counts.drafted == sum(plan.batch.lengths[0] - 1 for plan in steps)
    plain = len(drive.plans) - len(steps)
    assert len(drive.output[0]) == plain - 1 + len(steps) + counts.accepted


def verify_step(scheduler: Scheduler, world: World) -> list[int]:
    """Step until a VERIFY step is under way, and give what the model chose in it."""
    while (plan := scheduler.schedule()) is not None:
        sampled = world.run(plan)
        if plan.batch.mode is Mode.VERIFY:
            return sampled
        scheduler.complete(sampled)
    raise AssertionError("no step verified")


def test_a_request_cancelled_within_a_verify_step_keeps_none_of_its_drafts() -> None:
    world = World(2)
    scheduler = Scheduler(world, 2, 30, 60, drafter=Drafter(4))
    scheduler.submit(REPEATS, 12)
    sampled = verify_step(scheduler, world)
    assert scheduler.accepted(sampled)[0] >= 1
    scheduler.cancel(0)
    assert scheduler.accepted(sampled) == [0]
    assert scheduler.complete(sampled) == []
    assert scheduler.counts[0].drafted == 0


def test_complete_wants_a_token_for_every_verified_one() -> None:
    world = World(2)
    scheduler = Scheduler(world, 2, 30, 60, drafter=Drafter(4))
    scheduler.submit(REPEATS, 12)
    sampled = verify_step(scheduler, world)
    for call in (scheduler.accepted, scheduler.complete):
        with pytest.raises(ValueError, match=rf"0 tokens, {len(sampled)} tokens sample"):
            call([])
    scheduler.complete(sampled)
    with pytest.raises(StepOrderError, match="without schedule"):
        scheduler.accepted(sampled)


def test_the_model_of_these_tests_comes_around_and_stops() -> None:
    runs = [alone([i, j], 30, 60) for i in range(6) for j in range(6)]
    assert any(run[-1] == 7 for run in runs)
    assert any(len(run) == 30 for run in runs)
    assert next_token([4, 5]) == 6
