"""The runner: one model, one backend, one step at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hal.errors import HalError
from hal.integrations.transformers.attention import KvStore, SlotAttention, spans
from hal.integrations.transformers.binding import bind_attention, bind_mixers
from hal.runtime.batch import NO_SLOT, Mode

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from transformers import PreTrainedModel

    from hal.runtime.backend import Backend
    from hal.runtime.batch import Batch
    from hal.runtime.pool import Slot


class Runner:
    """Runs steps of a bound model and keeps what a slot holds: linear states, keys and values.

    Binding changes this instance of the model alone, and for good: it runs in `step` from now on.
    """

    def __init__(self, model: PreTrainedModel, backend: Backend, max_len: int) -> None:
        self.model = model.to(backend.device).eval()
        self.backend = backend
        self.max_len = max_len
        self.kv = KvStore(max_len)
        self._attention = SlotAttention(self.kv)
        self._witness = bind_mixers(model, backend)
        bind_attention(model)
        spec = backend.selection.model
        self._attention_layers = sum(layer.attention is not None for layer in spec.layers)

    @property
    def free_slots(self) -> int:
        """How many slots `alloc` can still hand out."""
        return self.backend.pool.free_slots

    def alloc(self, count: int = 1) -> list[Slot]:
        """Hand out slots."""
        return self.backend.pool.alloc(count)

    def free(self, slots: Iterable[Slot]) -> None:
        """Take slots back, and with them their keys and values."""
        given = list(slots)
        self.backend.pool.free(given)
        self.kv.release(given)

    def step(self, batch: Batch, tokens: Sequence[int], rows: Sequence[int]) -> Tensor:
        """Feed the packed tokens; float32 logits `[len(rows), vocab]` of the rows' last tokens.

        Tokens behind the batch's own, and those of a DECODE step's pad rows, are padding. Raises
        `HalError` unless every linear layer ran through `hal`, and every attention layer once over
        the slots.
        """
        _check_slots(batch)
        if len(tokens) < batch.tokens:
            raise ValueError(f"step: {len(tokens)} tokens, the batch has {batch.tokens}")
        self.backend.begin(batch)
        self._witness.begin()
        try:
            with torch.inference_mode(), self._attention.running(batch):
                logits = self._forward(batch, tokens, rows)
        finally:
            self.backend.end()
        self._witness.check()
        if self._attention.calls != self._attention_layers:
            raise HalError(
                f"attention ran {self._attention.calls} times over the slots, "
                f"expected {self._attention_layers}, once for each layer"
            )
        return logits

    def _forward(self, batch: Batch, tokens: Sequence[int], rows: Sequence[int]) -> Tensor:
        positions, ends = [0] * len(tokens), {}
        for row, span in spans(batch):
            start, ends[row] = batch.start[row], span.stop - 1
            positions[span] = range(start, start + batch.lengths[row])
        output = self.model(
            input_ids=self._ids(tokens)[None],
            position_ids=self._ids(positions)[None],
            use_cache=False,
            logits_to_keep=self._ids([ends[row] for row in rows]),
        )
        logits: Tensor = output.logits
        return logits[0].float()

    def _ids(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.backend.device)


def _check_slots(batch: Batch) -> None:
    """Keys and values live in the row's own slot alone: nothing is forked, nothing is scored."""
    for row, (length, src, dst) in enumerate(zip(batch.lengths, batch.src, batch.dst, strict=True)):
        pad = batch.mode is Mode.DECODE and src < 0 and dst < 0
        if length and not pad and (dst < 0 or src not in (NO_SLOT, dst)):
            raise ValueError(f"step: row {row} goes from slot {src} to {dst}, expected one slot")
