"""The conv-state sidecar: the pool's own tensors, with the index objects of the step."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import torch

from hal.errors import StepOrderError
from hal.testing.rows import i32
from hal_registry.vocabulary import LAYOUTS, states_of

if TYPE_CHECKING:
    from torch import Tensor

    from hal.interfaces import ConvState
    from hal.testing.subject import Subject
    from hal_registry import Candidate

LAYERS = (3, 0, 11)
SHAPES = ((9, 6, 2), (9, 5, 1))
"""Two tensors a layer, as layers of kind `cca` have."""

STEPS = (
    ((2, -1), (1, 3), (5, 0), (0, 1, 4), 3),
    ((3, 1, 4), (3, -1, 2), (0, 9, 2**31 - 1), (0, 1, 2**20, 2**21), 2**20),
    ((), (), (), (0,), 1),
    ((8,), (8,), (7,), (0, 1), 1),
)
"""src, dst, start, bounds and max_len of steps, one without rows among them."""


class Sidecar:
    """Tests of the conv-state sidecar, where it is offered."""

    def test_the_sidecar_pairs_tensors_with_the_indices_of_the_step(
        self, hal_subject: Subject, sidecar: str
    ) -> None:
        """Every layer gets the given index objects and its own tensors, whose bits stay."""
        offer = hal_subject.candidate.manifest.offers[sidecar]
        for layouts, name in product(layouts_of(hal_subject.candidate), offer.dtypes):
            held = _held(getattr(torch, name), hal_subject.place)
            before = {layer: [t.clone() for t in own] for layer, own in held.items()}
            state = _sidecar(hal_subject, layouts)
            state.attach(held)
            _raises(StepOrderError, state)
            for *given, max_len in STEPS:
                _step(state, held, [i32(*ids).to(hal_subject.place) for ids in given], max_len)
            _raises(ValueError, state, 7)
            same = [
                torch.equal(a, b) for n in held for a, b in zip(held[n], before[n], strict=True)
            ]
            assert all(same), f"the sidecar changed a state in {name}"


def _held(dtype: torch.dtype, place: torch.device) -> dict[int, tuple[Tensor, ...]]:
    """Random tensors for each layer."""
    gen = torch.Generator().manual_seed(0)
    return {
        layer: tuple(torch.randn(shape, generator=gen).to(dtype).to(place) for shape in SHAPES)
        for layer in LAYERS
    }


def _step(
    state: ConvState, held: dict[int, tuple[Tensor, ...]], given: list[Tensor], max_len: int
) -> None:
    """Begin a step, and look at it from every layer."""
    values = [tensor.tolist() for tensor in given]
    src, dst, start, bounds = given
    state.begin(src, dst, start, bounds, max_len)
    for layer, tensors in held.items():
        step = state.step(layer)
        found = (step.src, step.dst, step.start, step.query_start_loc)
        assert all(mine is own for mine, own in zip(found, given, strict=True)), (
            "a layer has other index objects than the step"
        )
        assert [t.tolist() for t in found] == values, "an index changed"
        assert all(a is b for a, b in zip(step.tensors, tensors, strict=True)), (
            "a layer has other tensors than the pool's"
        )
        assert step.max_len == max_len, f"max_len is {step.max_len}, the step's is {max_len}"


def _declared(candidate: Candidate) -> dict[str, list[str]]:
    """The layouts of each state that all operations which touch it declare, in order."""
    found: dict[str, list[str]] = {}
    for operation, offer in candidate.manifest.offers.items():
        for state in states_of(operation):
            names = [name for name in offer.layouts if name in LAYOUTS[state]]
            found[state] = [n for n in found.get(state, names) if n in names]
    return {state: names for state, names in found.items() if names}


def layouts_of(candidate: Candidate) -> list[dict[str, str]]:
    """The preferred layouts, and each other layout in their place."""
    declared = _declared(candidate)
    first = {state: names[0] for state, names in declared.items()}
    others = [{**first, state: n} for state, names in declared.items() for n in names[1:]]
    return [first, *others]


def _sidecar(subject: Subject, layouts: dict[str, str]) -> ConvState:
    """The sidecar of a provider in these layouts, with nothing attached."""
    subject.built.pop(tuple(sorted(layouts.items())), None)
    state = subject.provider(layouts).conv_state
    if state is None:
        raise AssertionError("conv_state is offered and the provider has none")
    return state


def _raises(error: type[Exception], state: ConvState, layer: int = LAYERS[0]) -> None:
    """Assert that a layer is refused."""
    try:
        state.step(layer)
    except error:
        return
    raise AssertionError(f"layer {layer}: expected {error.__name__}")
