"""The clock chooses among what is sound: nothing that is wrong, crashes or spills."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal_triton.tune.sweep import KEPT, MARGIN, DeviceLost, choose, shown
from hal_triton.tuning import Config

Run = Callable[[], object]


def config(size: int) -> Config:
    return Config({"BV": size})


@dataclass
class FakeTrials:
    """Every configuration takes the time that is written down, or is what is written down."""

    times: dict[int, float]
    faults: dict[int, str] = field(default_factory=dict)
    crashes: set[int] = field(default_factory=set)
    kills: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)
    dead: bool = False
    log: list[int] = field(default_factory=list)

    def run_shipped(self) -> None:
        if self.dead:
            raise RuntimeError("an illegal memory access was encountered")

    def fault(self, config: Config) -> str:
        size = config.blocks["BV"]
        if size in self.kills:
            self.dead = True
        if size in self.crashes | self.kills or self.dead:
            raise RuntimeError(f"out of resources: BV {size}")
        return self.faults.get(size, "")

    def runs(self, config: Config) -> Sequence[Run]:
        size = config.blocks["BV"]

        def run() -> object:
            self.log.append(size)
            if size in self.late:
                raise RuntimeError("later")
            return self.times[size]

        return [run]

    def read(self, runs: Sequence[Run]) -> float:
        (run,) = runs
        took = run()
        assert isinstance(took, float)
        return took


def pick(trials: FakeTrials, rounds: int = 3) -> int:
    found = choose("name", "where", config(8), [config(n) for n in trials.times], trials, rounds)
    assert found.tuned.best == shown(found.config)
    return found.config.blocks["BV"]


def test_the_fastest_is_chosen_by_the_clock() -> None:
    assert pick(FakeTrials({4: 9.0, 8: 10.0, 16: 5.0, 32: 7.0})) == 16


def test_what_is_shipped_stays_unless_another_is_faster_by_the_margin() -> None:
    assert pick(FakeTrials({8: 100.0, 16: 100.0 * (1 - MARGIN) + 0.1})) == 8
    assert pick(FakeTrials({8: 100.0, 16: 100.0 * (1 - MARGIN) - 0.1})) == 16


SIZES = st.sampled_from([2, 4, 16, 32, 64, 128, 256])


@given(
    times=st.dictionaries(SIZES, st.floats(1.0, 99.0), min_size=1),
    shipped=st.floats(1.0, 99.0),
    wrong=st.sets(SIZES),
    crashes=st.sets(SIZES),
    late=st.sets(SIZES),
)
def test_no_configuration_that_is_wrong_crashes_or_stops_is_chosen(
    times: dict[int, float], shipped: float, wrong: set[int], crashes: set[int], late: set[int]
) -> None:
    trials = FakeTrials({8: shipped, **times}, dict.fromkeys(wrong, "wrong"), crashes, late=late)
    chosen = pick(trials)
    bad = wrong | crashes | late
    assert chosen not in bad
    sound = [took for size, took in trials.times.items() if size not in bad]
    assert trials.times[chosen] <= min(sound) / (1 - MARGIN)


def test_a_crash_does_not_end_the_sweep_and_is_told_with_the_other_losses() -> None:
    trials = FakeTrials({4: 1.0, 8: 9.0, 16: 2.0, 32: 3.0}, {4: "spills in B1"}, {16})
    found = choose("n", "w", config(8), [config(n) for n in trials.times], trials, 2)
    assert found.config.blocks["BV"] == 32
    assert found.tuned.dropped == {
        shown(config(4)): "spills in B1",
        shown(config(16)): "RuntimeError: out of resources: BV 16",
    }


def test_a_crash_that_takes_the_device_with_it_names_who_did_it() -> None:
    trials = FakeTrials({4: 1.0, 8: 9.0, 16: 2.0}, kills={4})
    with pytest.raises(DeviceLost, match=r"shipped BV8,w4,s1 does not run after BV4,w4,s1: Run"):
        pick(trials)


def test_a_shipped_one_that_cannot_be_timed_ends_it_by_name() -> None:
    with pytest.raises(DeviceLost, match="the shipped BV8,w4,s1 cannot be timed: RuntimeError"):
        pick(FakeTrials({4: 1.0, 8: 9.0}, late={8}))


def test_what_was_dropped_is_never_timed() -> None:
    trials = FakeTrials({4: 1.0, 8: 9.0, 16: 2.0}, {4: "wrong"}, {16})
    pick(trials)
    assert set(trials.log) == {8}


def test_the_rest_is_timed_in_turn_and_only_the_best_go_on() -> None:
    sizes = [2, 4, 8, 16, 32, 64, 128, 256]
    trials = FakeTrials({size: float(size) for size in sizes})
    found = choose("n", "w", config(8), [config(n) for n in sizes], trials, 2)
    assert len(found.tuned.readings) == KEPT + 1
    first, rounds = trials.log[: len(sizes)], trials.log[len(sizes) :]
    assert sorted(first) == sizes
    assert rounds[: KEPT + 1] == [8, 2, 4, 16, 32, 64]
    assert rounds[KEPT + 1 :] == [2, 4, 16, 32, 64, 8]


def test_a_configuration_is_one_word() -> None:
    whole = Config({"BT": 32, "BG": 8}, warps=2, stages=3, evict="evict_first")
    assert shown(whole) == "BT32,BG8,w2,s3,evict_first"
    assert shown(Config({}, warps=1)) == "w1,s1"
