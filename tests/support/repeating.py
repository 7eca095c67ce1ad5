"""Models that say few words again and again, and prompts that share beginnings and phrases."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from hal.integrations.transformers import Engine, load, open_folder
from support.models import make_model, save_model
from support.serving import BUDGET, MAX_LEN, SLOTS, Run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hal.integrations.transformers import Runner

WORDS = (20, 21, 22, 23, 24, 25)
"""The tokens that these models prefer, so that short runs of them come up again."""

LOUD = 8.0
"""What their rows of the head are scaled by: drafts then hold sometimes, and not always."""


@cache
def repeating_folder(name: str, root: Path) -> Path:
    """The folder of a family's model whose outputs are mostly a few words."""
    model = make_model(name, tie_word_embeddings=False)
    with torch.no_grad():
        model.get_output_embeddings().weight[list(WORDS)] *= LOUD
    return save_model(model, root / f"{name}-repeating")


def shared_prompts(seed: int = 0) -> list[list[int]]:
    """Prompts that share beginnings, repeat a phrase, are equal, and go on from each other."""
    random = torch.Generator().manual_seed(seed)

    def draw(count: int) -> list[int]:
        return torch.randint(3, 150, (count,), generator=random).tolist()

    system, phrase = draw(14), list(WORDS[:4])
    first = system + draw(3)
    return [
        first,
        system + draw(6),
        phrase * 4,
        system + phrase * 3,
        system[:9] + draw(2) + phrase * 2,
        list(first),
        first + phrase,
        system[:9] + phrase,
    ]


def sparing_runner(
    folder: Path,
    speculative: int | None,
    cached: int,
    budget: int = BUDGET + 3,
    graphs: bool = False,
) -> Runner:
    """A runner that drafts and caches as asked; its pool is full of NaN, so that any leak shows."""
    opened = open_folder(
        folder, "cpu", speculative=speculative, prefix_cache=cached > 0, graphs=graphs
    )
    runner = load(opened, slots=SLOTS + cached, max_batch=SLOTS, max_tokens=budget, max_len=MAX_LEN)
    for spec in runner.backend.selection.states:
        runner.backend.pool.tensors(spec.layer)[spec.name].fill_(float("nan"))
    return runner


def serve_with(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    count: int,
    stop: Sequence[int] = (),
    budget: int = BUDGET + 3,
) -> tuple[Run, Engine]:
    """Serve all prompts at once; the engine has the statistics."""
    run = Run()
    engine = Engine(
        runner,
        max_batch=SLOTS,
        token_budget=budget,
        stop=stop,
        observe=lambda plan, _: run.plans.append(plan),
    )
    for prompt in prompts:
        engine.submit(prompt, count)
    for event in engine.run():
        if event.token is not None:
            run.ids.setdefault(event.request, []).append(event.token)
        if event.reason is not None:
            run.reasons[event.request] = str(event.reason)
    return run, engine
