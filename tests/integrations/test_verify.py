"""The self-check flags every engine that is wrong in a known way, and passes the right one."""

import json
from collections.abc import Mapping
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal.errors import ConfigError
from hal.integrations.verify.judge import BARS, Check, Judgement, Verdict, apart, judge
from hal.integrations.verify.programs import batches, fresh, resumed
from hal.integrations.verify.prompts import (
    Questions,
    Subject,
    draw,
    lengths,
    subject_of,
    usable_ids,
)
from hal.integrations.verify.record import Answer, Facts, Record, Step
from support.faulty_engine import FAULTS, VOCAB, WINDOW, FaultyEngine, advance, logprobs
from support.model_configs import tiny

CHUNK = 64
SHORT = {"decode": Check.DECODE, "batch": Check.BATCH, "resume": Check.RESUME}
SUBJECT = Subject("faulty", WINDOW, VOCAB, None)


def questions(chunk: int = CHUNK, seed: int = 0) -> Questions:
    return draw(SUBJECT, range(VOCAB), chunk, 8, seed)


def judged(
    fault: str | None = None, *, seed: int = 0, bar: float | None = None, **engine: object
) -> Judgement:
    """Both programs on a new engine each."""
    asked = questions(seed=seed)
    one = FaultyEngine(fault, **{**engine, "prefix": False})
    other = replace(FaultyEngine(fault, **{"prefix": True, **engine}), chunk=CHUNK)
    whole, again = fresh(one, asked), resumed(other, asked, [CHUNK])
    return judge("faulty", [*map(len, asked.prompts)], whole, again, bar)


def wrong(found: Judgement) -> set[Check]:
    return {row.check for row in found.rows if row.verdict is Verdict.WRONG}


@pytest.mark.parametrize("seed", range(3))
def test_a_right_engine_passes_with_no_gap_at_all(seed: int) -> None:
    found = judged(seed=seed)
    assert found.passed
    assert not wrong(found)
    assert all(row.verdict is Verdict.OK for row in found.rows)
    assert max(row.worst[1].nats for row in found.rows if row.worst) < 1e-9


@pytest.mark.parametrize("fault", FAULTS)
def test_every_known_fault_is_flagged_where_it_is(fault: str) -> None:
    found = judged(fault)
    assert not found.passed
    assert wrong(found) == {SHORT[name] for name in FAULTS[fault]}


@pytest.mark.parametrize(
    ("fault", "at"),
    [
        ("a short prompt leaves its window shifted", {1, WINDOW - 2}),
        ("a prompt of exactly one chunk loses the recurrence", {CHUNK}),
    ],
)
def test_a_fault_at_a_border_is_seen_by_the_prompts_there_alone(fault: str, at: set[int]) -> None:
    found = judged(fault)
    (row,) = (row for row in found.rows if row.check is Check.DECODE)
    assert {found.lengths[i] for i, gap in row.gaps.items() if gap.nats > row.bar} == at


def test_an_engine_that_caches_no_prefix_says_so_and_passes_by_its_chunks() -> None:
    found = judged(prefix=False)
    (row,) = (row for row in found.rows if row.verdict is Verdict.NOT_RUN)
    assert row.why_not == "the engine has no prefix cache"
    assert found.passed


@pytest.mark.parametrize(("dtype", "passed"), [("bfloat16", True), ("float32", False)])
def test_rounding_of_bfloat16_is_a_fault_in_float32(dtype: str, passed: bool) -> None:
    assert judged(noise=0.05, dtype=dtype).passed is passed


def test_the_bar_can_be_set() -> None:
    assert judged(noise=0.05, bar=0.06).passed
    assert not judged(noise=0.05, dtype="bfloat16", bar=0.04).passed


def test_without_a_resumed_engine_nothing_passes() -> None:
    asked = questions()
    found = judge(
        "faulty", [*map(len, asked.prompts)], fresh(FaultyEngine(), asked), "it did not start"
    )
    assert found.missing == [Check.RESUME]
    assert not found.passed
    assert [row.why_not for row in found.rows if not row.gaps] == ["it did not start"]


