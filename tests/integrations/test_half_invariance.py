"""In 16 bits a sequence gets the same bits in any company, and its cuts move rounding alone.

In float32 the matrix products of a step round differently with its number of tokens. In 16 bits the
results are rounded so much more coarsely that nothing is left of that, and whatever else reached a
row from its neighbours, its slot or its pads would show in its bits.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from hal.integrations.transformers import Runner, load, open_folder
from hal.runtime.batch import Batch
from support.models import DRIVEN, folder_of
from support.serving import ROWS, TOKENS, Sample, feed, prompts_of

SEQUENCES = prompts_of((19, 12, 23), seed=4)
PIECE = 3

CUTS = {"bfloat16": 2.5e-2, "float16": 1e-2}
"""How far a sequence's cuts may move its logits, of the largest logit of their row."""


@cache
def runner(name: str, root: Path, dtype: str) -> Runner:
    """A family's runner with room for pads; every run begins its sequences anew."""
    folder = open_folder(folder_of(name, root), "cpu", dtype)
    return load(folder, slots=ROWS, max_batch=ROWS, max_tokens=TOKENS, max_len=32)


@cache
def together(
    name: str, root: Path, dtype: str, piece: int | None, seed: int
) -> dict[Sample, Tensor]:
    """Logits at the end of each piece, in an order, slots and pads that the seed draws."""
    return feed(runner(name, root, dtype), SEQUENCES, piece, Random(seed))


def moved(one: dict[Sample, Tensor], two: dict[Sample, Tensor]) -> list[float]:
    """How far the logits lie apart wherever both runs have some."""
    both = one.keys() & two.keys()
    return [((one[at] - two[at]).abs().max() / one[at].abs().max()).item() for at in both]


def differing(one: dict[Sample, Tensor], two: dict[Sample, Tensor]) -> list[Sample]:
    """Where the bits are others."""
    return [at for at in sorted(one.keys() & two.keys()) if not torch.equal(one[at], two[at])]


@pytest.mark.parametrize("dtype", CUTS)
@pytest.mark.parametrize("name", DRIVEN)
def test_order_slots_pads_and_company_change_no_bit(root: Path, name: str, dtype: str) -> None:
    base, other = (together(name, root, dtype, PIECE, seed) for seed in (0, 1))
    assert base.keys() == other.keys()
    assert all(bool(logits.isfinite().all()) for logits in base.values())
    assert differing(base, other) == []
    for index in (0, 1):
        assert differing(base, alone(name, root, dtype, index)) == []


def alone(name: str, root: Path, dtype: str, index: int) -> dict[Sample, Tensor]:
    """What one sequence gets in a runner that it has to itself, under its own number."""
    only: Sequence[list[int]] = [SEQUENCES[index]]
    got = feed(runner(name, root, dtype), only, PIECE, Random(2))
    return {(index, position): logits for (_, position), logits in got.items()}


@pytest.mark.parametrize("dtype", CUTS)
@pytest.mark.parametrize("name", DRIVEN)
def test_cuts_move_logits_by_rounding_alone(root: Path, name: str, dtype: str) -> None:
    base = together(name, root, dtype, PIECE, 0)
    for piece in (1, None):
        apart = moved(base, together(name, root, dtype, piece, 0))
        assert len(apart) >= 9
        assert max(apart) <= CUTS[dtype]


@pytest.mark.parametrize("dtype", CUTS)
@pytest.mark.parametrize("name", ["qwen3_5_text", "bamba", "lfm2", "zaya"])
def test_a_slot_that_reaches_its_neighbour_is_seen(
    root: Path, name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutation that shows these tests look: a resumed row takes a little of another's state."""
    bound = runner(name, root, dtype)
    begin, states = bound.backend.begin, bound.backend.selection.states

    def leaking(batch: Batch) -> None:
        live = [slot for slot in batch.src if slot >= 0]
        for spec in states if len(live) > 1 else ():
            tensor = bound.backend.pool.tensors(spec.layer)[spec.name]
            tensor[live[0]] += (0.02 * tensor[live[1]]).to(tensor.dtype)
        begin(batch)

    base = together(name, root, dtype, PIECE, 0)
    monkeypatch.setattr(bound.backend, "begin", leaking)
    got = feed(bound, SEQUENCES, PIECE, Random(0))
    assert len(differing(base, got)) >= len(base) / 4
