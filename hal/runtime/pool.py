"""The state pool: one tensor a state and layer, slot 0 reserved, slots 1..N handed out."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from operator import index
from typing import Final, NewType, Protocol, SupportsIndex

import torch
from torch import Tensor

from hal.errors import PoolExhausted
from hal.options import Shard
from hal.runtime.transfer import SlotState, export_slot, import_slot
from hal.states import StateSpec

Slot = NewType("Slot", int)
"""A place in the pool; not a request's row number, which is another space."""

RESERVED: Final = 1
"""Slot 0 is never handed out: kernels that cannot skip may use it as a sink."""

LAST_SLOT: Final = 2**31 - 1
"""Slot ids are int32 on the device; every offset that is made of one is 64 bits wide."""


class SlotKeyed(Protocol):
    """What else is kept by slot, as an engine's keys and values; it follows the pool."""

    def release(self, slots: Iterable[Slot]) -> None:
        """Drop what the slots hold: their tenants are gone."""
        ...


class Pool:
    """Tensors `[slots + 1, …]` for every state of the plan, and the slots that are free.

    A slot keeps the last tenant's bytes: a fresh request reads none of them, since it starts from
    `src = none`. Every failing call leaves the pool as it was; only where one of the attached fails
    in its `release`, the slots are free and all the others were told.
    """

    def __init__(
        self,
        states: Sequence[StateSpec],
        slots: int,
        device: torch.device,
        shard: Shard | None = None,
    ) -> None:
        slots = index(slots)
        if slots < 1:
            raise ValueError(f"pool: {slots} slots, expected at least 1")
        if slots > LAST_SLOT:
            raise ValueError(f"pool: {slots} slots, at most {LAST_SLOT} have an int32 id")
        self.slots = slots
        self.device = device
        self.states = tuple(states)
        self.shard = shard or Shard()
        self._keyed: list[SlotKeyed] = []
        self._tensors: dict[int, dict[str, Tensor]] = {}
        for spec in states:
            shape = (slots + RESERVED, *spec.shape)
            tensor = torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=device)
            self._tensors.setdefault(spec.layer, {})[spec.name] = tensor
        self._free: deque[Slot] = deque()
        self._used: set[Slot] = set()
        self.reset()

    @property
    def bytes(self) -> int:
        """Bytes of all tensors, the reserved slot included."""
        return sum(t.numel() * t.element_size() for t in self._all())

    @property
    def free_slots(self) -> int:
        """How many slots `alloc` can still hand out."""
        return len(self._free)

    def tensors(self, layer: int) -> dict[str, Tensor]:
        """A layer's state tensors by name, slot axis first."""
        return self._tensors[layer]

    def spec(self, layer: int, name: str) -> StateSpec:
        """The plan's entry of one state."""
        return next(s for s in self.states if (s.layer, s.name) == (layer, name))

    def attach(self, keyed: SlotKeyed) -> None:
        """Let something that is kept by slot follow every `free` and `reset`."""
        self._keyed.append(keyed)

    def alloc(self, count: int = 1) -> list[Slot]:
        """Hand out `count` slots, or raise `PoolExhausted` with the numbers and hand out none."""
        if count < 0:
            raise ValueError(f"pool: alloc({count}), expected at least 0")
        if count > len(self._free):
            raise PoolExhausted(
                f"pool: {count} slots asked for, {len(self._free)} of {self.slots} are free; "
                f"free some, or build the backend with more slots"
            )
        taken = [self._free.popleft() for _ in range(count)]
        self._used.update(taken)
        return taken

    def free(self, slots: Iterable[Slot]) -> None:
        """Take slots back; one that is not in use, or is named twice, is an error."""
        given = [_slot(slot) for slot in slots]
        stray = sorted(s for s, n in Counter(given).items() if n > 1 or s not in self._used)
        if stray:
            raise ValueError(f"pool: free of slots {stray}, which are not in use exactly once")
        self._used.difference_update(given)
        self._free.extend(given)
        self._release(given)

    def fork(self, source: Slot) -> Slot:
        """A new slot with a bit-exact copy of `source`, over all layers."""
        source = self._used_slot(source)
        (target,) = self.alloc(1)
        self.copy([source], [target])
        return target

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots pair by pair, bit-exactly, over all layers; negative ids skip their pair."""
        if len(sources) != len(targets):
            raise ValueError(f"pool: copy of {len(sources)} slots to {len(targets)} slots")
        named = zip(map(_slot, sources), map(_slot, targets), strict=True)
        pairs = [(source, target) for source, target in named if source >= 0 and target >= 0]
        for slot in (slot for pair in pairs for slot in pair):
            self._check_range(slot)
        written = [t for _, t in pairs]
        if len(set(written)) < len(written) or set(written) & {s for s, _ in pairs}:
            raise ValueError(f"pool: copy {pairs}: targets must be distinct and no sources")
        for tensor in self._all() if pairs else ():
            for source, target in pairs:
                tensor[target].copy_(tensor[source])

    def clear(self, slots: Sequence[int]) -> None:
        """Zero slots over all layers; negative ids are skipped."""
        live = [slot for slot in map(_slot, slots) if slot >= 0]
        for slot in live:
            self._check_range(slot)
        for tensor in self._all():
            for slot in live:
                tensor[slot].zero_()

    def reset(self) -> None:
        """Take every slot back, whatever is kept by slot with it; no byte is touched.

        Who had slots before may neither use nor free them: end what runs first.
        """
        self._used.clear()
        self._free = deque(Slot(i) for i in range(RESERVED, self.slots + RESERVED))
        self._release(self._free)

    def export_state(self, slot: Slot, start: int) -> SlotState:
        """Copies of a slot's named segments after `start` tokens, in a form that knows no layout.

        `hal.runtime.transfer` merges those of all ranks and cuts them for another parallel size.
        """
        return export_slot(self._planned(), self._used_slot(slot), start, self.shard)

    def import_state(self, slot: Slot, state: SlotState) -> None:
        """Write a slot that is in use; one of another plan or rank is refused, unwritten."""
        import_slot(self._planned(), self._used_slot(slot), state, self.shard)

    def _planned(self) -> list[tuple[StateSpec, Tensor]]:
        return [(spec, self._tensors[spec.layer][spec.name]) for spec in self.states]

    def _release(self, slots: Iterable[Slot]) -> None:
        """Tell all of the keepers, those too that come behind one that fails."""
        gone = tuple(slots)
        with ExitStack() as told:
            for keyed in reversed(self._keyed):
                told.callback(keyed.release, gone)

    def _all(self) -> Iterable[Tensor]:
        return (t for named in self._tensors.values() for t in named.values())

    def _check_range(self, slot: int) -> None:
        if not RESERVED <= slot <= self.slots:
            raise ValueError(f"pool: slot {slot}, pool has slots {RESERVED}..{self.slots}")

    def _used_slot(self, slot: Slot) -> Slot:
        given = _slot(slot)
        if given not in self._used:
            raise ValueError(f"pool: slot {given} is not in use")
        return given


def _slot(given: SupportsIndex) -> Slot:
    """A plain integer: torch takes True for a mask over the whole pool, and not for slot 1."""
    return Slot(int(index(given)))
