"""A bound layer with captured steps, random steps for it, and both ways to run one of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import torch
from torch import Tensor

import hal
from hal.runtime.batch import Batch, DeviceSlots, Mode
from hal.runtime.graphs import Captured
from support.backends import Bound, selected_with
from support.bound import FAMILIES

SLOTS = 6
"""Of the backends that tests bind."""
WIDTH = 3
"""Tokens of a VERIFY row at most."""


def bound_for_graphs(family: str, tree: bool = False, track: bool = False) -> Bound:
    """A family's layer on a backend that captures, verifies and maybe tracks; states are random."""
    options: dict[str, object] = {"graphs": True, "prefix_cache": track}
    if family != "zamba":
        options["speculative"] = hal.Speculative(WIDTH, tree=tree)
    with selected_with(**options):
        bound = FAMILIES[family]()
    for tensor in states(bound):
        tensor.normal_()
        tensor[0] = float("nan")
    return bound


def states(bound: Bound) -> list[Tensor]:
    """Every state tensor of the layer that the tests bind, slot axis first."""
    layer = next(bound.backend.selection.model.stateful_layers()).index
    return list(bound.backend.pool.tensors(layer).values())


@contextmanager
def put_back(bound: Bound) -> Iterator[list[Tensor]]:
    """Run the block and restore the states; the list then holds what the block made of them."""
    before = [tensor.clone() for tensor in states(bound)]
    after: list[Tensor] = []
    yield after
    for tensor, old in zip(states(bound), before, strict=True):
        after.append(tensor.clone())
        tensor.copy_(old)


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    """Whether all slots hold the same bits, NaN included."""
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in pairs)


class Rig:
    """One layer's captured steps of a mode, smallest first, and the static tensors of each."""

    def __init__(self, bound: Bound, mode: Mode, sizes: tuple[int, ...], width: int = 1) -> None:
        self.bound, self.mode, self.sizes, self.width = bound, mode, sizes, width
        self.inputs: dict[int, list[Tensor]] = {}
        self.results: dict[int, Tensor] = {}
        self.runs = 0  # how often Python ran a captured block
        for rows in sizes:
            self.inputs[rows] = bound.inputs(rows * width)
            with bound.backend.capture(mode, rows, width):
                self.results[rows] = bound.call(self.inputs[rows])
                self.runs += 1

    def fitting(self, batch: Batch) -> int:
        """The rows of the smallest captured step with room."""
        return min(size for size in self.sizes if size >= batch.rows)

    def replay(self, batch: Batch, given: list[Tensor]) -> tuple[Captured, Tensor]:
        """Fill the inputs of the size that fits, garbage behind the live tokens, and replay."""
        rows = self.fitting(batch)
        for static, fresh in zip(self.inputs[rows], given, strict=True):
            static.fill_(float("nan"))
            static[: batch.tokens].copy_(fresh)
        self.results[rows].fill_(float("nan"))
        captured = self.bound.backend.replay(batch)
        assert captured.rows == rows
        return captured, self.results[rows]


def decode_batch(rng: Random, rows: int) -> Batch:
    """Rows that go on, start, fork from slot 1, keep nothing, or are pads, in any order."""
    free = rng.sample(range(2, SLOTS + 1), SLOTS - 1)
    src, dst = [], []
    for _ in range(rows):
        kind = rng.choice(("on", "on", "fresh", "fork", "stateless", "pad")) if free else "pad"
        slot = -1 if kind == "pad" else free.pop()
        src.append({"fresh": -1, "fork": 1}.get(kind, slot))
        dst.append(-1 if kind == "stateless" else slot)
    start = [rng.randint(3, 40) if slot >= 0 else 0 for slot in src]
    lengths = [int(max(pair) >= 0) for pair in zip(src, dst, strict=True)]
    return Batch(Mode.DECODE, lengths, start, src, dst)


def verify_batch(rng: Random, rows: int, tree: bool = False, track: bool = False) -> Batch:
    """Rows of 0 to WIDTH drafts on their own slot or on slot 1, each with its own target."""
    free = rng.sample(range(2, SLOTS + 1), SLOTS - 1)
    lengths, src, dst, points, parents = [], [], [], [], []
    for row in range(rows):
        slot = free.pop() if free else -1
        lengths.append(rng.randint(0, WIDTH) if slot >= 0 else 0)
        src.append(rng.choice((slot, 1)))
        dst.append(slot)
        parents.append([rng.randint(-1, token - 1) for token in range(lengths[-1])])
        if track and lengths[-1] and len(free) > 1 and rng.random() < 0.5:
            points.append((row, rng.randint(1, lengths[-1]), free.pop()))
    start = [rng.randint(3, 40) for _ in range(rows)]
    moved = [(row, start[row] + count, slot) for row, count, slot in points]
    return Batch(Mode.VERIFY, lengths, start, src, dst, moved, parents if tree else None)


def on_device(batch: Batch) -> Batch:
    """The same step with its slots in tensors; pads are left to the device."""
    ids = [torch.tensor(slots, dtype=torch.int32) for slots in (batch.src, batch.dst)]
    lengths = [1] * batch.rows if batch.mode is Mode.DECODE else batch.lengths
    held = DeviceSlots(*ids, SLOTS)
    return Batch(batch.mode, lengths, batch.start, (), (), batch.track, batch.parents, held)


def depths(parents: list[int]) -> list[int]:
    """How many tokens the path to each token has."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def acceptance(rng: Random, batch: Batch) -> tuple[list[int], list[int] | None]:
    """Random counts of a VERIFY step, and the tips of a tree."""
    if batch.parents is None:
        return [rng.randint(0, length) for length in batch.lengths], None
    tips = [rng.randint(-1, length - 1) for length in batch.lengths]
    counts = [
        depths(list(links))[tip] if tip >= 0 else 0
        for tip, links in zip(tips, batch.parents, strict=True)
    ]
    return counts, tips
