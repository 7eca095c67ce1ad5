"""Experts that a record runs are chosen for its forward alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from transformers import PreTrainedConfig

from hal.integrations.transformers.experts import on_device
from support.models import DRIVEN, make_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def chosen(model: PreTrainedModel) -> dict[str, str | None]:
    """The implementation that each part of a model reads from its config, by the part's name."""
    parts = [(name, getattr(part, "config", None)) for name, part in model.named_modules()]
    configs = {name: config for name, config in parts if isinstance(config, PreTrainedConfig)}
    return {name: config._experts_implementation for name, config in configs.items()}


@pytest.mark.parametrize("name", DRIVEN)
def test_a_forward_that_fails_leaves_every_part_as_it_was(name: str) -> None:
    model = make_model(name)
    before = chosen(model)
    with pytest.raises(KeyError), on_device(model):
        inside = chosen(model)
        raise KeyError
    assert chosen(model) == before
    assert inside == {
        part: "batched_mm" if way == "grouped_mm" else way for part, way in before.items()
    }


def test_what_was_chosen_for_a_model_is_chosen_again_behind_a_record() -> None:
    model = make_model("qwen3_5_moe")
    model.set_experts_implementation("eager")
    before = chosen(model)
    with on_device(model):
        assert set(chosen(model).values()) == {"batched_mm"}
    assert set(chosen(model).values()) == {"eager"}
    assert chosen(model) == before


def test_experts_in_bfloat16_stay_as_they_are() -> None:
    model = make_model("qwen3_next", dtype=torch.bfloat16)
    before = chosen(model)
    with on_device(model):
        assert chosen(model) == before
