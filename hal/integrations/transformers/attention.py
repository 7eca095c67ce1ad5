"""Attention over packed rows, with keys and values kept by slot."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from hal.errors import HalError, StepOrderError
from hal.runtime.batch import Batch, Mode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

NAME: Final = "hal_slots"
"""What a bound model's config names as its attention."""

CHUNK: Final = 64
"""Tokens by which a slot's keys and values grow at least."""

UNSERVED: Final = ("position_bias", "s_aux", "sinks", "softcap")
"""Keywords that change the result; a model that passes one is not run without it."""

_CURRENT: ContextVar[SlotAttention] = ContextVar("hal_slot_attention")


@dataclass(slots=True)
class Entry:
    """Keys and values of one slot and one attention call, `[KV heads, capacity, D]` each.

    Other slots may see the first `shared` tokens, so these are never written again.
    """

    keys: Tensor
    values: Tensor
    shared: int = 0

    def first(self, length: int) -> Entry:
        """The first tokens, in the same memory and full at that length."""
        return Entry(self.keys[:, :length], self.values[:, :length], length)


@dataclass(slots=True)
class KvStore:
    """Keys and values by attention call and slot, grown as sequences grow.

    A token is at its position, so what a slot's former tenant left is written over or out of reach,
    and so are drafts that did not hold: the tokens that follow take their positions.
    """

    max_len: int
    _entries: dict[tuple[int, int], Entry] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes held now; what slots share is counted once."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for entry in self._entries.values()
            for tensor in (entry.keys, entry.values)
        }
        return sum(storages.values())

    def extend(
        self, call: int, slot: int, start: int, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store `[KV heads, L, D]` from position `start`; views of all positions up to there."""
        end = start + keys.shape[1]
        check_room(slot, end, self.max_len)
        entry = self._entries.get((call, slot))
        if entry is not None and start < entry.shared:
            entry = entry.first(start)
        if entry is None or entry.keys.shape[1] < end:
            entry = self._grow(entry, end, keys, values)
            self._entries[call, slot] = entry
        entry.keys[:, start:end] = keys
        entry.values[:, start:end] = values
        return entry.keys[:, :end], entry.values[:, :end]

    def share(self, source: int, target: int, length: int) -> None:
        """Let `target` hold the first `length` tokens of `source`, in all calls, without a copy.

        The target is full at that length, so whoever goes on from there is moved to memory of its
        own first; so is the source, should it ever write these tokens again.
        """
        shared = {}
        for (call, slot), entry in self._entries.items():
            if slot == source:
                entry.shared = max(entry.shared, length)
                shared[call, target] = entry.first(length)
        self.release([target])
        self._entries |= shared

    def release(self, slots: Iterable[int]) -> None:
        """Drop what the slots hold."""
        gone = set(slots)
        self._entries = {key: e for key, e in self._entries.items() if key[1] not in gone}

    def _grow(self, old: Entry | None, end: int, keys: Tensor, values: Tensor) -> Entry:
        held = 0 if old is None else old.keys.shape[1]
        capacity = min(self.max_len, max(end, 2 * held, CHUNK))
        new = Entry(
            keys.new_empty(keys.shape[0], capacity, keys.shape[2]),
            values.new_empty(values.shape[0], capacity, values.shape[2]),
        )
        if old is not None:
            new.keys[:, :held] = old.keys
            new.values[:, :held] = old.values
        return new


def check_room(slot: int, tokens: int, most: int) -> None:
    """Refuse keys and values of more tokens than a slot has room for."""
    if tokens > most:
        raise HalError(f"kv: slot {slot} would hold {tokens} tokens, at most {most} fit")


def spans(batch: Batch) -> Iterator[tuple[int, slice]]:
    """Rows that have tokens, with their place in the packed input.

    A pad of a DECODE step takes a token of the input and is left out.
    """
    begin = 0
    for row, length in enumerate(batch.lengths):
        if length and (batch.src[row] >= 0 or batch.dst[row] >= 0):
            yield row, slice(begin, begin + length)
        begin += 1 if batch.mode is Mode.DECODE else length


Attend = Callable[[int, Tensor, Tensor, Tensor, float | None, int | None], Tensor]
"""A call's number, query `[H, T, D]`, keys and values `[KV heads, T, D]`, scale and window."""


class Store(Protocol):
    """Where keys and values of prompts go, by attention call and slot."""

    def extend(
        self, call: int, slot: int, start: int, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store `[KV heads, L, D]` from position `start`; views of all positions up to there."""
        ...


@dataclass(slots=True)
class SlotAttention:
    """One model's attention: its store, the step that is running, and how often it was called.

    Calls are told apart by their order in the step, since one module may serve several layers.
    """

    store: Store
    step: Attend | None = None
    calls: int = 0

    @contextmanager
    def running(self, batch: Batch) -> Iterator[None]:
        """Make this the attention of every bound module that is called inside, row by row."""
        with self.attending(partial(self._by_rows, batch)):
            yield

    @contextmanager
    def attending(self, step: Attend) -> Iterator[None]:
        """The same with a step of its own."""
        self.step, self.calls = step, 0
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)
            self.step = None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor:
        """Attend; query `[H, T, D]`, key and value `[KV heads, T, D]`, result as query.

        Row i sees the positions of its own slot up to each of its tokens.
        """
        if self.step is None:
            raise StepOrderError("attention was called outside a step")
        call = self.calls
        self.calls += 1
        return self.step(call, query, key, value, scaling, window)

    def _by_rows(
        self,
        batch: Batch,
        call: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        window: int | None,
    ) -> Tensor:
        out = query.new_zeros(*query.shape[:-1], value.shape[-1])
        for row, span in spans(batch):
            start, slot = batch.start[row], batch.dst[row]
            keys, values = self.store.extend(call, slot, start, key[:, span], value[:, span])
            out[:, span] = attend(query[:, span], keys, values, start, scaling, window)
        return out


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    start: int,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Causal attention of one row whose first token is at position `start`.

    query `[H, L, D]`, keys and values `[KV heads, start + L, D]`. A window of n reaches back over
    n positions, the token's own included. The softmax is float32.
    """
    first = 0 if window is None else max(0, start - window + 1)
    length = query.shape[1]
    mask = None
    if length > 1:
        asked = torch.arange(start, start + length, device=query.device)[:, None]
        seen = torch.arange(first, start + length, device=query.device)[None]
        mask = seen <= asked
        if window is not None:
            mask &= seen > asked - window
    return functional.scaled_dot_product_attention(
        query[None].float(),
        keys[None, :, first:].float(),
        values[None, :, first:].float(),
        attn_mask=mask,
        scale=scaling,
        enable_gqa=True,
    )[0].to(query.dtype)


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """What transformers calls: query `[1, H, T, D]` to `[1, T, H, D]`, and no weights."""
    current = _CURRENT.get(None)
    if current is None:
        raise StepOrderError("a model bound to hal runs inside Runner.step alone")
    present = [name for name in UNSERVED if kwargs.get(name) is not None]
    if present or attention_mask is not None:
        what = ", ".join(present) or "attention_mask"
        raise HalError(f"{type(module).__name__} passes {what}, which slot attention does not take")
    out = current.forward(query[0], key[0], value[0], scaling, sliding_window)
    return out.transpose(0, 1)[None], None


def no_mask(**kwargs: object) -> None:
    """The mask of packed rows: none, since rows and positions say it all."""


def register() -> None:
    """Make `NAME` known to transformers; it touches no attention of another name."""
    AttentionInterface.register(NAME, slot_attention)
    AttentionMaskInterface.register(NAME, no_mask)
