"""A step as the scheduler plans it, and what it does to the requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hal.runtime.batch import NO_SLOT, Batch, Mode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hal.runtime.batch import Track
    from hal.runtime.request import FinishReason, Request


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: the batch, its packed tokens, and for every row the request it belongs to.

    `samples` are the rows whose last token gets a successor: decode rows, and prefill rows that
    reach the end of their prompt. In a VERIFY step every token of every row gets one.
    """

    batch: Batch
    tokens: tuple[int, ...]
    requests: tuple[int, ...]
    samples: tuple[int, ...]

    @property
    def widths(self) -> tuple[int, ...]:
        """How many successors each of `samples` gets, as they follow each other."""
        if self.batch.mode is not Mode.VERIFY:
            return (1,) * len(self.samples)
        return tuple(self.batch.lengths[row] for row in self.samples)


@dataclass(frozen=True, slots=True)
class Event:
    """What a step did to a request: a new token, an end, or both at once."""

    request: int
    token: int | None
    reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Row:
    """The pending tokens that a request feeds in a step, and the drafts behind them."""

    request: Request
    length: int
    drafts: tuple[int, ...] = ()


def make_plan(rows: Sequence[Row], track: Sequence[Track]) -> Plan:
    """The step of these rows; a row that samples is one whose pending tokens are all in it."""
    requests = [row.request for row in rows]
    slots = [NO_SLOT if request.slot is None else request.slot for request in requests]
    src = [NO_SLOT if request.src is None else request.src for request in requests]
    lengths = [row.length + len(row.drafts) for row in rows]
    return Plan(
        Batch(_mode(rows), lengths, [request.fed for request in requests], src, slots, track),
        tuple(t for row in rows for t in (*row.request.next_tokens(row.length), *row.drafts)),
        tuple(request.id for request in requests),
        tuple(i for i, row in enumerate(rows) if row.length == row.request.pending),
    )


def _mode(rows: Sequence[Row]) -> Mode:
    """DECODE is for one-token continuations alone: the last token of a cut prompt is one too."""
    if any(row.drafts for row in rows):
        return Mode.VERIFY
    if all(row.request.fed and row.length == 1 for row in rows):
        return Mode.DECODE
    return Mode.MIXED if any(row.request.decoding for row in rows) else Mode.EXTEND
