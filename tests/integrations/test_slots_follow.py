"""What a runner keeps by slot follows the pool, and a commit never reaches a slot's next tenant."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from hal.errors import StepOrderError
from hal.integrations.transformers import Engine
from hal.runtime.batch import Batch, Mode
from support.repeating import repeating_folder, serve_with, shared_prompts, sparing_runner

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from hal.integrations.transformers import Runner
    from hal.runtime.plan import Plan

FAMILIES = ("qwen3_5_text", "lfm2")
TOKENS = [5, 6, 7, 8, 9, 10, 11, 12]


@pytest.fixture(params=FAMILIES)
def runner(root: Path, request: pytest.FixtureRequest) -> Runner:
    """Six slots, drafts of four, and a prefix cache."""
    return sparing_runner(repeating_folder(request.param, root), 4, 3)


def mark(runner: Runner, slot: int) -> list[Tensor]:
    """A new tenant's state, kept to be looked at again."""
    held = [t for s in runner.backend.pool.states for t in _states(runner, s.layer)]
    for tensor in held:
        tensor[slot] = 3.0
    return [tensor[slot] for tensor in held]


def _states(runner: Runner, layer: int) -> list[Tensor]:
    return list(runner.backend.pool.tensors(layer).values())


def extended(runner: Runner, slot: int, track: tuple[tuple[int, int, int], ...] = ()) -> None:
    """Four tokens in the slot."""
    runner.step(Batch(Mode.EXTEND, [4], [0], [-1], [slot], track), TOKENS[:4], [0])


def test_keys_go_with_a_slot_that_is_freed_at_the_pool(runner: Runner) -> None:
    first, second = runner.alloc(2)
    extended(runner, first)
    held = runner.kv.bytes
    extended(runner, second)
    runner.backend.pool.free([first])
    assert runner.kv.bytes == held > 0
    runner.backend.pool.reset()
    assert runner.kv.bytes == 0


def test_cached_prefixes_go_with_the_pool_and_the_next_engine_fills_it_anew(
    runner: Runner,
) -> None:
    wanted, _ = serve_with(runner, shared_prompts(), 12)
    assert len(runner.prefixes.slots) > 1
    runner.backend.pool.free([gone := runner.prefixes.slots[0]])
    assert gone not in runner.prefixes.slots
    runner.backend.pool.reset()
    assert (runner.prefixes.slots, runner.kv.bytes, runner.free_slots) == ((), 0, 6)
    again, engine = serve_with(runner, shared_prompts(), 12)
    assert again.ids == wanted.ids
    assert engine.prefixes.hits > 0


def reset(runner: Runner, slot: int) -> None:
    runner.backend.pool.reset()


def free(runner: Runner, slot: int) -> None:
    runner.free([slot])


@pytest.mark.parametrize("take", [reset, free])
def test_a_commit_leaves_the_next_tenant_of_a_freed_slot_alone(
    runner: Runner, take: Callable[[Runner, int], None]
) -> None:
    (slot,) = runner.alloc()
    extended(runner, slot)
    runner.step(Batch(Mode.VERIFY, [3], [4], [slot], [slot]), TOKENS[4:7], [0])
    take(runner, slot)
    assert slot in runner.alloc(runner.free_slots)
    tenant = mark(runner, slot)
    with pytest.raises(StepOrderError, match=rf"row 0 accepts 3 tokens .* slots \[{slot}\], which"):
        runner.commit([3])
    runner.commit([0])
    assert all(bool((state == 3.0).all()) for state in tenant)


def test_a_step_whose_rows_are_all_gone_owes_no_commit(runner: Runner) -> None:
    (slot,) = runner.alloc()
    extended(runner, slot)
    runner.step(Batch(Mode.VERIFY, [3], [4], [slot], [slot]), TOKENS[4:7], [0])
    runner.backend.pool.reset()
    (slot,) = runner.alloc()
    extended(runner, slot)


