"""Everything that can happen to a slot, in any order: each request still equals its solo run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import hal
from hal.errors import StepOrderError
from hal.runtime.batch import Batch, Mode
from hal.runtime.graphs import CAPTURABLE
from support.backends import poison, selected_with
from support.bound import FAMILIES, Bound
from support.captured import Rig, on_device

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

WIDTH, LONGEST, ROWS = 4, 24, 4
NAMES = ("gated_delta_net", "mamba2", "short_conv")


@cache
def bound_of(name: str) -> Bound:
    """A bound layer of a family, on a backend of six slots that tracks and verifies chains."""
    with selected_with(speculative=hal.Speculative(WIDTH), prefix_cache=True, graphs=True):
        return FAMILIES[name]()


@cache
def rigs_of(name: str) -> dict[Mode, Rig]:
    """Captured steps of that layer."""
    bound = bound_of(name)
    decode, verify = Rig(bound, Mode.DECODE, (2, 6)), Rig(bound, Mode.VERIFY, (1, 4), WIDTH)
    return {Mode.DECODE: decode, Mode.VERIFY: verify}


@dataclass(eq=False)
class Live:
    """A request: the inputs of all its tokens, its slot, and what it gave behind `begin`."""

    given: list[Tensor]
    slot: int
    begin: int = 0
    source: int | None = None
    done: int = field(default=0)
    outputs: list[Tensor] = field(default_factory=list)

    @property
    def src(self) -> int:
        if self.source is not None:
            return self.source
        return self.slot if self.done else -1

    @property
    def left(self) -> int:
        return LONGEST - self.done

    def take(self, count: int) -> list[Tensor]:
        return [tensor[self.done : self.done + count] for tensor in self.given]

    def moved(self, output: Tensor) -> None:
        self.done += output.shape[0]
        self.outputs.append(output.clone())
        if output.shape[0]:
            self.source = None


@dataclass
class Cached:
    """The state after the first `length` of these inputs."""

    given: list[Tensor]
    length: int


def close(got: Tensor, want: Tensor) -> bool:
    """Equal within float32 rounding of two different orders of sums; NaN never is."""
    error = float((got.double() - want.double()).norm())
    return error <= 3e-5 * float(want.double().norm()) + 1e-9


def packed(parts: list[list[Tensor]]) -> list[Tensor]:
    return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]


class Machine(RuleBasedStateMachine):
    """Requests and cached states on one backend; free slots hold NaN."""

    name: ClassVar[str]
    done: ClassVar[Counter[str]] = Counter()

    @initialize(seed=st.integers(0, 1 << 20))
    def begin(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.bound = bound_of(self.name)
        self.backend, self.pool = self.bound.backend, self.bound.backend.pool
        self.pool.reset()
        poison(self.backend)
        self.live: list[Live] = []
        self.cached: dict[int, Cached] = {}

    def _count(self, what: str) -> None:
        type(self).done[what] += 1

    def _spoil(self, slot: int) -> None:
        for spec in self.pool.states:
            self.pool.tensors(spec.layer)[spec.name][slot] = float("nan")

    def _free(self, slot: int) -> None:
        self.pool.free([slot])
        self._spoil(slot)

    def _some(self, data: st.DataObject, rows: list[Live]) -> list[Live]:
        return data.draw(st.permutations(rows))[: data.draw(st.integers(1, min(ROWS, len(rows))))]

    @precondition(lambda self: self.pool.free_slots)
    @rule()
    def alloc(self) -> None:
        self._count("alloc")
        self.live.append(Live(self.bound.inputs(LONGEST), self.pool.alloc()[0]))

    @precondition(lambda self: self.cached and self.pool.free_slots)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """A request that shares a cached beginning and goes on in its own way."""
        self._count("fork")
        source = data.draw(st.sampled_from(sorted(self.cached)))
        state = self.cached[source]
        rest = self.bound.inputs(LONGEST - state.length)
        given = packed([[t[: state.length] for t in state.given], rest])
        slot = self.pool.alloc()[0]
        self.live.append(Live(given, slot, state.length, source, state.length))

    def _run(self, batch: Batch, given: list[Tensor]) -> Tensor:
        self.backend.begin(batch)
        return self.bound.call(given)

    def _points(self, data: st.DataObject, rows: list[Live], lengths: list[int]) -> list[tuple]:
        """Track points within the rows, while there are free slots."""
        points = []
        for row, (live, length) in enumerate(zip(rows, lengths, strict=True)):
            if length and self.pool.free_slots and data.draw(st.booleans()):
                count = data.draw(st.integers(1, length))
                points.append((row, live.done + count, self.pool.alloc()[0]))
        return points

    def _stored(self, rows: list[Live], points: list[tuple]) -> None:
        for row, position, slot in points:
            self._count("track")
            self.cached[slot] = Cached(rows[row].given, position)

    def _batch(
        self, mode: Mode, rows: list[Live], lengths: list[int], points: list[tuple]
    ) -> Batch:
        return Batch(
            mode,
            lengths,
            [r.done for r in rows],
            [r.src for r in rows],
            [r.slot for r in rows],
            points,
        )

    @precondition(lambda self: any(r.left for r in self.live))
    @rule(data=st.data(), mode=st.sampled_from([Mode.EXTEND, Mode.MIXED]))
    def extend(self, data: st.DataObject, mode: Mode) -> None:
        """Chunks of any length, none included; fresh, forked and running rows side by side."""
        self._count("extend")
        rows = self._some(data, [r for r in self.live if r.left])
        lengths = [data.draw(st.integers(0, min(6, r.left))) for r in rows]
        points = self._points(data, rows, lengths)
        given = packed([r.take(n) for r, n in zip(rows, lengths, strict=True)])
        out = self._run(self._batch(mode, rows, lengths, points), given)
        for row, output in zip(rows, out.split(lengths), strict=True):
            row.moved(output)
        self._stored(rows, points)

    @precondition(lambda self: any(r.done and r.left for r in self.live))
    @rule(data=st.data(), pads=st.integers(0, 2))
    def decode(self, data: st.DataObject, pads: int) -> None:
        self._count("decode")
        rows = self._some(data, [r for r in self.live if r.done and r.left])
        points = self._points(data, rows, [1] * len(rows))
        live = self._batch(Mode.DECODE, rows, [1] * len(rows), points)
        none = [-1] * pads
        batch = Batch(
            Mode.DECODE,
            [1] * (len(rows) + pads),
            [*live.start, *[0] * pads],
            [*live.src, *none],
            [*live.dst, *none],
            points,
        )
        out = self._run(batch, packed([*(r.take(1) for r in rows), self.bound.inputs(pads)]))
        for row, output in zip(rows, out.split(1), strict=False):
            row.moved(output)
        self._stored(rows, points)

    @precondition(lambda self: any(r.left for r in self.live))
    @rule(data=st.data(), decode_first=st.booleans())
    def verify(self, data: st.DataObject, decode_first: bool) -> None:
        """Chains with and without drafts, of which any number holds; so do their track points."""
        self._count("verify")
        rows = self._some(data, [r for r in self.live if r.left])
        counts = [data.draw(st.integers(0, min(WIDTH, r.left))) for r in rows]
        accepted = [data.draw(st.integers(0, count)) for count in counts]
        drafts = []
        for row, count, good in zip(rows, counts, accepted, strict=True):
            drafts.append(packed([row.take(good), self.bound.inputs(count - good)]))
        points = self._points(data, rows, counts)
        ends = [row.done + good for row, good in zip(rows, accepted, strict=True)]
        out = self._run(self._batch(Mode.VERIFY, rows, counts, points), packed(drafts))
        if decode_first:
            with pytest.raises(StepOrderError, match="uncommitted verify"):
                self.backend.begin(Batch(Mode.IDLE))
        self._commit(accepted, counts)
        for row, output, good in zip(rows, out.split(counts), accepted, strict=True):
            row.moved(output[:good])
        self._stored(rows, [point for point in points if point[1] <= ends[point[0]]])
        for slot in {slot for row, at, slot in points if at > ends[row]}:
            assert self._is_spoiled(slot)
            self._free(slot)

    def _is_spoiled(self, slot: int) -> bool:
        """Whether nothing was written to a slot since it was freed."""
        return all(
            bool(self.pool.tensors(spec.layer)[spec.name][slot].isnan().all())
            for spec in self.pool.states
        )

    def _commit(self, accepted: list[int], counts: list[int]) -> None:
        self.backend.commit(accepted)

    @precondition(lambda self: len(self.live) > 1)
    @rule()
    def idle(self) -> None:
        self._count("idle")
        self.backend.begin(Batch(Mode.IDLE))
        assert self.bound.call(self.bound.inputs(0)).shape[0] == 0

    @precondition(lambda self: set(self.cached) - {r.source for r in self.live})
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        self._count("evict")
        free = sorted(set(self.cached) - {r.source for r in self.live})
        slot = data.draw(st.sampled_from(free))
        del self.cached[slot]
        self._free(slot)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keep=st.booleans())
    def free(self, data: st.DataObject, keep: bool) -> None:
        """End a request; its state is kept as a cached one, or its slot is free again."""
        self._count("free")
        row = data.draw(st.sampled_from(self.live))
        self.live.remove(row)
        self._compare(row)
        if keep and row.done and row.source is None:
            self.cached[row.slot] = Cached(row.given, row.done)
        else:
            self._free(row.slot)

    def _compare(self, row: Live) -> None:
        if row.done > row.begin:
            wanted = self.bound.alone([tensor[: row.done] for tensor in row.given])
            assert close(torch.cat(row.outputs), wanted[row.begin :])

    @invariant()
    def every_slot_is_free_or_has_one_owner(self) -> None:
        owned = [row.slot for row in self.live] + list(self.cached)
        assert len(set(owned)) == len(owned)
        assert self.pool.free_slots == self.pool.slots - len(owned)

    def teardown(self) -> None:
        for row in self.live:
            self._compare(row)


RULES = ("alloc", "fork", "track", "extend", "decode", "verify", "evict", "free", "idle")


def run(
    machine: type[Machine], name: str, rules: Iterable[str] = (), **changes: object
) -> Counter[str]:
    """Run a machine on a family, and how often each of its rules came up.

    Draws may leave a rare rule out: it runs again until all of `rules` came up, four times at most.
    """
    machine = type(machine.__name__, (machine,), {"name": name, "done": Counter()})
    found = settings(
        max_examples=50,
        stateful_step_count=40,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    for _ in range(4):
        run_state_machine_as_test(machine, settings=settings(found, **changes))
        if set(rules) <= machine.done.keys():
            break
    return machine.done


@pytest.mark.parametrize("name", NAMES)
def test_whatever_happens_to_its_neighbours_a_request_gives_what_it_gives_alone(name: str) -> None:
    done = run(Machine, name, RULES)
    assert sum(done.values()) >= 1000
    assert set(done) == set(RULES)


def by_chance(share: float) -> bool:
    """Whether one more draw of the seeded generator is below a share."""
    return float(torch.rand(())) < share


class Replayed(Machine):
    """The same, with steps that are replayed or given up, and with slots and counts on the device.

    Whoever replays steps of this backend runs eager ones too, over the same slots and scratch.
    """

    def _run(self, batch: Batch, given: list[Tensor]) -> Tensor:
        batch = on_device(batch) if by_chance(0.3) else batch
        if by_chance(0.2):
            self._give_up(batch, given)
        if batch.mode not in CAPTURABLE or by_chance(0.4):
            return super()._run(batch, given)
        self._count("replay")
        return rigs_of(self.name)[batch.mode].replay(batch, given)[1][: batch.tokens].clone()

    def _give_up(self, batch: Batch, given: list[Tensor]) -> None:
        """A step that was only staged has moved nothing, nor has a verify without its commit."""
        self._count("give up")
        if batch.mode in CAPTURABLE and by_chance(0.5):
            self.backend.stage(batch)
        else:
            self.backend.begin(batch)
            if batch.mode is Mode.VERIFY:
                self.bound.call(given)
        self.backend.abandon()

    def _commit(self, accepted: list[int], counts: list[int]) -> None:
        told = torch.tensor(accepted, dtype=torch.int32)
        self.backend.commit(told if by_chance(0.3) else accepted)


@pytest.mark.parametrize("name", (*NAMES, "cca"))
def test_replayed_steps_among_eager_ones_give_what_each_request_gives_alone(name: str) -> None:
    rigs_of(name)
    rules = {*RULES, "replay", "give up"}
    assert set(run(Replayed, name, rules, max_examples=30)) == rules


class TracksOneTooFar(Machine):
    """The cached state is one token older than its prefix."""

    def _stored(self, rows: list[Live], points: list[tuple]) -> None:
        super()._stored(rows, [(row, max(1, at - 1), slot) for row, at, slot in points])


class ReadsTheLastTenant(Machine):
    """A fresh request starts from what is in its slot."""

    def _batch(self, mode: Mode, rows: list[Live], lengths: list[int], points: list) -> Batch:
        batch = super()._batch(mode, rows, lengths, points)
        return replace(batch, src=[r.slot if r.src < 0 else r.src for r in rows])


class CommitsEveryDraft(Machine):
    """A commit that takes the drafts that did not hold too."""

    def _commit(self, accepted: list[int], counts: list[int]) -> None:
        super()._commit(counts, counts)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", [TracksOneTooFar, ReadsTheLastTenant, CommitsEveryDraft])
def test_the_machine_notices_a_wrong_state(wrong: type[Machine], name: str) -> None:
    with pytest.raises(AssertionError):
        run(wrong, name, phases=[Phase.generate])
