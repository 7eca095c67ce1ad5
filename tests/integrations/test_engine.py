"""The engine: greedy tokens, clocks, stop ids, and slots that are free after any end."""

from pathlib import Path
from time import perf_counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hal.errors import HalError, PoolExhausted
from hal.integrations.transformers import Engine, Runner
from hal.integrations.transformers.engine import Clock, check_ids, greedy
from hal.runtime.request import FinishReason, RequestError
from support.models import folder_of
from support.serving import prompts_of, runner_of, serve


@pytest.fixture
def runner(root: Path) -> Runner:
    return runner_of(folder_of("lfm2", root))


@given(st.lists(st.lists(st.floats(-9, 9, width=32), min_size=4, max_size=4), max_size=4))
def test_greedy_takes_the_first_of_the_highest(rows: list[list[float]]) -> None:
    assert greedy(torch.tensor(rows).reshape(-1, 4)) == [row.index(max(row)) for row in rows]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error_not_a_token(value: float) -> None:
    logits = torch.zeros(2, 4)
    logits[1, 2] = value
    with pytest.raises(HalError, match="logits that are not finite"):
        greedy(logits)


@given(st.lists(st.integers(-3, 12), max_size=6))
def test_ids_outside_the_vocabulary_are_refused_with_its_bounds(ids: list[int]) -> None:
    stray = [token for token in ids if token < 0 or token > 9]
    if not stray:
        check_ids(ids, 10)
        return
    with pytest.raises(RequestError, match=rf"id {stray[0]} is outside .*, which has ids 0 to 9"):
        check_ids(ids, 10)


def test_a_prompt_that_is_refused_leaves_the_others_be(runner: Runner) -> None:
    engine = Engine(runner, max_batch=3, token_budget=9)
    engine.submit([5, 6], 3)
    for bad in ([], [999], [5] * 64):
        with pytest.raises(RequestError):
            engine.submit(bad, 3)
    assert engine.submit([7], 3) == 1
    assert {event.request for event in engine.run()} == {0, 1}


def test_a_stop_id_ends_its_prompt_and_is_the_last_token(runner: Runner) -> None:
    prompts = prompts_of()
    free = serve(runner, prompts, 8)
    stop = free.ids[2][3]
    bound = serve(runner, prompts, 8, stop=[stop])
    for number, ids in free.ids.items():
        cut = ids.index(stop) + 1 if stop in ids else len(ids)
        assert bound.ids[number] == ids[:cut]
        assert bound.reasons[number] == ("eos" if stop in ids else "length")


def test_a_sequence_ends_where_its_slot_is_full(runner: Runner) -> None:
    run = serve(runner, [[5] * 60, [6] * 63], 50)
    assert [len(run.ids[i]) for i in (0, 1)] == [4, 1]
    assert set(run.reasons.values()) == {"length"}


@pytest.mark.parametrize("steps", [0, 1, 4, 11])
def test_cancel_ends_all_and_frees_slots_and_keys(runner: Runner, steps: int) -> None:
    engine = Engine(runner, max_batch=3, token_budget=9)
    for prompt in prompts_of():
        engine.submit(prompt, 10)
    ended = {e.request for _ in range(steps) for e in engine.step() or () if e.reason}
    events = engine.cancel()
    assert {event.request for event in events} == set(range(6)) - ended
    assert {event.reason for event in events} == {FinishReason.CANCELLED}
    assert runner.free_slots == 3
    assert runner.kv.bytes == 0
    assert engine.step() is None
    assert len(serve(runner, prompts_of(), 3).ids) == 6


def test_a_step_that_fails_can_be_cancelled_and_the_runner_used_again(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = serve(runner, prompts_of(), 5).ids
    engine = Engine(runner, max_batch=3, token_budget=9)
    for prompt in prompts_of():
        engine.submit(prompt, 5)
    for _ in range(3):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_forward", lambda *_: (_ for _ in ()).throw(RuntimeError("boom")))
        with pytest.raises(RuntimeError, match="boom"):
            engine.step()
    engine.cancel()
    assert runner.free_slots == 3
    assert serve(runner, prompts_of(), 5).ids == wanted


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ({"max_batch": 4}, "engine: max_batch 4, the backend was built for 3; ask for less, or"),
        ({"token_budget": 10}, "engine: token_budget 10, the backend was built for 9; .* max_tok"),
    ],
)
def test_steps_beyond_the_backend_are_refused_before_a_request_comes(
    runner: Runner, limits: dict[str, int], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        Engine(runner, **{"max_batch": 3, "token_budget": 9, **limits})


def test_an_engine_whose_slots_others_have_says_so_and_goes_on_once_they_end(
    runner: Runner,
) -> None:
    wanted = serve(runner, prompts_of(), 5).ids
    first, second = (Engine(runner, max_batch=3, token_budget=9) for _ in range(2))
    for engine in (first, second):
        for prompt in prompts_of():
            engine.submit(prompt, 5)
    first.step()
    got: list[list[int]] = [[] for _ in wanted]
    while not second.scheduler.idle:
        try:
            events = second.step() or []
        except PoolExhausted:
            assert first.step() is not None or first.scheduler.idle
            continue
        for event in events:
            got[event.request].append(event.token)
    assert got == [wanted[i] for i in range(6)]
    assert second.step() is None


def test_clocks_part_a_requests_time_into_queue_prefill_and_decode(runner: Runner) -> None:
    engine = Engine(runner, max_batch=3, token_budget=9)
    began = perf_counter()
    for prompt in prompts_of():
        engine.submit(prompt, 5)
    list(engine.run())
    whole = perf_counter() - began
    for clock in engine.clocks:
        times = clock.timings()
        parts = [times[name] for name in ("queue_s", "prefill_s", "decode_s")]
        assert all(0 <= part <= whole for part in parts)
        assert sum(parts) == pytest.approx(times["total_s"])
    assert engine.clocks[5].timings()["queue_s"] > engine.clocks[0].timings()["queue_s"]


def test_a_request_that_was_never_fed_spent_its_time_in_the_queue() -> None:
    clock = Clock(submitted=10.0, ended=12.5)
    assert clock.timings() == {"queue_s": 2.5, "prefill_s": 0, "decode_s": 0, "total_s": 2.5}
    assert Clock(perf_counter()).timings()["total_s"] < 10


def test_an_engine_without_requests_has_nothing_to_do(runner: Runner) -> None:
    assert list(Engine(runner, max_batch=3, token_budget=9).run()) == []
