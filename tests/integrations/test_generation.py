"""Continuous batching gives what transformers gives alone: tokens and logits, family by family."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hal.integrations.transformers import Runner, load_weights, open_folder
from hal.integrations.transformers.attention import Entry, KvStore
from support.models import DRIVEN, folder_of, solo
from support.serving import LENGTHS, Run, prompts_of, runner_of, serve

COUNT = 10
TOLERANCE = 1e-4
"""Of the largest logit of the reference row."""

BOTH = ("lfm2", "qwen3_5_text")


@dataclass
class Case:
    """One family: a run of ours and what transformers gave for each prompt by itself."""

    name: str
    run: Run
    runner: Runner
    reference: list[tuple[list[int], torch.Tensor]]


@pytest.fixture(scope="module", params=DRIVEN)
def case(request: pytest.FixtureRequest, root: Path) -> Iterator[Case]:
    folder = folder_of(request.param, root)
    opened = open_folder(folder, "cpu")
    model, runner = load_weights(opened), runner_of(folder)
    prompts = prompts_of()
    run = serve(runner, prompts, COUNT, stop=opened.stop_ids())
    yield Case(request.param, run, runner, [solo(model, p, COUNT) for p in prompts])


def test_all_prompts_get_the_tokens_of_solo_generate(case: Case) -> None:
    assert [case.run.ids[i] for i in range(len(LENGTHS))] == [ids for ids, _ in case.reference]


def test_logits_agree_at_every_generated_position(case: Case) -> None:
    for number, (_, wanted) in enumerate(case.reference):
        logits = torch.stack(case.run.logits[number])
        assert logits.shape == wanted.shape
        error = (logits - wanted).abs().amax(dim=1) / wanted.abs().amax(dim=1)
        assert error.max().item() <= TOLERANCE


def test_the_run_was_not_an_easy_one(case: Case) -> None:
    assert {"EXTEND", "MIXED", "DECODE"} == set(case.run.modes)
    assert case.run.modes.count("MIXED") >= 5
    assert case.run.cut_prompts >= 5
    assert len(case.run.tenants) == 3
    assert sum(len(tenants) for tenants in case.run.tenants.values()) == len(LENGTHS)


def test_nothing_is_held_once_all_have_ended(case: Case) -> None:
    assert case.runner.free_slots == 3
    assert case.runner.kv.bytes == 0


def test_the_logits_are_far_from_constant(case: Case) -> None:
    """Weights that leave the mixers idle would let any state pass."""
    rows = torch.cat([logits for _, logits in case.reference])
    assert rows.std(dim=0).mean().item() > 0.2


@pytest.mark.parametrize("name", BOTH)
def test_a_prompt_gets_the_same_tokens_alone_and_in_any_company(root: Path, name: str) -> None:
    runner = runner_of(folder_of(name, root))
    prompts = prompts_of()
    together = serve(runner, prompts, COUNT)
    for number, prompt in enumerate(prompts):
        alone = serve(runner, [prompt], COUNT)
        assert alone.ids[0] == together.ids[number]
        error = torch.stack(alone.logits[0]) - torch.stack(together.logits[number])
        assert error.abs().max().item() <= TOLERANCE * torch.stack(alone.logits[0]).abs().max()


@pytest.mark.parametrize("name", BOTH)
def test_the_same_run_gives_the_same_bits_again(root: Path, name: str) -> None:
    runner = runner_of(folder_of(name, root))
    first, second = (serve(runner, prompts_of(), COUNT) for _ in range(2))
    assert first.plans == second.plans
    for number, rows in first.logits.items():
        assert torch.equal(torch.stack(rows), torch.stack(second.logits[number]))


@pytest.mark.parametrize("name", BOTH)
@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    rows=st.integers(1, 3),
    budget=st.integers(1, 9),
)
def test_tokens_do_not_depend_on_rows_or_budget(
    root: Path, name: str, lengths: list[int], rows: int, budget: int
) -> None:
    runner = _runner(folder_of(name, root))
    prompts = prompts_of(lengths, seed=2)
    cut = serve(runner, prompts, 4, max_batch=rows, budget=budget)
    for number, prompt in enumerate(prompts):
        assert serve(runner, [prompt], 4).ids[0] == cut.ids[number]


def test_keys_of_a_former_tenant_change_nothing(root: Path) -> None:
    """The store is filled with NaN wherever a sequence has not written yet."""
    runner = runner_of(folder_of("lfm2", root))
    wanted = serve(runner, prompts_of(), COUNT)
    grow = KvStore._grow

    def dirty(store: KvStore, old: Entry | None, end: int, *kv: torch.Tensor) -> Entry:
        entry = grow(store, old, end, *kv)
        held = 0 if old is None else old.keys.shape[1]
        entry.keys[:, held:], entry.values[:, held:] = float("nan"), float("nan")
        return entry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KvStore, "_grow", dirty)
        got = serve(runner, prompts_of(), COUNT)
    assert got.ids == wanted.ids


@cache
def _runner(folder: Path) -> Runner:
    """One runner a folder, for examples that come in numbers."""
    return runner_of(folder)
