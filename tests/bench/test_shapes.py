"""Named shapes are unique, and every one is a trial that some provider declares."""

from dataclasses import replace

import pytest

from hal.bench.shapes import CARD, HOST, OPERATIONS, SHAPES, Shape, chosen, default_dtype
from hal.testing.plan import BUILDERS, Trial
from hal_cpu.plugin import MANIFEST as CPU
from hal_cuda.hopper.plugin import MANIFEST as HOPPER
from hal_cuda.plugin import MANIFEST as CUDA
from hal_registry import Candidate, Manifest, judge


def fits(shape: Shape, manifest: Manifest, arch: str) -> bool:
    offer = manifest.offers.get(shape.operation)
    if offer is None:
        return False
    trial = Trial(shape.operation, "", shape.settings(offer, default_dtype(shape)), offer)
    need = replace(trial.need, arch=arch)
    return judge(Candidate(manifest, "", ""), [need]).fits(shape.operation)


def test_a_name_is_taken_once_an_operation() -> None:
    assert len({(shape.operation, shape.name) for shape in SHAPES}) == len(SHAPES)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.operation}-{s.name}")
def test_every_shape_is_served_where_it_is_measured(shape: Shape) -> None:
    on_cards = fits(shape, CUDA, "sm_90") or fits(shape, HOPPER, "sm_90")
    assert fits(shape, CPU, "") if shape.on == HOST else on_cards


def test_every_operation_with_tokens_has_a_shape() -> None:
    assert set(OPERATIONS) == set(BUILDERS)


def test_shapes_are_chosen_by_device_operation_and_name() -> None:
    assert {shape.on for shape in chosen(HOST)} == {HOST}
    assert {shape.on for shape in chosen(CARD)} == {CARD}
    (one,) = chosen(HOST, ["conv.prefill"], ["mix-C8192"])
    assert (one.on, one.operation) == (CARD, "conv.prefill")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((["conv.prefil"], []), "--op conv.prefil: expected one of conv.decode, "),
        ((["conv.decode"], ["mix-C8192"]), "--shape mix-C8192: expected one of B1-C2048, "),
    ],
)
def test_unknown_names_are_told_with_those_that_are_known(
    arguments: tuple[list[str], list[str]], text: str
) -> None:
    with pytest.raises(ValueError, match="expected one of") as caught:
        chosen(HOST, *arguments)
    assert str(caught.value).startswith(text)
