"""The tuner over the kernels themselves, on little shapes: what is wrong or crashes is dropped."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from hal.bench.shapes import CARD, Shape, gdn
from hal.bench.timers import Timer
from hal.device import Device
from hal_cuda.plugin import OFFERS
from hal_cuda.tables import table
from hal_triton.kernels.math import silu
from hal_triton.provider import TritonProvider
from hal_triton.table_file import parse
from hal_triton.tune import tuner as tuners
from hal_triton.tune.classes import CLASSES, Class
from hal_triton.tune.sweep import shown
from hal_triton.tune.tuner import TritonTuner
from hal_triton.tuning import UNBOUNDED, Config, Tuning
from support import tiny_tuner

NAME = "delta_rule.decode"
DIMS = gdn(1, 16)
SMALL = (
    Class(NAME, 4, Shape(NAME, "B1", DIMS, (1,), CARD)),
    Class(
        NAME,
        UNBOUNDED,
        Shape(NAME, "B3", DIMS, (1,) * 3, CARD),
        guards=(Shape(NAME, "guard", {**DIMS, "V": 24}, (1, 1), CARD),),
    ),
)
SIZES = tuple(Config({"BV": size}, warps=1) for size in (8, 16, 32))


class Clock:
    """Runs what it is given and says the time that is written down for the tile in it."""

    name = "fake"

    def __init__(self, times: Mapping[int, float], running: list[int]) -> None:
        self.times, self.running = times, running

    def copies(self, touched: int, step: bool) -> int:
        return 2

    def cold(self, calls: Sequence[Callable[[], object]]) -> float:
        assert len(calls) == 2
        for call in calls:
            call()
        return self.times[self.running[-1]]

    def warm(self, calls: Sequence[Callable[[], object]]) -> float:
        raise AssertionError("only cold readings choose")


class Provider(TritonProvider):
    """The kernels with a fault that depends on the tile: a wrong result, or an error."""

    def __init__(
        self, options: Mapping[str, Any], wrong: int, crashes: int, running: list[int]
    ) -> None:
        super().__init__("cpu", options)
        tuning: Tuning = options["tuning"]
        right, tile = self.delta_rule.decode, tuning.overrides[NAME].blocks["BV"]

        def decode(*args: Any, **named: Any) -> torch.Tensor:
            running.append(tile)
            if tile == crashes:
                raise RuntimeError("out of resources")
            result = right(*args, **named)
            return result + 0.5 if tile == wrong else result

        self.delta_rule.decode = decode  # type: ignore[method-assign, assignment]


def made(
    times: Mapping[int, float], *, wrong: int = 0, crashes: int = 0, classes: Any = SMALL
) -> TritonTuner:
    running: list[int] = []

    def build(device: str, options: Mapping[str, object]) -> TritonProvider:
        return Provider(options, wrong, crashes, running)

    def clock(device: Device) -> Timer:
        return Clock(times, running)

    shipped = {**table("sm_90"), NAME: ((UNBOUNDED, SIZES[0]),)}
    return TritonTuner(
        "cuda.triton", "nowhere:TUNER", OFFERS, lambda device: "sm_90",
        lambda arch: Tuning(shipped, silu, silu), build, classes, {NAME: SIZES}, clock,
    )  # fmt: skip


def sweep(tuner: TritonTuner, said: list[str] | None = None) -> Any:
    return tuner.sweep(Device("cpu"), [], 2, 1, (said if said is not None else []).append)


def test_the_fastest_tile_becomes_the_table_which_loads_back() -> None:
    said: list[str] = []
    found = sweep(made({8: 9.0, 16: 4.0, 32: 6.0}), said)
    assert [each.best for each in found.classes] == [shown(SIZES[1])] * 2
    assert said == [each.where for each in found.classes]
    document = json.loads(json.dumps(found.document, allow_nan=False))
    assert document["made"]["provider"] == "cuda.triton"
    read = parse("file", document, "sm_90", table("sm_90"))
    assert read == {NAME: ((4, SIZES[1]), (UNBOUNDED, SIZES[1]))}
    assert len(found.document["made"]["classes"]) == 2


def test_a_tile_that_is_wrong_or_crashes_is_dropped_however_fast() -> None:
    found = sweep(made({8: 9.0, 16: 1.0, 32: 2.0}, wrong=16, crashes=32))
    assert found.document["table"] == {}
    for each in found.classes:
        assert each.best == each.shipped == shown(SIZES[0])
        assert "another result in B" in each.dropped[shown(SIZES[1])]
        assert each.dropped[shown(SIZES[2])] == "RuntimeError: out of resources"


def test_a_guard_that_does_not_fit_drops_what_fits_the_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tuner = made({8: 9.0, 16: 4.0, 32: 6.0})

    def build(device: str, options: Mapping[str, object]) -> TritonProvider:
        provider = tuner.build(device, options)
        assert isinstance(provider, TritonProvider)
        inner, tuned = provider.delta_rule.decode, options["tuning"]
        assert isinstance(tuned, Tuning)

        def decode(**args: Any) -> torch.Tensor:
            if args["v"].shape[2] == 24 and tuned.overrides[NAME].blocks["BV"] == 16:
                raise RuntimeError("shared memory")
            return inner(**args)

        provider.delta_rule.decode = decode  # type: ignore[method-assign, assignment]
        return provider

    found = sweep(replace(tuner, build=build))
    few, many = found.classes
    assert few.best == shown(SIZES[1])
    assert many.best == shown(SIZES[2])
    assert many.dropped == {shown(SIZES[1]): "RuntimeError: shared memory"}


def test_what_spills_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        def __init__(self, spills: int) -> None:
            self.n_spills = spills
            self.metadata = type("Metadata", (), {"name": "delta_decode"})

    assert tuners._spills(Kernel(0)) == ""
    assert tuners._spills(Kernel(3)) == "delta_decode 3 registers"
    assert tuners._spills(None) == ""
    seen = iter([3, *[0] * 99])
    monkeypatch.setattr(tuners, "_spills", lambda kernel: "k" if next(seen) else "")
    found = sweep(made({8: 9.0, 16: 1.0, 32: 2.0}))
    assert found.classes[0].dropped == {shown(SIZES[1]): "spills in B1: k"}
    assert found.classes[0].best == shown(SIZES[2])


def test_a_shipped_tile_that_does_not_run_is_told_and_the_next_name_goes_on() -> None:
    found = sweep(made({8: 9.0, 16: 1.0, 32: 2.0}, crashes=8))
    assert found.ended == ""
    assert all(each.readings == {} for each in found.classes)
    assert found.classes[0].dropped == {shown(SIZES[0]): "RuntimeError: out of resources"}


def test_only_names_of_operations_that_are_offered_can_be_swept() -> None:
    tuner = made({})
    assert tuner.names == [NAME]
    assert replace(tuner, offers={}).names == []


ENTRIES = [each for each in CLASSES if each.limit == UNBOUNDED]
TINY = {"H": 1, "G": 1, "P": 16, "channels": 24}


def tiny(shape: Shape) -> Shape:
    """A shape of the same entry with a program or two: dims stay on their side of 128."""
    dims = {name: TINY.get(name, value) for name, value in shape.dims.items()}
    dims |= {name: 16 if dims[name] <= 128 else 144 for name in ("K", "V", "N") if name in dims}
    dims |= {"ratio": min(2, dims["ratio"])} if "ratio" in dims else {}
    width = dims.get("verify_width", 5)
    return replace(shape, dims=dims, lengths=(min(width, shape.lengths[0]), 1))


@pytest.mark.parametrize("each", ENTRIES, ids=str)
def test_a_class_tunes_the_entry_that_its_operation_reads(each: Class) -> None:
    """An entry that is not there is missed by the launcher, so the class is of that entry."""
    shape = tiny(each.shape)
    full = Tuning(table("sm_90"), silu, silu)
    without = {name: held for name, held in full.table.items() if name != each.name}

    def build(device: str, options: Mapping[str, object]) -> TritonProvider:
        return TritonProvider("cpu", options)

    tuner = TritonTuner("x", "", OFFERS, lambda device: "sm_90", lambda arch: full, build)
    one = replace(each, shape=shape, guards=())
    trials = tuners.TritonTrials(
        tuner, one, replace(full, table=without), "cpu", torch.device("cpu"),
        Clock({}, []), full.table[each.name][-1][1],
    )  # fmt: skip
    trials.run_shipped()
    trials.each = replace(one, name="another entry")
    with pytest.raises(KeyError, match=each.name):
        trials.run_shipped()


def test_workers_compile_all_candidates_and_their_guards_in_processes_of_their_own() -> None:
    shapes = sum(len(each.guards) + 1 for each in tiny_tuner.TUNER.classes)
    path = "support.tiny_tuner:TUNER"
    assert tuners.warm(path, "cpu", [], 2) == shapes * len(tiny_tuner.TILES)
    assert tuners.warm(path, "cpu", ["no such name"], 1) == 0
    assert tuners.warm("support.tiny_tuner:MISSING", "cpu", [], 1) == 0


def test_shares_are_all_jobs_once() -> None:
    path = "support.tiny_tuner:TUNER"
    whole = tuners.warm_share(path, "cpu", [], (0, 1))
    parts = [tuners.warm_share(path, "cpu", [], (part, 3)) for part in range(3)]
    assert sum(parts) == whole
