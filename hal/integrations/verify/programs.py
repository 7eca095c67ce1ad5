"""How an engine is asked: alone and re-prefilled, at once with others, in chunks and from prefixes.

Way names are what the table shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hal.integrations.verify.record import Answer, Record, Served, Ways

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hal.integrations.verify.prompts import Questions

ALONE: Final = "alone"
SHARED: Final = "from a prefix of another prompt"
AGAIN: Final = "from its own prefix"


def fresh(served: Served, asked: Questions) -> Record:
    """Every prompt alone and at once with others, each fed whole, and what re-prefill says.

    A re-prefill feeds prompt and output as one prompt, alone.
    """
    everyone = range(len(asked.prompts))
    alone = {i: _one(served, asked, i, None) for i in everyone}
    scores = {
        i: served.score((*asked.prompts[i], *answer.tokens), len(asked.prompts[i]))
        for i, answer in alone.items()
    }
    ways = {ALONE: alone}
    for name, indices, counts in batches(len(asked.prompts), asked.new_tokens):
        found = served.generate([asked.prompts[i] for i in indices], counts, None)
        ways[name] = dict(zip(indices, found, strict=True))
    return Record(served.facts, ways, scores)


def batches(prompts: int, new_tokens: int) -> Iterator[tuple[str, list[int], list[int]]]:
    """Ways to serve several at once: a name, the prompts in order, and the new tokens of each.

    Uneven ends thin the batch out while it runs, so an engine has rows to pad.
    """
    if prompts < 2:
        return
    yield "2 at once", [0, prompts - 1], [new_tokens] * 2
    everyone = list(range(prompts))
    yield f"{prompts} at once", everyone, [new_tokens] * prompts
    ends = [1 + (3 * i) % new_tokens for i in everyone]
    yield f"{prompts} at once, uneven ends", everyone[::-1], ends


def resumed(served: Served, asked: Questions, chunks: Sequence[int]) -> Record:
    """Prompts fed in chunks, alone and at once, and prompts that start from cached prefixes."""
    ways: Ways = {}
    for chunk in chunks:
        cut = [i for i, prompt in enumerate(asked.prompts) if len(prompt) > chunk]
        name = f"in chunks of {chunk}"
        ways[name] = {i: _cold(served, asked, [i], chunk)[i] for i in cut}
        if len(cut) > 1:
            ways[f"{name}, {len(cut)} at once"] = _cold(served, asked, cut, chunk)
    if served.facts.no_prefix is None:
        served.forget()
        widest = max(chunks)
        for name in (SHARED, AGAIN):
            found = {i: _one(served, asked, i, widest) for i in range(len(asked.prompts))}
            ways[name] = {i: answer for i, answer in found.items() if answer.cached}
    return Record(served.facts, ways)


def _one(served: Served, asked: Questions, index: int, chunk: int | None) -> Answer:
    return served.generate([asked.prompts[index]], [asked.new_tokens], chunk)[0]


def _cold(
    served: Served, asked: Questions, indices: Sequence[int], chunk: int
) -> dict[int, Answer]:
    served.forget()
    prompts = [asked.prompts[i] for i in indices]
    answers = served.generate(prompts, [asked.new_tokens] * len(prompts), chunk)
    return dict(zip(indices, answers, strict=True))
