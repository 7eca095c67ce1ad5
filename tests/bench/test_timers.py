"""Clocks count what they say: cold behind a flush, warm behind a call that is not counted."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from hal.bench import card_timing
from hal.bench.refusal import NotMeasured
from hal.bench.timers import FLUSH, MOST_COPIES, CardTimer, HostTimer, timer_of
from hal.device import Device


class Ticks:
    """A clock that moves on only when something runs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def __call__(self) -> float:
        return self.now

    def call(self, name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.log.append(name)
            self.now += seconds

        return run


class Scratch:
    """Stands for the memory that empties the caches, which takes time that nobody may count."""

    def __init__(self, ticks: Ticks) -> None:
        self.run = ticks.call("flush", 100.0)

    def fill_(self, value: float) -> None:
        self.run()


def host() -> tuple[HostTimer, Ticks]:
    ticks = Ticks()
    scratch: Any = Scratch(ticks)
    return HostTimer("ticks", ticks, scratch), ticks


def test_a_cold_reading_is_of_one_call_behind_a_flush() -> None:
    timer, ticks = host()
    assert timer.cold([ticks.call("run", 3e-6)]) == pytest.approx(3)
    assert ticks.log == ["flush", "run"]


def test_a_warm_reading_is_of_the_second_of_two_calls() -> None:
    timer, ticks = host()
    assert timer.warm([ticks.call("run", 3e-6)]) == pytest.approx(3)
    assert ticks.log == ["run", "run"]


@pytest.mark.parametrize(("threads", "name"), [(1, "thread time"), (2, "wall time")])
def test_several_threads_are_read_by_the_time_that_passes(
    threads: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert HostTimer.make().name == name


def test_a_host_flushes_more_than_its_caches_hold() -> None:
    timer = HostTimer.make()
    assert timer.scratch.numel() * timer.scratch.element_size() == FLUSH
    assert timer.copies(1, step=True) == 1


def test_steps_of_a_card_get_copies_that_overflow_its_cache_together() -> None:
    timer = CardTimer()
    for touched in (1, 1 << 20, 3 << 20, FLUSH, 4 * FLUSH):
        count = timer.copies(touched, step=True)
        assert 2 <= count <= MOST_COPIES
        assert (count + 1) * touched > FLUSH or count == MOST_COPIES
    assert timer.copies(1, step=False) == 1


class FakeCard:
    """Events, graphs and a queue: recorded calls take time when their graph is replayed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.recording: list[float] | None = None
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: _Event(self))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: _Graph(self))
        monkeypatch.setattr(torch.cuda, "graph", self.capture)

    def capture(self, graph: Any) -> Any:
        self.recording = graph.held
        return nullcontext()

    def call(self, ms: float) -> Callable[[], None]:
        def run() -> None:
            if self.recording is None:
                self.now += ms
            else:
                self.recording.append(ms)

        return run


class _Event:
    def __init__(self, card: FakeCard) -> None:
        self.card, self.at = card, 0.0

    def record(self) -> None:
        self.at = self.card.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: "_Event") -> float:
        return other.at - self.at


class _Graph:
    def __init__(self, card: FakeCard) -> None:
        self.card = card
        self.held: list[float] = []

    def replay(self) -> None:
        self.card.recording = None
        self.card.now += sum(self.held)


def test_a_graph_holds_every_copy_and_gives_the_time_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = FakeCard(monkeypatch)
    assert card_timing.graph_us([card.call(0.002), card.call(0.004)]) == pytest.approx(3)


def test_cold_steps_take_all_copies_and_warm_ones_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(card_timing, "graph_us", lambda calls: taken.append(len(calls)) or 1.0)
    monkeypatch.setattr(card_timing, "eager_us", lambda call: 2.0)
    monkeypatch.setattr(card_timing, "queued_us", lambda call: 3.0)
    timer = CardTimer()
    calls = [lambda: None] * 4
    assert (timer.cold(calls), timer.warm(calls)) == (1.0, 1.0)
    assert taken == [4, 1]
    assert (timer.cold(calls[:1]), timer.warm(calls[:1])) == (2.0, 3.0)


def test_queued_calls_share_the_time_between_two_events(monkeypatch: pytest.MonkeyPatch) -> None:
    card = FakeCard(monkeypatch)
    assert card_timing.queued_us(card.call(0.005)) == pytest.approx(5)


def test_a_device_without_a_clock_is_refused_with_the_fix() -> None:
    with pytest.raises(NotMeasured, match="nothing can be timed on npu") as caught:
        timer_of(Device("npu"))
    (reason,) = caught.value.reasons
    assert (reason.code, reason.fix) == ("mode-unsupported", "use --device cpu, cuda or rocm")
    assert str(caught.value).splitlines()[-1] == "  Fix: use --device cpu, cuda or rocm."