def test_a_dtype_without_a_bar_gets_the_coarsest() -> None:
    assert judged(dtype="float8_e4m3fn").bar == max(BARS.values())


def test_unknown_log_probabilities_are_never_within_the_bar() -> None:
    for bad in (nan, inf, -inf):
        assert apart(Answer((step(3, bad),)), Answer((step(3, -1.0),))).nats == inf
        assert apart(Answer((step(3, bad),)), Answer((step(3, bad),))).nats == inf


def step(token: int, logprob: float, **top: float) -> Step:
    return Step(token, logprob, {int(name[1:]): value for name, value in top.items()})


def test_answers_are_compared_up_to_and_with_the_token_at_which_they_part() -> None:
    one = Answer((step(1, -0.5), step(2, -0.6, t2=-0.6, t3=-0.7), step(9, -5.0)))
    two = Answer((step(1, -0.5), step(3, -0.65, t3=-0.65, t2=-0.68), step(4, -0.1)))
    found = apart(one, two)
    assert found.parted == 1
    assert found.compared == 2
    assert found.nats == pytest.approx(0.08)
    assert found.token == 1


def test_a_token_that_the_other_does_not_list_is_no_likelier_than_its_last_one() -> None:
    one = Answer((step(1, -0.1, t1=-0.1, t5=-4.0),))
    two = Answer((step(2, -0.2, t2=-0.2, t6=-3.0),))
    assert apart(one, two).nats == pytest.approx(3.8)


floats = st.floats(-30, 0, allow_nan=False)


@st.composite
def distributions(draw_: st.DrawFn) -> tuple[Answer, list[float]]:
    """An answer of one step with the likeliest of all its log-probabilities."""
    scores = draw_(st.lists(floats, min_size=6, max_size=6, unique=True))
    ranked = sorted(range(6), key=lambda v: -scores[v])
    top = {v: scores[v] for v in ranked[: draw_(st.integers(1, 6))]}
    return Answer((Step(ranked[0], scores[ranked[0]], top),)), scores


@given(distributions(), distributions())
def test_a_gap_is_never_larger_than_the_true_one(
    one: tuple[Answer, list[float]], two: tuple[Answer, list[float]]
) -> None:
    true = max(abs(a - b) for a, b in zip(one[1], two[1], strict=True))
    assert apart(one[0], two[0]).nats <= true + 1e-9
    assert apart(one[0], two[0]).nats == apart(two[0], one[0]).nats
    assert apart(one[0], one[0]).nats == 0


steps = st.builds(
    Step,
    st.integers(0, 99),
    floats | st.just(nan),
    st.dictionaries(st.integers(0, 99), floats, max_size=4),
)
answers = st.builds(Answer, st.lists(steps, max_size=3).map(tuple), st.integers(0, 9))
facts = st.builds(Facts, st.text(), st.text(), st.text(), st.text(), st.lists(st.text()).map(tuple))
records = st.builds(
    Record,
    facts,
    st.dictionaries(st.text(), st.dictionaries(st.integers(0, 9), answers, max_size=2), max_size=2),
    st.dictionaries(st.integers(0, 9), st.lists(floats, max_size=3), max_size=2),
)


@given(records)
def test_a_record_travels_through_json_unchanged(record: Record) -> None:
    travelled = Record.from_json(json.loads(json.dumps(record.to_json())))
    assert repr(travelled) == repr(record)


@given(st.integers(2, 9), st.integers(2, 300), st.integers(1, 700))
def test_lengths_are_around_the_window_and_the_chunk(window: int, chunk: int, room: int) -> None:
    found = lengths(window, chunk, room)
    assert found == sorted(set(found))
    assert all(1 <= length <= room for length in found)
    for border in (window - 1, chunk):
        near = {border - 1, border, border + 1}
        assert {n for n in near if 1 <= n <= room} <= set(found)
    if 2 * chunk + window - 1 <= room:
        assert found[-1] > 2 * chunk or window == 1


