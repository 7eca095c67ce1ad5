"""Copies to the device that run late never carry another step's integers."""

from array import array
from dataclasses import dataclass, field
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hal.runtime.batch import Batch, Mode
from hal.runtime.staging import Direct, Ring, transfer_to
from hal.runtime.step import Step, make_step

CPU = torch.device("cpu")


@dataclass
class Pending:
    """A copy that reads its source when it is waited for, or when the queue is let run."""

    source: Tensor
    target: Tensor
    ran: bool = False

    def run(self) -> None:
        if not self.ran:
            self.target.copy_(self.source)
            self.ran = True

    def wait(self) -> None:
        self.run()


@dataclass
class Late:
    """A device that copies as late as it may; `eager` of its copies run at once."""

    queue: list[Pending] = field(default_factory=list)

    def start(self, source: Tensor, target: Tensor) -> Pending:
        self.queue.append(Pending(source, target))
        return self.queue[-1]

    def catch_up(self) -> None:
        for pending in self.queue:
            pending.run()


def fields(step: Step) -> list[list[int]]:
    tensors = (step.query_start_loc, step.src, step.dst, step.start)
    return [tensor.tolist() for tensor in tensors]


@given(seed=st.integers(0, 1 << 20), depth=st.integers(1, 4), steps=st.integers(1, 12))
def test_the_next_steps_do_not_overwrite_a_copy_under_way(
    seed: int, depth: int, steps: int
) -> None:
    rng, late = Random(seed), Late()
    ring, plain = Ring(CPU, 4, depth, late), Ring(CPU, 4, 1)
    made = []
    for _ in range(steps):
        rows = rng.randint(1, 9)
        slots = rng.sample(range(1, 99), rows)
        batch = Batch(Mode.DECODE, [1] * rows, rng.sample(range(99), rows), slots, slots)
        made.append((make_step(batch, ring), make_step(batch, plain)))
        if rng.random() < 0.2:
            late.catch_up()
    late.catch_up()
    for step, want in made:
        assert fields(step) == fields(want)


def test_a_ring_without_fences_would_be_seen_by_the_test_above() -> None:
    """The mutant starts no wait: every late copy then carries the last step's integers."""
    late = Late()
    ring = Ring(CPU, 4, 1, late)
    first = ring.send(array("i", [1, 2]))
    for pending in late.queue:
        pending.ran = True
    ring.send(array("i", [3, 4]))
    for pending in late.queue:
        pending.ran = False
    late.catch_up()
    assert first.tolist() == [3, 4]


def test_a_step_waits_only_for_the_buffer_that_it_takes() -> None:
    late = Late()
    ring = Ring(CPU, 4, 3, late)
    sent = [ring.send(array("i", [value])) for value in range(3)]
    assert [pending.ran for pending in late.queue] == [False] * 3
    sent.append(ring.send(array("i", [3])))
    assert [pending.ran for pending in late.queue] == [True, False, False, False]
    late.catch_up()
    assert [tensor.item() for tensor in sent] == [0, 1, 2, 3]


@pytest.mark.parametrize("count", [0, 1, 4, 5, 4000])
def test_any_number_of_integers_arrives(count: int) -> None:
    values = array("i", range(-1, count - 1))
    ring = Ring(CPU, 4)
    for _ in range(9):
        assert ring.send(values).tolist() == values.tolist()
    target = torch.full((count,), 7, dtype=torch.int32)
    ring.write(values, target)
    assert target.tolist() == values.tolist()


def test_what_was_sent_is_memory_of_its_own() -> None:
    ring = Ring(CPU, 4, 1)
    first = ring.send(array("i", [1, 2, 3]))
    ring.send(array("i", [4, 5, 6]))
    assert first.tolist() == [1, 2, 3]


def test_buffers_made_under_inference_mode_serve_outside_of_it() -> None:
    with torch.inference_mode():
        ring = Ring(CPU, 1)
    for size in (1, 50):
        assert ring.send(array("i", range(size))).tolist() == list(range(size))


def test_the_host_copies_directly() -> None:
    assert isinstance(transfer_to(CPU), Direct)
