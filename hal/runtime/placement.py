"""Where requests' states live: a slot each, and with a prefix cache the states worth keeping."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from hal.runtime.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hal.runtime.batch import Track
    from hal.runtime.pool import Slot
    from hal.runtime.prefix import PrefixIndex
    from hal.runtime.request import Request


class Slots(Protocol):
    """Where a request's state lives; `hal.runtime.pool.Pool` is one."""

    @property
    def free_slots(self) -> int:
        """How many slots `alloc` can still hand out."""
        ...

    def alloc(self, count: int = 1) -> list[Slot]:
        """Hand out `count` slots."""
        ...

    def free(self, slots: Iterable[Slot]) -> None:
        """Take slots back."""
        ...


@dataclass(slots=True)
class PrefixStats:
    """What a prefix cache did: `saved` prompt tokens were not fed, since `hits` states had them."""

    admitted: int = 0
    hits: int = 0
    saved: int = 0
    stored: int = 0
    evicted: int = 0


class Placement:
    """A slot for every running request, from its admission to its end; nothing is shared."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots

    @property
    def stats(self) -> PrefixStats | None:
        """What a prefix cache did, None where there is none."""
        return None

    @property
    def room(self) -> bool:
        """Whether one more request could be admitted."""
        return self.slots.free_slots > 0

    def enter(self, request: Request) -> None:
        """Hear of a request that waits."""

    def admit(self, request: Request) -> bool:
        """Give a request its slot; False, and nothing changed, where there is none."""
        if not self.slots.free_slots:
            return False
        (request.slot,) = self.slots.alloc(1)
        return True

    def cut(self, request: Request, length: int) -> int:
        """How many of `length` tokens a step should feed; at least one of them."""
        return length

    def track(self, rows: Sequence[tuple[Request, int]]) -> list[Track]:
        """The states that a step of these rows should store."""
        return []

    def settle(self, requests: Iterable[Request]) -> None:
        """Book a step of these requests that ran."""

    def give_up(self) -> None:
        """Forget what a step that failed was to store."""

    def leave(self, request: Request) -> None:
        """Take back what a request had that has ended."""
        if request.slot is not None:
            self.slots.free([request.slot])
            request.slot = None


@dataclass(slots=True)
class _Pending:
    """A state that the step under way stores."""

    request: Request
    tokens: tuple[int, ...]
    slot: Slot


@dataclass(slots=True)
class PrefixCache(Placement):
    """Starts requests from the longest cached prefix, and keeps the states that others may need.

    A hit is a fork: the cached state is read and never written. Kept are the states where known
    prompts part, the one before a prompt's last token, and the one that a request leaves behind.
    `grid` is the granularity of track points. A full pool gives up cached states, the least
    recently used first, and never one that a step reads.
    """

    slots: Slots
    index: PrefixIndex
    model: str
    grid: int = 1
    stats: PrefixStats = field(default_factory=PrefixStats)
    _pending: list[_Pending] = field(default_factory=list)

    @property
    def room(self) -> bool:
        """Whether one more request could be admitted, cached states given up for it."""
        return self.slots.free_slots > 0 or self.index.evictable

    def enter(self, request: Request) -> None:
        """Remember the prompt, so that the one before it keeps the state that both share."""
        self.index.record(self.model, request.prompt)

    def admit(self, request: Request) -> bool:
        """Give a slot, and the longest cached prefix of the prompt to start from."""
        found = self.index.longest(self.model, request.prompt)
        source, length = (None, 0) if found is None else found
        if source is not None:
            self.index.hold(source)
        slot = self._slot()
        if slot is None and source is not None:
            self.index.release(source)
            slot, source = self._taken_over(source)
        if slot is None:
            return False
        request.slot, request.source, request.fed = slot, source, length
        request.counts.saved = length
        self.stats.admitted += 1
        self.stats.hits += length > 0
        self.stats.saved += length
        return True

    def cut(self, request: Request, length: int) -> int:
        """End the row at a point that is on no grid of the row's own."""
        for position in self._wanted(request, length):
            if (position - request.fed) % self.grid:
                return position - request.fed
        return length

    def track(self, rows: Sequence[tuple[Request, int]]) -> list[Track]:
        """Points within the rows, while slots can be had; a prefix is stored once a step."""
        points: list[Track] = []
        for row, (request, length) in enumerate(rows):
            for position in self._wanted(request, length):
                count = position - request.fed
                if count % self.grid and count != length:
                    continue  # its state was kept, and given up since the row was cut elsewhere
                slot = self._slot()
                if slot is None:
                    return points
                tokens = request.prompt[:position]
                self._pending.append(_Pending(request, tokens, slot))
                points.append((row, position, slot))
        return points

    def settle(self, requests: Iterable[Request]) -> None:
        """Let go of what the step read, and keep what it stored."""
        for request in requests:
            self._let_go(request)
        for pending in self._pending:
            # A request that was cancelled meanwhile took its keys and values with it.
            if pending.request.slot is None:
                self.slots.free([pending.slot])
            else:
                self._keep(pending.tokens, pending.slot)
        self._pending.clear()

    def give_up(self) -> None:
        """Free the slots that a step that failed was to fill."""
        self.slots.free([pending.slot for pending in self._pending])
        self._pending.clear()

    def leave(self, request: Request) -> None:
        """Keep the state that a request leaves behind, unless it was cancelled."""
        self._let_go(request)
        self.index.forget(self.model, request.prompt)
        slot, request.slot = request.slot, None
        if slot is None:
            return
        if request.reason is FinishReason.CANCELLED:
            self.slots.free([slot])
        else:
            self._keep(request.first(request.fed), slot)

    def _wanted(self, request: Request, length: int) -> Iterator[int]:
        """Positions among the next `length` tokens whose states are worth keeping and not kept."""
        prompt, begin = request.prompt, request.fed
        if begin >= len(prompt) - 1:
            return
        known = (*self.index.forks(self.model, prompt), len(prompt) - 1)
        for position in sorted({depth // self.grid * self.grid for depth in known}):
            if begin < position <= begin + length and not self._kept(prompt[:position]):
                yield position

    def _kept(self, tokens: tuple[int, ...]) -> bool:
        pending = any(each.tokens == tokens for each in self._pending)
        return pending or self.index.has(self.model, tokens)

    def _slot(self) -> Slot | None:
        """A free slot, one of a cached state where none is free, None where all are needed."""
        if not self.slots.free_slots:
            given_up = self.index.evict()
            if given_up is None:
                return None
            self.stats.evicted += 1
            self.slots.free([given_up])
        (slot,) = self.slots.alloc(1)
        return slot

    def _taken_over(self, source: Slot) -> tuple[Slot | None, None]:
        """The cached state's own slot, to be moved on in place, where nobody else reads it."""
        if self.index.holders(source):
            return None, None
        self.index.remove(source)
        self.stats.evicted += 1
        return source, None

    def _keep(self, tokens: tuple[int, ...], slot: Slot) -> None:
        if self.index.store(self.model, tokens, slot):
            self.stats.stored += 1
        else:
            self.slots.free([slot])

    def _let_go(self, request: Request) -> None:
        if request.source is not None:
            self.index.release(request.source)
            request.source = None
