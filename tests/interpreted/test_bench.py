"""The Triton kernels as entrants: every operation of a card's shapes is right."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from hal.bench.contest import RIGHT, Contest, Ours
from hal.bench.present import Present
from hal.bench.shapes import CARD, OPERATIONS, SHAPES, Shape, default_dtype
from hal.device import Device
from hal.testing.plan import Trial
from hal_cuda.plugin import MANIFEST
from hal_registry import Candidate, Presence
from support.triton_ops import provider

LITTLE = {"H": 1, "G": 1, "ratio": 2, "P": 16, "K": 16, "V": 24, "N": 16, "channels": 24}
FIXED = {"delta_rule.prefill_fused": {"K": 128, "V": 128}, "delta_rule.decode_fused": {"V": 24}}


class Clock:
    """Runs nothing; says how many copies it was given."""

    name = "fake"

    def copies(self, touched: int, step: bool) -> int:
        return 2 if step else 1

    def cold(self, calls: Sequence[Callable[[], object]]) -> float:
        return float(len(calls))

    warm = cold


def little(shape: Shape) -> Shape:
    """The shape with dims that an interpreter can run."""
    sizes = {**LITTLE, **FIXED.get(shape.operation, {})}
    dims = {name: sizes.get(name, value) for name, value in shape.dims.items()}
    dims |= {"ratio": shape.dims["ratio"]} if shape.dims.get("gate") == "channel" else {}
    width = dims.get("verify_width", 70)
    return replace(shape, dims=dims, lengths=tuple(min(n, width) for n in (*shape.lengths, 1)[:2]))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_kernels_are_right_entrants(operation: str) -> None:
    shape = little(next(s for s in SHAPES if s.operation == operation and s.on == CARD))
    offer = MANIFEST.offers[operation]
    trial = Trial(operation, shape.name, shape.settings(offer, default_dtype(shape)), offer)
    present = Present(Candidate(MANIFEST, "", "0"), Device("cpu"), Presence(1))
    present.built[tuple(sorted(trial.layouts.items()))] = provider(**trial.layouts)  # type: ignore[assignment]
    (line,) = Contest(Device("cpu"), Clock(), 1, shape, [Ours(present, trial)], ()).lines()
    assert (line.verdict, line.why) == (RIGHT, "")
    step = trial.decode or operation.endswith("verify")
    assert line.cold == line.warm == [2.0 if step else 1.0]