@given(st.integers(2, 9), st.integers(2, 80), st.integers(1, 9), st.integers(0, 5))
def test_prompts_use_the_given_ids_and_fit_the_positions(
    window: int, chunk: int, new: int, seed: int
) -> None:
    usable = [5, 7, 11]
    bound = 2 * chunk + new
    asked = draw(Subject("m", window, 20, bound), usable, chunk, new, seed)
    assert {token for prompt in asked.prompts for token in prompt} <= set(usable)
    assert asked.longest < bound
    assert asked == draw(Subject("m", window, 20, bound), usable, chunk, new, seed)


def test_two_prompts_share_a_prefix_with_the_longest_of_the_others() -> None:
    *others, part, whole = questions().prompts
    longest = max(others, key=len)
    assert part[: CHUNK + 1] == longest[: CHUNK + 1]
    assert part[CHUNK + 1] != longest[CHUNK + 1]
    assert whole[: len(longest)] == longest
    assert len(whole) > len(longest)


def test_more_new_tokens_than_positions_are_refused() -> None:
    with pytest.raises(ConfigError, match="8 new tokens leave no room in 8 positions"):
        draw(Subject("m", 4, 20, 8), range(20), 64, 8, 0)


@given(st.integers(0, 12), st.integers(1, 9))
def test_batches_ask_prompts_once_and_no_more_tokens_than_alone(prompts: int, new: int) -> None:
    for _, indices, counts in batches(prompts, new):
        assert len(indices) == len(counts)
        assert len(set(indices)) == len(indices)
        assert set(indices) <= set(range(prompts))
        assert all(1 <= count <= new for count in counts)


def test_rows_of_a_batch_end_at_different_times() -> None:
    *_, (_, _, counts) = batches(9, 8)
    assert len(set(counts)) > 4


@pytest.mark.parametrize(
    ("name", "window"), [("lfm2", 3), ("qwen3_next", 4), ("zaya", 3), ("minimax", 4)]
)
def test_the_window_is_read_from_the_config(name: str, window: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny(name)))
    found = subject_of(tmp_path)
    assert (found.window, found.vocab_size, found.model_type) == (window, 160, name)
    assert found.stateful


def test_a_family_that_hal_does_not_know_is_checked_with_the_usual_window(tmp_path: Path) -> None:
    entries = {"model_type": "llama", "vocab_size": 99, "max_position_embeddings": 77}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    assert subject_of(tmp_path) == Subject("llama", 4, 99, 77, stateful=False)


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [(None, "has no config.json"), ({"model_type": "llama"}, "names no vocab_size, got None")],
)
def test_a_folder_without_a_readable_config_is_refused(
    entries: Mapping[str, object] | None, complaint: str, tmp_path: Path
) -> None:
    if entries is not None:
        (tmp_path / "config.json").write_text(json.dumps(entries))
    with pytest.raises(ConfigError, match=complaint):
        subject_of(tmp_path)
    with pytest.raises(ConfigError, match="is not a folder"):
        subject_of(tmp_path / "absent")


def test_without_a_tokenizer_the_whole_vocabulary_is_drawn_from(tmp_path: Path) -> None:
    assert usable_ids(tmp_path, 5) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("vocab", [{"a": 0, "b": 1, "c": 4}, [["a", 0.0]] * 5])
def test_added_tokens_and_rows_behind_the_tokenizer_are_not_drawn(
    vocab: object, tmp_path: Path
) -> None:
    tokenizer = {"model": {"vocab": vocab}, "added_tokens": [{"id": 1}, {"id": 7}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert usable_ids(tmp_path, 9) == [0, 2, 3, 4]
    assert usable_ids(tmp_path, 3) == [0, 2]


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {}}', '{"model": {"vocab": 3}}'])
def test_a_broken_tokenizer_is_refused_by_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        usable_ids(tmp_path, 9)


def test_the_faulty_engine_itself_is_right_without_a_fault() -> None:
    random = Random(3)
    prompt = random.choices(range(VOCAB), k=20)
    (answer,) = FaultyEngine().generate([prompt], [6], None)
    ids = list(prompt)
    for made in answer.steps:
        state = ((-1,) * (WINDOW - 1), 0.0)
        for token in ids:
            state, hidden = advance(state, token)
        scores = logprobs(hidden)
        assert made.token == max(range(VOCAB), key=scores.__getitem__)
        assert made.logprob == scores[made.token]
        ids.append(made.token)
