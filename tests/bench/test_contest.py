"""Who is wrong is told so and not timed; who is right is timed in turn with the others."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from hal.bench import contest
from hal.bench.contest import FAILED, RIGHT, SKIPPED, WRONG, Contest, Ours
from hal.bench.entrant import Attempt, NotComparable, Outcome, bound, moved_args
from hal.bench.judge import CUT, EQUAL, WHOLE, checked_lengths
from hal.bench.peers import Peer, Way
from hal.bench.present import Present
from hal.bench.shapes import HOST, Shape, first_layout, gdn
from hal.device import Device
from hal.testing.case import Case
from hal.testing.plan import Trial
from hal_cpu.plugin import MANIFEST
from hal_cpu.provider import TorchProvider
from hal_registry import Candidate, Presence

OPERATION = "delta_rule.prefill"
SMALL = Shape(OPERATION, "small", gdn(1, 16, gate="ready_scalar"), (5, 3), HOST)
LONG = replace(SMALL, name="long", lengths=(WHOLE + 1,))


class Clock:
    """A timer that runs nothing and says who was asked, and that everything takes 7 us."""

    name = "fake"

    def __init__(self, copies: int = 1) -> None:
        self.asked: list[tuple[str, int]] = []
        self.count = copies

    def copies(self, touched: int, step: bool) -> int:
        self.touched, self.step = touched, step
        return self.count

    def cold(self, calls: Sequence[Callable[[], object]]) -> float:
        self.asked.append(("cold", len(calls)))
        return 7.0

    def warm(self, calls: Sequence[Callable[[], object]]) -> float:
        self.asked.append(("warm", len(calls)))
        return 3.0


def ours(shape: Shape) -> Ours:
    candidate = Candidate(MANIFEST, "hybrid-hal-cpu", "0.0")
    offer = MANIFEST.offers[shape.operation]
    trial = Trial(shape.operation, shape.name, shape.settings(offer, "float32"), offer)
    return Ours(Present(candidate, Device("cpu"), Presence(1)), trial)


def peer(make: Callable[..., Attempt]) -> Peer:
    return Peer("other", "pytest", ("cpu",), (Way(OPERATION, make),))


def same(trial: Trial, case: Case, place: torch.device) -> Attempt:
    """What another library would do if it were right."""
    provider = TorchProvider("cpu", {"layouts": trial.layouts})
    return bound(provider, trial, case, moved_args(case, place))


def spoiled(spoil: Callable[[Outcome, Case], Outcome]) -> Callable[..., Attempt]:
    def make(trial: Trial, case: Case, place: torch.device) -> Attempt:
        right = same(trial, case, place)
        return Attempt(right.run, lambda raw: spoil(right.read(raw), case))

    return make


def run(shape: Shape, *peers: Peer, clock: Any = None, rounds: int = 3) -> list[contest.Line]:
    return Contest(Device("cpu"), clock or Clock(), rounds, shape, [ours(shape)], peers).lines()


def test_the_provider_comes_first_and_everybody_has_all_rounds() -> None:
    mine, other = run(SMALL, peer(same))
    assert (mine.entrant, mine.version, mine.verdict) == ("cpu.torch", "0.0", RIGHT)
    assert (other.entrant, other.verdict) == ("other", RIGHT)
    for line in (mine, other):
        assert (line.cold, line.warm, line.rows) == ([7.0] * 3, [3.0] * 3, SMALL.lengths)


def add(outcome: Outcome, where: str) -> Outcome:
    pools = {name: pool.clone() for name, pool in (outcome.pools or {}).items()}
    if where == "result":
        return Outcome(outcome.result + 1e-3, outcome.pools)
    return Outcome(outcome.result, {n: pool + 1e-3 for n, pool in pools.items()})


@pytest.mark.parametrize("where", ["result", "state"])
def test_a_wrong_peer_is_told_and_not_timed(where: str) -> None:
    clock = Clock()
    mine, other = run(SMALL, peer(spoiled(lambda got, case: add(got, where))), clock=clock)
    assert (mine.verdict, other.verdict) == (RIGHT, WRONG)
    assert "allowed" in other.why
    assert other.cold == other.warm == []
    assert len(clock.asked) == 2 * 3


def test_a_nan_is_wrong() -> None:
    def spoil(got: Outcome, case: Case) -> Outcome:
        got.result[0, 0, 0] = float("nan")
        return got

    _, other = run(SMALL, peer(spoiled(spoil)))
    assert other.verdict == WRONG


def test_a_state_in_a_slot_that_nobody_asked_for_is_wrong() -> None:
    def spoil(got: Outcome, case: Case) -> Outcome:
        assert got.pools is not None
        free = next(s for s in range(1, case.rows.slots) if s not in case.rows.dst)
        got.pools["state"][free] = 0.0
        return got

    _, other = run(SMALL, peer(spoiled(spoil)))
    assert other.verdict == WRONG


def test_a_peer_without_states_is_timed_and_its_state_is_not_claimed() -> None:
    _, other = run(SMALL, peer(spoiled(lambda got, case: Outcome(got.result, None))))
    assert other.verdict == RIGHT
    assert other.check is not None
    assert other.check.state is None


def test_what_a_peer_raises_is_a_line_and_the_others_go_on() -> None:
    def breaks(trial: Trial, case: Case, place: torch.device) -> Attempt:
        raise RuntimeError("no kernel image")

    def unable(trial: Trial, case: Case, place: torch.device) -> Attempt:
        raise NotComparable("takes rows of one length alone")

    mine, broken, skipped, last = run(SMALL, peer(breaks), peer(unable), peer(same))
    assert (mine.verdict, last.verdict) == (RIGHT, RIGHT)
    assert (broken.verdict, broken.why) == (FAILED, "RuntimeError: no kernel image")
    assert (skipped.verdict, skipped.why) == (SKIPPED, "takes rows of one length alone")
    assert last.cold


def test_who_tunes_itself_at_its_first_call_sees_what_is_timed() -> None:
    seen: list[tuple[int, ...]] = []

    def tuned(trial: Trial, case: Case, place: torch.device) -> Attempt:
        right, now = same(trial, case, place), case.rows.lengths
        return Attempt(lambda: (seen.append(now), right.run())[1], right.read)

    _, other = run(LONG, peer(tuned))
    assert other.verdict == RIGHT
    assert seen == [LONG.lengths, (CUT[0],), LONG.lengths]


def test_a_peer_of_equal_rows_is_checked_on_equal_rows() -> None:
    def equal(trial: Trial, case: Case, place: torch.device) -> Attempt:
        if len(set(case.rows.lengths)) > 1:
            raise NotComparable("takes rows of one length alone")
        return same(trial, case, place)

    shape = replace(LONG, lengths=(600, 600))
    other = Peer("other", "pytest", ("cpu",), (Way(OPERATION, equal, equal=True),))
    _, line = run(shape, other)
    assert (line.verdict, line.rows) == (RIGHT, EQUAL)
    ragged = replace(LONG, lengths=(600, 601))
    assert run(ragged, other)[1].verdict == SKIPPED


@pytest.mark.parametrize(("kind", "verdict"), [("", WRONG), ("tf32", RIGHT)])
def test_an_attempt_that_rounds_more_is_held_to_the_limits_it_names(
    kind: str, verdict: str
) -> None:
    spoil = spoiled(lambda got, _: Outcome(got.result + 3e-4, got.pools))
    other = peer(lambda *given: replace(spoil(*given), kind=kind))
    assert run(SMALL, other)[1].verdict == verdict


def test_a_long_shape_is_checked_on_short_rows_and_then_like_the_first_at_full_size() -> None:
    mine, other = run(LONG, peer(same))
    assert mine.rows == other.rows == (CUT[0],)
    assert other.verdict == RIGHT

    def only_when_long(got: Outcome, case: Case) -> Outcome:
        return add(got, "result") if case.rows.lengths == LONG.lengths else got

    _, other = run(LONG, peer(spoiled(only_when_long)))
    assert other.verdict == WRONG
    assert "at the timed size it differs from cpu.torch" in other.why
    assert other.cold == []


@pytest.mark.parametrize(
    ("lengths", "checked"),
    [
        ((1,) * 512, (1,) * 512),
        ((512, 3), (512, 3)),
        ((32768,), (200,)),
        ((2048,) * 16, (200, 65, 1)),
        ((4096, 1, 7, 30), (200, 30, 1)),
    ],
)
def test_the_oracle_runs_whole_shapes_where_it_can(
    lengths: tuple[int, ...], checked: tuple[int, ...]
) -> None:
    assert checked_lengths(lengths) == checked


def test_a_timer_that_wants_copies_gets_calls_on_memory_of_their_own() -> None:
    clock = Clock(copies=3)
    run(replace(SMALL, operation="delta_rule.decode", lengths=(1, 1)), clock=clock)
    assert ("cold", 3) in clock.asked
    assert clock.step
    assert clock.touched == 2 * 2 * 16 * 16 * 4
    trial = ours(SMALL).trial
    case = trial.case(SMALL.batch(SMALL.lengths), pads=0)
    one, two = (moved_args(case, torch.device("cpu")) for _ in range(2))
    assert all(one[n].data_ptr() != two[n].data_ptr() for n in ("q", "state"))


def test_everybody_begins_once_before_anybody_begins_twice() -> None:
    order: list[str] = []

    def named(name: str) -> Peer:
        def make(trial: Trial, case: Case, place: torch.device) -> Attempt:
            right = same(trial, case, place)
            return Attempt(lambda: (order.append(name), right.run())[1], right.read)

        return replace(peer(make), name=name)

    class Runs(Clock):
        def cold(self, calls: Sequence[Callable[[], object]]) -> float:
            calls[0]()
            return 1.0

    shape = replace(SMALL, lengths=(2,))
    peers = (named("a"), named("b"))
    Contest(Device("cpu"), Runs(), 3, shape, [ours(shape)], peers).lines()
    assert order[-6:] == ["a", "b", "a", "b", "b", "a"]


def test_a_peer_that_cannot_be_timed_is_a_line_without_times_and_the_others_go_on() -> None:
    class Refuses(Clock):
        def warm(self, calls: Sequence[Callable[[], object]]) -> float:
            calls[0]()
            return super().warm(calls)

    def once(trial: Trial, case: Case, place: torch.device) -> Attempt:
        right, ran = same(trial, case, place), [0]

        def run() -> object:
            ran[0] += 1
            if ran[0] > 1:
                raise RuntimeError("operation not permitted when stream is capturing")
            return right.run()

        return Attempt(run, right.read)

    mine, other, last = run(SMALL, peer(once), peer(same), clock=Refuses())
    assert (mine.verdict, last.verdict) == (RIGHT, RIGHT)
    assert len(mine.cold) == len(last.warm) == 3
    assert (other.verdict, other.cold, other.warm) == (FAILED, [], [])
    assert "capturing" in other.why


def test_providers_of_other_layouts_are_checked_by_themselves() -> None:
    first = ours(SMALL)
    offer = replace(MANIFEST.offers[OPERATION], layouts=("KV",))
    manifest = replace(MANIFEST, name="cpu.other", offers={OPERATION: offer}, proofs=())
    trial = Trial(OPERATION, "small", SMALL.settings(offer, "float32"), offer)
    second = Ours(Present(Candidate(manifest, "", "1"), Device("cpu"), Presence(1)), trial)
    lines = Contest(Device("cpu"), Clock(), 1, SMALL, [first, second], [peer(same)]).lines()
    assert [line.entrant for line in lines] == ["cpu.torch", "cpu.other", "other"]
    assert all(line.verdict == RIGHT and line.cold for line in lines)


@pytest.mark.parametrize("layouts", [("WC", "KV"), ("CW", "VK")])
def test_verify_is_timed_with_its_commit_in_any_layout(layouts: tuple[str, str]) -> None:
    for operation, layout in (("conv.verify", layouts[0]), ("delta_rule.verify", layouts[1])):
        offer = replace(MANIFEST.offers[operation], layouts=(layout,))
        assert first_layout(offer, "conv" if operation[0] == "c" else "recurrent") == layout
        shape = _drafts(operation)
        manifest = replace(MANIFEST, offers={**MANIFEST.offers, operation: offer})
        trial = Trial(operation, "t", shape.settings(offer, "float32"), offer)
        present = Present(Candidate(manifest, "", ""), Device("cpu"), Presence(1))
        (line,) = Contest(Device("cpu"), Clock(), 1, shape, [Ours(present, trial)], ()).lines()
        assert (line.verdict, line.cold) == (RIGHT, [7.0])


def _drafts(operation: str) -> Shape:
    dims = (
        {"channels": 8, "width": 4, "bias": False, "activation": "silu"}
        if operation == "conv.verify"
        else gdn(1, 16)
    )
    return Shape(operation, "t", {**dims, "verify": "chain", "verify_width": 3}, (3, 3), HOST)
