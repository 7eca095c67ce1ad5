"""A folder served with continuous batching, and everything a test wants to know of the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from hal.integrations.transformers import Engine, Runner, load, open_folder
from hal.runtime.batch import NO_SLOT, Batch, Mode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from random import Random

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


ROWS, TOKENS = 4, 16
"""What a step of `feed` takes at most, pads included."""

Sample = tuple[int, int]
"""A sequence, and a position in it."""


@dataclass
class Row:
    """A row of one step: which sequence, the tokens it takes, where it starts, its slot."""

    sequence: int
    tokens: list[int]
    start: int
    slot: int


def feed(
    runner: Runner, sequences: Sequence[Sequence[int]], piece: int | None, random: Random
) -> dict[Sample, Tensor]:
    """Feed given tokens in pieces and keep the logits at the end of each.

    `piece` tokens at a time, any number where it is None. Rows come in any order, in slots of no
    order, beside pads and rows without tokens, over states that begin as NaN.
    """
    for spec in runner.backend.selection.states:
        runner.backend.pool.tensors(spec.layer)[spec.name].fill_(float("nan"))
    runner.kv.release(range(ROWS + 1))
    slots, got = random.sample(range(1, ROWS + 1), len(sequences)), {}
    for rows in _pieces(sequences, slots, piece, random):
        batch, tokens = _padded(rows, random)
        ends = [i for i, length in enumerate(batch.lengths) if length and batch.dst[i] >= 0]
        by_slot = {row.slot: row for row in rows}
        for index, logits in zip(ends, runner.step(batch, tokens, ends), strict=True):
            row = by_slot[batch.dst[index]]
            got[row.sequence, row.start + len(row.tokens) - 1] = logits
    return got


def _pieces(
    sequences: Sequence[Sequence[int]], slots: Sequence[int], piece: int | None, random: Random
) -> Iterator[list[Row]]:
    """The rows of each step, in any order; sequences that have ended take no tokens."""
    done = [0] * len(sequences)
    while any(n < len(s) for n, s in zip(done, sequences, strict=True)):
        rows = []
        for i in random.sample(range(len(sequences)), len(sequences)):
            size = random.choice([0, 1, 1, 2, 3, 5]) if piece is None else piece
            tokens = list(sequences[i][done[i] : done[i] + size])
            rows.append(Row(i, tokens, done[i], slots[i]))
            done[i] += len(tokens)
        yield rows


def _padded(rows: Sequence[Row], random: Random) -> tuple[Batch, list[int]]:
    """A step of these rows and its packed tokens, with pads of both kinds.

    Rows of one token each make a DECODE step with pad rows, all others have pad tokens behind.
    """
    live = [row for row in rows if row.tokens]
    if all(len(row.tokens) == 1 and row.start for row in live):
        packed: list[Row | None] = [*live, *[None] * (ROWS - len(live))]
        random.shuffle(packed)
        tokens = [random.randint(3, 150) if row is None else row.tokens[0] for row in packed]
        slots = [NO_SLOT if row is None else row.slot for row in packed]
        start = [0 if row is None else row.start for row in packed]
        return Batch(Mode.DECODE, [1] * ROWS, start, slots, slots), tokens
    tokens = [token for row in rows for token in row.tokens]
    tokens += [random.randint(3, 150) for _ in range(random.randint(0, 2))]
    src = [row.slot if row.start else NO_SLOT for row in rows]
    lengths, start = [len(row.tokens) for row in rows], [row.start for row in rows]
    return Batch(Mode.MIXED, lengths, start, src, [row.slot for row in rows]), tokens
