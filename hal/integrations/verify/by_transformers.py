"""`hal`'s own runner over transformers, as the self-check asks it."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Final

import transformers

from hal.integrations.transformers import Engine, Folder, Runner, load, open_folder
from hal.integrations.verify.programs import fresh, resumed
from hal.integrations.verify.record import Answer, Facts, Record, Setup, Step
from hal.refusal import Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from hal.integrations.verify.prompts import Questions
    from hal.runtime.plan import Plan

PREFIX_SLOTS: Final = 16
"""Slots for cached states beside those of the prompts that run."""


class TransformersServed:
    """A runner of `hal`, served by engines that last one batch each."""

    def __init__(self, setup: Setup) -> None:
        folder, no_prefix = _opened(setup)
        self.facts = _facts(folder, no_prefix)
        self._setup = setup
        cached = PREFIX_SLOTS if no_prefix is None else 0
        self._runner: Runner = load(
            folder,
            slots=setup.max_batch + cached,
            max_batch=setup.max_batch,
            max_tokens=setup.budget,
            max_len=setup.max_len,
        )

    def generate(
        self, prompts: Sequence[Sequence[int]], counts: Sequence[int], chunk: int | None
    ) -> list[Answer]:
        """Serve the prompts at once; whatever token ends a text, all new tokens are made."""
        steps: list[list[Step]] = [[] for _ in prompts]
        saved = self._serve(
            prompts,
            counts,
            chunk,
            lambda request, logits: steps[request].append(_step(logits, self._setup.top)),
        )
        return [Answer(tuple(made), found) for made, found in zip(steps, saved, strict=True)]

    def score(self, ids: Sequence[int], start: int) -> list[float]:
        """Prefill each prefix of `ids` alone: the runner gives logits of a prompt's end alone."""
        found: list[float] = []
        for end in range(start, len(ids)):

            def keep(_: int, logits: Tensor, token: int = ids[end]) -> None:
                found.append(float(logits.log_softmax(-1)[token]))

            self._serve([ids[:end]], [1], None, keep)
        return found

    def forget(self) -> None:
        """Drop cached prefixes."""
        self._runner.drop_prefixes()

    def _serve(
        self,
        prompts: Sequence[Sequence[int]],
        counts: Sequence[int],
        chunk: int | None,
        keep: Callable[[int, Tensor], None],
    ) -> list[int]:
        """Run to the end, show each new token's logits to `keep`; prompt tokens not fed."""

        def observe(plan: Plan, logits: Tensor) -> None:
            for row, values in zip(plan.samples, logits, strict=True):
                keep(plan.requests[row], values)

        engine = Engine(
            self._runner,
            max_batch=self._setup.max_batch,
            token_budget=chunk or self._setup.budget,
            observe=observe,
        )
        for prompt, count in zip(prompts, counts, strict=True):
            engine.submit(prompt, count)
        for _ in engine.run():
            pass
        return [count.saved for count in engine.scheduler.counts]


def check(whole: Setup, again: Setup, asked: Questions) -> tuple[Record, Record | str]:
    """Run both programs in this process, one runner after the other."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    first = fresh(TransformersServed(whole), asked)
    gc.collect()  # the weights of the first runner, before those of the second
    return first, resumed(TransformersServed(again), asked, again.chunks)


def _opened(setup: Setup) -> tuple[Folder, str | None]:
    """The folder, with a prefix cache where one is asked for and offered, else why not."""
    path = Path(setup.folder)
    if not setup.prefix:
        return open_folder(path, setup.device, setup.dtype), "not asked for"
    try:
        return open_folder(path, setup.device, setup.dtype, prefix_cache=True), None
    except Unsupported as error:
        why = error.refusal.headline()
        return open_folder(path, setup.device, setup.dtype), why


def _facts(folder: Folder, no_prefix: str | None) -> Facts:
    served: dict[str, list[str]] = {}
    for operation, choice in folder.selection.choices.items():
        named = f"{choice.provider} ({choice.distribution} {choice.version})"
        served.setdefault(named, []).append(operation)
    return Facts(
        engine="transformers",
        version=transformers.__version__,
        device=str(folder.selection.device),
        dtype=folder.selection.dtype,
        served_by=tuple(f"hal: {', '.join(ops)} by {name}" for name, ops in served.items()),
        no_prefix=no_prefix,
    )


def _step(logits: Tensor, top: int) -> Step:
    scores = logits.log_softmax(-1)
    token = int(logits.max(dim=-1).indices)
    values, ids = scores.topk(top)
    return Step(token, float(scores[token]), dict(zip(ids.tolist(), values.tolist(), strict=True)))
