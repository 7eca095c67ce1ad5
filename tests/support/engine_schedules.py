"""Two requests through an engine's layer in pieces of any length, beside each of them alone."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

Rows = list[tuple[int, int, int]]
"""Of every row its place in the engine's pool, where it starts, and its tokens."""


def relative(got: Tensor, want: Tensor) -> float:
    """The distance to what is wanted, in parts of that."""
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


def check_any_schedule(
    data: st.DataObject,
    case: Any,
    places: Sequence[int],
    run: Callable[[Rows, list[Tensor]], Tensor],
) -> None:
    """Draw pieces until both requests have ended; each gives what `case.alone` does."""
    inputs, done = [case.inputs(n) for n in (23, 6)], [0, 0]
    outputs: list[list[Tensor]] = [[], []]
    while live := [i for i in (0, 1) if done[i] < inputs[i][0].shape[0]]:
        counts = {i: data.draw(st.sampled_from([1, 2, 12])) for i in live}
        counts = {i: min(n, inputs[i][0].shape[0] - done[i]) for i, n in counts.items()}
        rows = [(places[i], done[i], n) for i, n in counts.items()]
        cut = ([t[done[i] : done[i] + n] for t in inputs[i]] for i, n in counts.items())
        packed = [torch.cat(parts) for parts in zip(*cut, strict=True)]
        pieces = run(rows, packed)
        for (i, n), piece in zip(counts.items(), pieces.split([*counts.values()]), strict=True):
            outputs[i].append(piece)
            done[i] += n
    for i in (0, 1):
        assert relative(torch.cat(outputs[i]), case.alone(inputs[i])) < 1e-5
