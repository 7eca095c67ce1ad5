"""The runner: one model, one backend, one step at a time."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hal.errors import HalError
from hal.integrations.transformers.attention import KvStore, SlotAttention, spans
from hal.integrations.transformers.binding import bind_attention, bind_mixers
from hal.integrations.transformers.captured import Decodes, FixedKv
from hal.integrations.transformers.experts import on_device
from hal.runtime.batch import Mode
from hal.runtime.prefix import CachedSlots, PrefixIndex

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from transformers import PreTrainedModel

    from hal.integrations.transformers.captured import DecodeInputs
    from hal.runtime.backend import Backend
    from hal.runtime.batch import Batch
    from hal.runtime.pool import Slot


class Runner:
    """Runs steps of a bound model and keeps what a slot holds: linear states, keys and values.

    Binding changes this instance of the model alone, and for good: it runs in `step` from now on.
    Where the selection was made with `graphs`, DECODE steps are recorded whole and replayed.
    `prefixes` says which cached states are in its slots; `drop_prefixes` frees them. Both follow
    the backend's pool: what it takes back is gone here too, whoever frees it.
    """

    def __init__(self, model: PreTrainedModel, backend: Backend, max_len: int) -> None:
        self.model = model.to(backend.device).eval()
        self.backend = backend
        self.max_len = max_len
        self.kv: KvStore | FixedKv = KvStore(max_len)
        self.decodes: Decodes | None = None
        if backend.selection.options.graphs:
            self.kv = fixed = FixedKv(backend.pool.slots, max_len)
            self.decodes = Decodes(backend, max_len, partial(self._decode, fixed))
        self.prefixes = PrefixIndex()
        self._attention = SlotAttention(self.kv)
        self._witness = bind_mixers(model, backend)
        bind_attention(model)
        spec = backend.selection.model
        self._attention_layers = sum(layer.attention is not None for layer in spec.layers)
        self._verifying: Batch | None = None
        for keyed in (self.kv, CachedSlots(self.prefixes)):
            backend.pool.attach(keyed)

    @property
    def free_slots(self) -> int:
        """How many slots `alloc` can still hand out."""
        return self.backend.pool.free_slots

    def alloc(self, count: int = 1) -> list[Slot]:
        """Hand out slots."""
        return self.backend.pool.alloc(count)

    def free(self, slots: Iterable[Slot]) -> None:
        """Take slots back, and with them their keys and values."""
        self.backend.pool.free(slots)

    def drop_prefixes(self) -> None:
        """Free every cached state that nobody reads."""
        while (slot := self.prefixes.evict()) is not None:
            self.free([slot])

    def step(self, batch: Batch, tokens: Sequence[int], rows: Sequence[int]) -> Tensor:
        """Feed the packed tokens; float32 logits `[len(rows), vocab]` of the rows' last tokens.

        In a VERIFY step they are those of all the rows' tokens, and `commit` has to follow, unless
        the slots of all its rows were freed. A row without a `src` starts `dst` anew; one whose
        `src` is another slot goes on from its keys and values too, and a track point keeps both.
        Tokens behind the batch's own, and those of a DECODE step's pad rows, are padding. Raises
        `HalError` unless every linear layer ran through `hal`, and every attention layer once over
        the slots.
        """
        _check_slots(batch)
        if len(tokens) < batch.tokens:
            raise ValueError(f"step: {len(tokens)} tokens, the batch has {batch.tokens}")
        if self.decodes is not None and batch.mode is Mode.DECODE:
            logits = self._replay(self.decodes, batch, tokens, rows)
        else:
            self.backend.begin(batch)
            self._verifying = batch if batch.mode is Mode.VERIFY else None
            self._fork(batch)
            logits = self._run(batch, tokens, rows)
        if batch.mode is not Mode.VERIFY:
            self._track(batch, batch.lengths)
        return logits

    def commit(self, accepted: Sequence[int]) -> None:
        """Move every row of the VERIFY step on by its accepted tokens, 0 up to all of them.

        Raises `StepOrderError`, and moves none, where that takes a slot that was freed since.
        """
        self.backend.commit(accepted)
        batch, self._verifying = self._verifying, None
        if batch is not None:
            self._track(batch, accepted)

    def abandon(self) -> None:
        """Give up a VERIFY step that failed or was not committed: no state has moved."""
        self._verifying = None
        self.backend.abandon()

    def _run(self, batch: Batch, tokens: Sequence[int], rows: Sequence[int]) -> Tensor:
        try:
            with torch.inference_mode(), self._attention.running(batch), self._witnessed():
                return self._forward(batch, tokens, rows)
        finally:
            self.backend.end()

    def _replay(
        self, decodes: Decodes, batch: Batch, tokens: Sequence[int], rows: Sequence[int]
    ) -> Tensor:
        staged = decodes.stage(batch)
        self._verifying = None
        self._fork(batch)
        return decodes.run(staged, batch, tokens)[list(rows)]

    def _decode(self, kv: FixedKv, inputs: DecodeInputs) -> Tensor:
        """A decode whose rows are known on the device alone; logits `[R, vocab]`."""
        step = partial(kv.decode, inputs)
        with self._attention.attending(step), self._witnessed(), on_device(self.model):
            output = self.model(
                input_ids=inputs.ids, position_ids=inputs.positions, use_cache=False
            )
        logits: Tensor = output.logits
        return logits[0].float()

    @contextmanager
    def _witnessed(self) -> Iterator[None]:
        """A forward in which every layer has to run as often as a step needs it."""
        self._witness.begin()
        yield
        self._witness.check()
        if self._attention.calls != self._attention_layers:
            raise HalError(
                f"attention ran {self._attention.calls} times over the slots, "
                f"expected {self._attention_layers}, once for each layer"
            )

    def _forward(self, batch: Batch, tokens: Sequence[int], rows: Sequence[int]) -> Tensor:
        positions, asked = [0] * len(tokens), {}
        for row, span in spans(batch):
            start, first = batch.start[row], span.stop - 1
            positions[span] = range(start, start + batch.lengths[row])
            asked[row] = range(span.start if batch.mode is Mode.VERIFY else first, span.stop)
        output = self.model(
            input_ids=self._ids(tokens)[None],
            position_ids=self._ids(positions)[None],
            use_cache=False,
            logits_to_keep=self._ids([token for row in rows for token in asked[row]]),
        )
        logits: Tensor = output.logits
        return logits[0].float()

    def _fork(self, batch: Batch) -> None:
        """Give rows that go from one slot to another the keys and values of the first."""
        for row, _ in spans(batch):
            src, dst = batch.src[row], batch.dst[row]
            if src >= 0 and src != dst:
                self.kv.share(src, dst, batch.start[row])

    def _track(self, batch: Batch, counts: Sequence[int]) -> None:
        """Keep the keys and values of the track points that the counted tokens reach."""
        for row, position, slot in batch.track:
            if slot >= 0 and position - batch.start[row] <= counts[row]:
                self.kv.share(batch.dst[row], slot, position)

    def _ids(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.backend.device)


def _check_slots(batch: Batch) -> None:
    """Keys and values are written to `dst`, so a row that keeps its state nowhere has no place."""
    if batch.held is not None:
        raise ValueError(
            "step: keys and values are found by slot, so the host has to know the slots"
        )
    for row, (length, src, dst) in enumerate(zip(batch.lengths, batch.src, batch.dst, strict=True)):
        pad = batch.mode is Mode.DECODE and src < 0 and dst < 0
        if length and not pad and dst < 0:
            raise ValueError(
                f"step: row {row} goes from slot {src} to {dst}, "
                f"expected one for its keys and values"
            )
