"""Whole decode steps of a model, recorded once for each size and replayed: its attention included.

A record's addresses are fixed, so keys and values lie in tensors of the size that they may reach,
and a row's token, position and slot are read on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from hal.errors import HalError, StepOrderError
from hal.integrations.transformers.attention import check_room
from hal.runtime.batch import NO_SLOT, Batch, Mode
from hal.runtime.pool import RESERVED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from hal.runtime.backend import Backend
    from hal.runtime.graphs import Captured


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """What a decode reads of its rows, i64 on the device: tokens, positions and slots, `[3, R]`."""

    packed: Tensor
    grid: Tensor
    """Every position that a sequence may reach, `[max_len]`."""

    @property
    def ids(self) -> Tensor:
        """Tokens `[1, R]`."""
        return self.packed[:1]

    @property
    def positions(self) -> Tensor:
        """Positions `[1, R]`."""
        return self.packed[1:2]

    @property
    def slots(self) -> Tensor:
        """Where keys and values go, `[R]`; pads share slot 0, which is nobody's."""
        return self.packed[2]

    def seen(self, window: int | None) -> Tensor:
        """Which positions each row attends to, `[R, max_len]`."""
        own = self.packed[1][:, None]
        seen = self.grid <= own
        return seen if window is None else seen & (self.grid > own - window)

    def write(self, batch: Batch, tokens: Sequence[int]) -> None:
        """The batch's rows; pads and what lies behind them take token 0 at position 0 of slot 0."""
        values = [[0] * self.packed.shape[1] for _ in range(3)]
        for row, (src, dst) in enumerate(zip(batch.src, batch.dst, strict=True)):
            if src >= 0 or dst >= 0:
                values[0][row], values[1][row], values[2][row] = tokens[row], batch.start[row], dst
        self.packed.copy_(torch.tensor(values))


@dataclass(slots=True)
class FixedKv:
    """Keys and values by attention call: `[slots + 1, KV heads, max_len, D]` from the first use on.

    A token is at its position, so what a slot's former tenant left is written over or out of reach.
    """

    slots: int
    max_len: int
    _calls: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes held now, whoever uses them."""
        return sum(t.untyped_storage().nbytes() for pair in self._calls.values() for t in pair)

    def extend(
        self, call: int, slot: int, start: int, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store `[KV heads, L, D]` from position `start`; views of all positions up to there."""
        end = start + keys.shape[1]
        check_room(slot, end, self.max_len)
        own = [each[slot] for each in self._of(call, keys, values)]
        for held, new in zip(own, (keys, values), strict=True):
            held[:, start:end] = new
        return own[0][:, :end], own[1][:, :end]

    def decode(
        self,
        at: DecodeInputs,
        call: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float | None,
        window: int | None,
    ) -> Tensor:
        """Store a token of every row and attend; query `[H, R, D]`, the others `[KV heads, R, D]`.

        What a row does not see is taken for zeros, since a former tenant may have left anything.
        """
        seen = at.seen(window)
        held_keys, held_values = self._of(call, keys, values)
        for held, new in ((held_keys, keys), (held_values, values)):
            held[at.slots, :, at.packed[1]] = new.transpose(0, 1)
        out = functional.scaled_dot_product_attention(
            query.transpose(0, 1)[:, :, None].float(),
            _read(held_keys, at.slots, seen),
            _read(held_values, at.slots, seen),
            attn_mask=seen[:, None, None],
            scale=scaling,
            enable_gqa=True,
        )
        return out[:, :, 0].transpose(0, 1).to(query.dtype)

    def share(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of `source` to `target`, in all calls."""
        for pair in self._calls.values():
            for held in pair:
                held[target, :, :length] = held[source, :, :length]

    def release(self, slots: Iterable[int]) -> None:
        """Nothing: the memory stays, and its next tenant writes before it reads."""

    def _of(self, call: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if call not in self._calls:
            self._calls[call] = self._room(keys), self._room(values)
        return self._calls[call]

    def _room(self, like: Tensor) -> Tensor:
        shape = (self.slots + RESERVED, like.shape[0], self.max_len, like.shape[2])
        with torch.inference_mode(False):  # copies between slots are made outside of it
            return torch.zeros(shape, dtype=like.dtype, device=like.device)


def _read(held: Tensor, slots: Tensor, seen: Tensor) -> Tensor:
    """What rows see of their slots, `[R, KV heads, max_len, D]` in float32, zeros for the rest."""
    return held[slots].float().masked_fill(~seen[:, None, :, None], 0.0)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A decode of up to R rows: where its inputs are, its logits `[R, vocab]`, and the record."""

    inputs: DecodeInputs
    logits: Tensor
    captured: Captured


@dataclass(slots=True)
class Decodes:
    """The recorded decodes of a model, made when a batch of their size first comes.

    `forward` runs the model on inputs, linear layers and attention over the slots included, and
    gives float32 logits `[R, vocab]`.
    """

    backend: Backend
    max_len: int
    forward: Callable[[DecodeInputs], Tensor]
    replays: int = 0
    _by_rows: dict[int, Recorded] = field(default_factory=dict)

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many rows each record has room for."""
        return tuple(sorted(self._by_rows))

    def stage(self, batch: Batch) -> Recorded:
        """Check the batch and write its metadata; nothing runs yet."""
        self._check_room(batch)
        rows = self._rows_of(max(batch.rows, 1))
        if rows not in self._by_rows:
            self._by_rows[rows] = self._record(rows)
        return self._by_rows[self.backend.stage(batch).rows]

    def run(self, staged: Recorded, batch: Batch, tokens: Sequence[int]) -> Tensor:
        """Replay the step staged last; logits of its rows, which live until the next replay."""
        with torch.inference_mode():
            staged.inputs.write(batch, tokens)
            self.backend.launch(staged.captured)
        self.replays += 1
        return staged.logits

    def _check_room(self, batch: Batch) -> None:
        """Refuse a position that keys and values have no place for; a record never looks at it."""
        for slot, start in zip(batch.dst, batch.start, strict=False):  # checked behind it
            if slot >= 0:
                check_room(slot, start + 1, self.max_len)

    def _rows_of(self, rows: int) -> int:
        """The next power of two, or as many as the backend was built for, of one token each."""
        limits = self.backend.limits
        return min(1 << (rows - 1).bit_length(), limits.max_batch, limits.max_tokens)

    def _record(self, rows: int) -> Recorded:
        """Run a step of pads once, which compiles what it needs, and record another."""
        inputs = self._inputs(rows)
        pads = [NO_SLOT] * rows
        self.backend.begin(Batch(Mode.DECODE, [1] * rows, [0] * rows, pads, pads))
        try:
            with torch.inference_mode():
                self.forward(inputs)
        finally:
            self.backend.end()
        try:
            with torch.inference_mode(), self.backend.capture(Mode.DECODE, rows) as captured:
                logits = self.forward(inputs)
        except (StepOrderError, RuntimeError) as error:
            raise HalError(
                f"a decode of this model cannot be recorded: {error}; run it without graphs"
            ) from error
        return Recorded(inputs, logits, captured)

    def _inputs(self, rows: int) -> DecodeInputs:
        device = self.backend.device
        grid = torch.arange(self.max_len, dtype=torch.long, device=device)
        return DecodeInputs(torch.zeros(3, rows, dtype=torch.long, device=device), grid)
