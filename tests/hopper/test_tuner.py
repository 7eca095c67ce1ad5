"""Classes of the Hopper tuner time the entry that they are of, and candidates are what is run."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from hal.bench.shapes import Shape
from hal.device import Device
from hal_cuda.hopper import tuner as hopper
from hal_cuda.hopper.prefill import CHANNEL_TABLE, TABLE
from hal_cuda.hopper.provider import HopperDeltaRule
from hal_cuda.hopper.variant import COMMON
from hal_cuda.provider import tuning
from hal_cuda.tables import table
from hal_triton.tune.classes import Class
from hal_triton.tune.tuner import TritonTrials, TritonTuner
from hal_triton.tuning import Config
from hopper.emulator import Emulator, emulated

TUNER = hopper.TUNER
assert isinstance(TUNER, TritonTuner)
EACH = [(each, config) for each in hopper.CLASSES for config in TUNER.candidates[each.name]]
PREPARING = 512
"""Tokens of a row that is long enough for chunks that are prepared."""


@dataclass
class Clock:
    """Reads nothing."""

    name = "fake"

    def copies(self, touched: int, step: bool) -> int:
        return 1

    def cold(self, calls: object) -> float:
        return 0.0

    def warm(self, calls: object) -> float:
        return 0.0


def build(device: str, options: Mapping[str, Any]) -> Any:
    """The provider's delta rule where no card is."""
    return SimpleNamespace(delta_rule=HopperDeltaRule(options["tuning"]))


def little(shape: Shape) -> Shape:
    """The shape with one row of one key head."""
    return replace(shape, dims={**shape.dims, "H": 1}, lengths=(PREPARING,))


def trials(each: Class, *, without: bool = False) -> TritonTrials:
    """A little class on the host, on request over a table that lacks its entry."""
    one = replace(each, shape=little(each.shape), guards=tuple(map(little, each.guards)))
    tuner = replace(TUNER, build=build)
    found = TritonTrials.of(tuner, one, tuning("sm_90"), Device("cpu"), Clock())
    if without:
        rest = {name: held for name, held in found.base.table.items() if name != each.name}
        found.base = replace(found.base, table=rest)
    return found


@pytest.mark.parametrize("each", hopper.CLASSES, ids=str)
def test_a_class_times_the_entry_that_it_is_of(each: Class) -> None:
    """An entry that is not there is missed by the plan, so the class reads that entry."""
    with emulated() as device:
        found = trials(each, without=True)
        found.run_shipped()
        assert device.variants
        found.each = replace(found.each, name="another entry")
        with pytest.raises(KeyError, match=each.name):
            found.run_shipped()


@pytest.mark.parametrize("each", hopper.CLASSES, ids=str)
def test_every_guard_reads_the_same_entry(each: Class) -> None:
    for guard in each.guards:
        with emulated() as device:
            found = trials(replace(each, shape=guard, guards=()), without=True)
            found.run_shipped()
            assert device.variants
            found.each = replace(found.each, name="another entry")
            with pytest.raises(KeyError, match=each.name):
                found.run_shipped()


@contextmanager
def after(each: Class, config: Config) -> Iterator[Emulator]:
    """The device after a candidate was found right, with what that launched alone."""
    with emulated() as device:
        found = trials(each)
        found.run_shipped()
        device.forms.clear()
        assert found.fault(config) == ""
        yield device


@pytest.mark.parametrize(("each", "config"), EACH, ids=str)
def test_a_candidate_is_what_is_run(each: Class, config: Config) -> None:
    with after(each, config) as device:
        assert {made.consumers for made in device.variants} == {config.blocks["CONSUMERS"]}
        wanted = each.name == CHANNEL_TABLE or bool(config.blocks.get("PREPARED"))
        assert {made.prepared for made in device.variants} == {wanted}


@pytest.mark.parametrize(("each", "config"), EACH, ids=str)
def test_what_a_sweep_may_choose_is_compiled_before_a_capture(each: Class, config: Config) -> None:
    """Of guards too, which are the other gates that layers of models have."""
    with after(each, config) as device:
        assert device.forms
        assert set(device.forms) <= {form for variant in COMMON for form in variant.forms()}


@pytest.mark.parametrize("name", [TABLE, CHANNEL_TABLE])
def test_candidates_hold_what_is_shipped_and_differ(name: str) -> None:
    tried = TUNER.candidates[name]
    assert all(config in tried for _, config in table("sm_90")[name])
    assert all(one != two for at, one in enumerate(tried) for two in tried[:at])


@pytest.mark.parametrize("name", [TABLE, CHANNEL_TABLE])
def test_classes_end_where_the_shipped_entries_end(name: str) -> None:
    limits = [each.limit for each in hopper.CLASSES if each.name == name]
    assert limits == [limit for limit, _ in table("sm_90")[name]]