def test_a_step_with_a_row_left_still_owes_one(runner: Runner) -> None:
    first, second = runner.alloc(2)
    for slot in (first, second):
        extended(runner, slot)
    both = [first, second]
    runner.step(Batch(Mode.VERIFY, [2, 2], [4, 4], both, both), [*TOKENS[4:6]] * 2, [0, 1])
    runner.free([first])
    with pytest.raises(StepOrderError, match="uncommitted verify"):
        extended(runner, second)
    with pytest.raises(StepOrderError, match="row 0 accepts 1 tokens"):
        runner.commit([1, 2])
    runner.commit([0, 2])
    logits = runner.step(Batch(Mode.DECODE, [1], [6], [second], [second]), [TOKENS[6]], [0])
    alone = runner.step(Batch(Mode.EXTEND, [7], [0], [-1], [first]), TOKENS[:7], [0])
    torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("accepted", "refused"), [(1, False), (2, True)])
def test_a_track_point_in_a_freed_slot_is_refused_where_the_commit_reaches_it(
    runner: Runner, accepted: int, refused: bool
) -> None:
    slot, point = runner.alloc(2)
    extended(runner, slot)
    batch = Batch(Mode.VERIFY, [3], [4], [slot], [slot], [(0, 6, point)])
    runner.step(batch, TOKENS[4:7], [0])
    runner.free([point])
    tenant = mark(runner, point)
    if refused:
        with pytest.raises(StepOrderError, match=rf"slots \[{point}\], which were freed"):
            runner.commit([accepted])
        runner.abandon()
    else:
        runner.commit([accepted])
    assert all(bool((state == 3.0).all()) for state in tenant)


def test_a_fork_into_a_freed_slot_is_refused_whatever_it_accepts(runner: Runner) -> None:
    src, dst = runner.alloc(2)
    extended(runner, src)
    runner.step(Batch(Mode.VERIFY, [3], [4], [src], [dst]), TOKENS[4:7], [0])
    runner.free([dst])
    tenant = mark(runner, dst)
    for accepted in (0, 2):
        with pytest.raises(StepOrderError, match=rf"slots \[{dst}\]"):
            runner.commit([accepted])
    runner.abandon()
    assert all(bool((state == 3.0).all()) for state in tenant)


def test_a_request_cancelled_while_its_drafts_are_looked_at_leaves_the_others(
    runner: Runner,
) -> None:
    wanted, _ = serve_with(runner, shared_prompts(), 12)
    cancelled: list[int] = []

    def observe(plan: Plan, _: Tensor) -> None:
        if plan.batch.mode is Mode.VERIFY and len(plan.requests) > 1 and not cancelled:
            cancelled.append(plan.requests[0])
            assert engine.scheduler.cancel(plan.requests[0]) is not None

    engine = Engine(runner, max_batch=3, token_budget=12, observe=observe)
    got: dict[int, list[int]] = {}
    for prompt in shared_prompts():
        engine.submit(prompt, 12)
    for event in engine.run():
        got.setdefault(event.request, []).append(event.token)
    assert len(cancelled) == 1
    assert {i: ids for i, ids in got.items() if i not in cancelled} == {
        i: ids for i, ids in wanted.ids.items() if i not in cancelled
    }


def test_a_slot_that_is_started_anew_leaves_the_keys_that_it_shared(runner: Runner) -> None:
    slot, point, other = runner.alloc(3)
    alone = runner.step(Batch(Mode.EXTEND, [6], [0], [-1], [other]), TOKENS[:6], [0])
    extended(runner, slot, ((0, 4, point),))
    noise = [90, 91, 92, 93, 94]
    anew = runner.step(Batch(Mode.EXTEND, [5], [0], [-1], [slot]), noise, [0])
    forked = runner.step(Batch(Mode.EXTEND, [2], [4], [point], [other]), TOKENS[4:6], [0])
    torch.testing.assert_close(forked, alone, rtol=1e-4, atol=1e-4)
    again = runner.step(Batch(Mode.EXTEND, [5], [0], [-1], [other]), noise, [0])
    torch.testing.assert_close(anew, again, rtol=1e-4, atol=1e-4)
