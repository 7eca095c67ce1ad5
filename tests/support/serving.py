"""A folder served with continuous batching, and everything a test wants to know of the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from hal.integrations.transformers import Engine, Runner, load, open_folder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from hal.runtime.scheduler import Plan

SLOTS, BUDGET, MAX_LEN = 3, 9, 64
LENGTHS = (1, 7, 40, 3, 12, 25)


def prompts_of(lengths: Sequence[int] = LENGTHS, seed: int = 1) -> list[list[int]]:
    """Random prompts without the special tokens of the tiny vocabularies."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 150, (n,), generator=generator).tolist() for n in lengths]


@dataclass
class Run:
    """What a run gave: tokens and logits by request, and its plans in order."""

    ids: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    logits: dict[int, list[Tensor]] = field(default_factory=dict)
    plans: list[Plan] = field(default_factory=list)

    def observe(self, plan: Plan, logits: Tensor) -> None:
        """Keep a step's plan and logits."""
        self.plans.append(plan)
        for row, values in zip(plan.samples, logits, strict=True):
            self.logits.setdefault(plan.requests[row], []).append(values)

    @property
    def modes(self) -> list[str]:
        """The modes of the steps."""
        return [str(plan.batch.mode) for plan in self.plans]

    @property
    def cut_prompts(self) -> int:
        """How many chunks ended within their prompt."""
        return sum(plan.batch.rows - len(plan.samples) for plan in self.plans)

    @property
    def tenants(self) -> dict[int, set[int]]:
        """The requests that each slot held."""
        held: dict[int, set[int]] = {}
        for plan in self.plans:
            for request, slot in zip(plan.requests, plan.batch.dst, strict=True):
                held.setdefault(slot, set()).add(request)
        return held


def runner_of(folder: Path, max_len: int = MAX_LEN, dtype: str | None = None) -> Runner:
    """A runner of three slots and nine tokens a step on the CPU."""
    opened = open_folder(folder, "cpu", dtype)
    return load(opened, slots=SLOTS, max_batch=SLOTS, max_tokens=BUDGET, max_len=max_len)


def serve(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    count: int = 10,
    *,
    stop: Sequence[int] = (),
    max_batch: int = SLOTS,
    budget: int = BUDGET,
) -> Run:
    """Serve all prompts at once and keep what happened."""
    run = Run()
    engine = Engine(
        runner, max_batch=max_batch, token_budget=budget, stop=stop, observe=run.observe
    )
    for prompt in prompts:
        engine.submit(prompt, count)
    for event in engine.run():
        if event.token is not None:
            run.ids.setdefault(event.request, []).append(event.token)
        if event.reason is not None:
            run.reasons[event.request] = str(event.reason)
    return run
