"""The states matter: what is lost between prefill and decode is missing from the text."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import DynamicCache

if TYPE_CHECKING:
    from conftest import Example

Spoil = Callable[[Any], None]
"""Changes what the cache holds for the first layer."""

LENGTH = 24


@torch.no_grad()
def resume(example: "Example", ids: list[int], spoil: Spoil) -> list[int]:
    """Prefill, spoil the state, decode on: the greedy words that come out."""
    cache = DynamicCache(config=example.model.config)
    written: list[int] = []
    fed = ids
    while len(written) < LENGTH:
        answer = example.model(torch.tensor([fed]), cache=cache, use_cache=True)
        written.append(int(answer.logits[0, -1].argmax()))
        if len(written) == 1:
            spoil(cache.layers[0])
        fed = written[-1:]
    return written


def keep(layer: Any) -> None:
    pass


def lose_conv(layer: Any) -> None:
    layer.conv_states[0].zero_()


def lose_recurrent(layer: Any) -> None:
    layer.recurrent_states[0].zero_()


def lose_column(column: int) -> Spoil:
    def lose(layer: Any) -> None:
        layer.conv_states[0][..., column].zero_()

    return lose


def spoiled(example: "Example", spoil: Spoil) -> list[str]:
    """The prompts whose continuation is no longer the predicted one."""
    return [
        prompt
        for prompt, ids in zip(example.prompts, example.prompt_ids, strict=True)
        if resume(example, ids, spoil) != example.predict(ids, LENGTH)
    ]


def test_nothing_lost_is_the_prediction(example: "Example") -> None:
    assert spoiled(example, keep) == []


@pytest.mark.parametrize("spoil", [lose_conv, lose_recurrent])
def test_the_memory_needs_both_states_for_all_prompts_but_one_word(
    built: dict[str, "Example"], spoil: Spoil
) -> None:
    """One word and its habits pair up the same way again: there is nothing to lose."""
    memory = built["induction-qwen3_5"]
    assert spoiled(memory, spoil) == memory.prompts[1:]


def test_the_tables_need_the_window_for_all_prompts(built: dict[str, "Example"]) -> None:
    tables = built["tables-lfm2"]
    assert spoiled(tables, lose_conv) == tables.prompts


@pytest.mark.parametrize("column", [-1, -2])
def test_the_tables_need_each_column_of_the_window(
    built: dict[str, "Example"], column: int
) -> None:
    tables = built["tables-lfm2"]
    assert len(spoiled(tables, lose_column(column))) >= 4


def test_the_column_before_the_window_is_never_read(example: "Example") -> None:
    """transformers keeps W inputs of which W - 1 can be read; garbage there changes nothing."""

    def poison(layer: Any) -> None:
        layer.conv_states[0][..., 0] = 1e6

    assert spoiled(example, poison) == []


def test_the_memory_reads_the_recurrent_state_the_right_way_round(
    built: dict[str, "Example"],
) -> None:
    """All prompts tell, but the one that pairs nothing and the one whose pairs read both ways."""
    memory = built["induction-qwen3_5"]

    def transpose(layer: Any) -> None:
        state = layer.recurrent_states[0]
        state.copy_(state.transpose(-1, -2).clone())

    assert spoiled(memory, transpose) == memory.prompts[2:]


@pytest.mark.parametrize("spoil", [lose_conv, lose_recurrent])
def test_texts_that_repeat_themselves_need_both_states(
    built: dict[str, "Example"], spoil: Spoil
) -> None:
    memory = built["induction-qwen3_5"]
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(4, 10, (15,), generator=generator).tolist() for _ in range(20)]
    changed = [resume(memory, ids, spoil) != memory.predict(ids, LENGTH) for ids in prompts]
    assert sum(changed) >= 15
