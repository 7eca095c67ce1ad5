"""Integers of the host are taken as plain ones, so that none wraps on its way to the device."""

from typing import Any, cast

import numpy
import pytest
import torch

import hal
from hal.runtime.batch import LAST_POSITION, Batch, Mode
from hal.runtime.building import largest_frame
from support.bound import GDN_CONFIG
from support.captured import bound_for_graphs, states

SMALL: list[Any] = [numpy.uint8, numpy.int8, int, torch.tensor]
"""What engines keep integers in: in the narrow ones 0 - 1 and 100 * 3 are other numbers."""


@pytest.mark.parametrize("kind", SMALL)
def test_counts_of_a_commit_are_plain_integers_whatever_an_engine_keeps_them_in(kind: Any) -> None:
    bound = bound_for_graphs("gated_delta_net")
    given = bound.inputs(5)
    before = [tensor.clone() for tensor in states(bound)]
    bound.backend.begin(Batch(Mode.VERIFY, [3, 2], [4, 4], [1, 2], [1, 3]))
    bound.call(given)
    bound.backend.commit([kind(0), kind(0)])
    for tensor, old in zip(states(bound), before, strict=True):
        assert torch.equal(tensor[1], old[1]) and torch.equal(tensor[3], old[2])


@pytest.mark.parametrize("kind", SMALL)
def test_sizes_are_plain_integers_whatever_an_engine_keeps_them_in(kind: Any) -> None:
    selection = hal.select("cpu", GDN_CONFIG, graphs=True, speculative=hal.Speculative(3))
    backend = selection.backend(kind(127), kind(100), kind(120))
    assert backend.pool.slots == backend.limits.slots == 127
    assert largest_frame(backend.limits).tokens == 300
    with backend.capture(Mode.VERIFY, kind(40), kind(3), record=False) as captured:
        pass
    assert captured.tokens == captured.frame.tokens == 120


def test_sizes_that_are_no_integers_are_refused() -> None:
    selection = hal.select("cpu", GDN_CONFIG)
    for size in (1.5, "4", None):
        with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
            selection.backend(4, 4, cast("int", size))


def test_a_step_has_no_more_tokens_than_int32_counts_whatever_a_backend_was_built_for() -> None:
    backend = hal.select("cpu", GDN_CONFIG).backend(4, 4, 10**12)
    with pytest.raises(ValueError, match=f"{LAST_POSITION + 1} tokens, at most {LAST_POSITION} ha"):
        backend.begin(Batch(Mode.EXTEND, [LAST_POSITION, 1], [0, 0], [-1, -1], [1, 2]))
