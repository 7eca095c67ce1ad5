"""The weights obey the rule: transformers, which knows no rule, writes what the rule predicts."""

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    from conftest import Example

MARGIN = 0.15
"""Least distance of the best logit from the second, in units of the largest logit."""


@st.composite
def texts(draw: st.DrawFn, longest: int) -> list[int]:
    """Ids of few different words, so that words come again, or of all, so that they rarely do."""
    first = draw(st.integers(4, 63))
    last = draw(st.integers(first, 63))
    return draw(st.lists(st.integers(first, last), min_size=1, max_size=longest))


def generate(example: "Example", ids: list[int], count: int) -> list[int]:
    written = example.model.generate(
        torch.tensor([ids]), max_new_tokens=count, do_sample=False, use_cache=True
    )
    return [int(token) for token in written[0, len(ids) :]]


@torch.no_grad()
def logits(example: "Example", ids: list[int]) -> torch.Tensor:
    return example.model(torch.tensor([ids]), use_cache=False).logits[0]


def check_every_position(example: "Example", ids: list[int]) -> None:
    found = logits(example, ids)
    expected = [example.predict(ids[: end + 1], 1)[0] for end in range(len(ids))]
    assert found.argmax(-1).tolist() == expected
    best, second = found.topk(2).values.unbind(-1)
    assert ((best - second) / found.abs().max()).min() >= MARGIN


@pytest.mark.parametrize("number", range(6))
def test_greedy_generation_is_the_prediction_for_each_prompt(
    example: "Example", number: int
) -> None:
    ids = example.prompt_ids[number]
    assert generate(example, ids, 24) == example.predict(ids, 24)


@settings(max_examples=12, deadline=None)
@given(ids=texts(longest=40))
def test_greedy_generation_is_the_prediction_for_any_prompt(
    example: "Example", ids: list[int]
) -> None:
    assert generate(example, ids, 16) == example.predict(ids, 16)


@settings(max_examples=25, deadline=None)
@given(ids=texts(longest=150))
def test_every_position_is_predicted_with_a_wide_margin(example: "Example", ids: list[int]) -> None:
    check_every_position(example, ids)


@pytest.mark.parametrize("words", [2, 7, 60])
def test_long_texts_of_overwritten_pairs_stay_exact(example: "Example", words: int) -> None:
    generator = torch.Generator().manual_seed(words)
    ids = torch.randint(4, 4 + words, (700,), generator=generator).tolist()
    check_every_position(example, ids)


def test_one_word_hundreds_of_times_stays_exact(example: "Example") -> None:
    check_every_position(example, [11] * 400)


def test_a_pair_is_kept_over_hundreds_of_other_words(built: dict[str, "Example"]) -> None:
    memory = built["induction-qwen3_5"]
    filler = [20 + place % 7 for place in range(500)]
    ids = [5, 6, 7, *filler, 5, 30]
    assert generate(memory, ids, 1) == [7]


def test_a_pair_is_replaced_by_its_newer_value(built: dict[str, "Example"]) -> None:
    memory = built["induction-qwen3_5"]
    ids = [5, 6, 7, 5, 8, 9, 5, 6, 10, 5, 30]
    assert generate(memory, ids, 1) == [10]


def test_a_special_token_in_the_prompt_is_a_word_like_any_other(example: "Example") -> None:
    ids = [3, 8, 3, 9, 3, 3, 0, 1, 2, 5]
    check_every_position(example, ids)


def test_generation_ends_by_length_alone(example: "Example") -> None:
    written = generate(example, example.prompt_ids[0], 200)
    assert len(written) == 200
    assert example.model.config.eos_token_id not in written


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_writes_the_same_words(example: "Example", dtype: torch.dtype) -> None:
    model = copy.deepcopy(example.model).to(dtype)
    for ids in example.prompt_ids:
        written = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
        assert written[0, len(ids) :].tolist() == example.predict(ids, 12)


@pytest.mark.parametrize(
    ("name", "rows", "value"),
    [
        pytest.param("conv1d.weight", slice(0, 64), [0, 0, 0, 8.0], id="query is the present word"),
        pytest.param("conv1d.weight", slice(64, 128), [0, 0, 8.0, 0], id="key is one word old"),
        pytest.param("conv1d.weight", slice(128, 192), [0, 0, 8.0, 0], id="value is one word old"),
        pytest.param("in_proj_b.weight", slice(0, 1), -30.0, id="nothing is written"),
        pytest.param("in_proj_b.weight", slice(0, 1), -2.0, id="old values are not replaced"),
        pytest.param("A_log", slice(0, 1), 4.0, id="what is written decays"),
        pytest.param("in_proj_z.weight", slice(0, 64), 0.0, id="the gate is closed"),
    ],
)
def test_each_part_of_the_memory_is_needed(
    built: dict[str, "Example"], name: str, rows: slice, value: float | list[float]
) -> None:
    memory = built["induction-qwen3_5"]
    model = copy.deepcopy(memory.model)
    parameter = model.model.layers[0].linear_attn.get_parameter(name)
    parameter.data[rows] = torch.tensor(value)
    changed = replace(memory, model=model)
    wrong = [
        ids for ids in memory.prompt_ids if generate(changed, ids, 24) != memory.predict(ids, 24)
    ]
    assert len(wrong) >= 1


@pytest.mark.parametrize("age", [0, 1, 2])
def test_each_tap_of_the_tables_is_needed(built: dict[str, "Example"], age: int) -> None:
    tables = built["tables-lfm2"]
    model = copy.deepcopy(tables.model)
    model.model.layers[0].conv.conv.weight.data[..., -1 - age] = 0
    changed = replace(tables, model=model)
    wrong = [
        ids for ids in tables.prompt_ids if generate(changed, ids, 24) != tables.predict(ids, 24)
    ]
    assert len(wrong) >= 5
