"""The device's view of a step, made in one pass and one copy from the host's batch."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import chain
from operator import index
from typing import TYPE_CHECKING, ParamSpec, SupportsIndex, TypeVar

import torch

from hal.runtime.batch import Batch, Mode
from hal.runtime.packing import counted, frame_of, pack

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from hal.runtime.batch import Limits
    from hal.runtime.packing import Fields, Frame
    from hal.runtime.seam import Draft
    from hal.runtime.staging import Ring
    from hal.runtime.tape import Tape

Given = ParamSpec("Given")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What operations take: i32 query_start_loc `[B+1]`, src, dst and start `[B]`, track `[M, 3]`.

    All are views of one packed buffer. `max_len` is the longest row, known on the host. In a
    captured step they are as long as the capture, and each replay writes them anew.
    """

    mode: Mode
    rows: int
    tokens: int
    max_len: int
    query_start_loc: Tensor
    src: Tensor
    dst: Tensor
    start: Tensor
    track: Tensor | None
    pads: Tensor | None
    """bool `[T]`, the tokens of no row where the host cannot cut them off; None without any."""
    lengths: tuple[int, ...] = ()
    """Of the live rows alone."""
    parents: Tensor | None = None
    """i32 `[T]` in a VERIFY step of trees, row-relative; None for chains."""
    copies: tuple[Tensor, Tensor] | None = None
    """In a DECODE step the slots to copy from and to, once the tracked rows have moved on."""
    points: tuple[tuple[Tensor, Tensor], ...] = ()
    """In a VERIFY step what `reached` needs: slots i32 `[B]` and the token of each tip `[T]`."""
    tape: Tape | None = None
    """Records the providers' calls while a step is captured where no graph does."""
    filled: list[Draft] = field(default_factory=list)
    """The drafts whose scratch is of this step."""
    links: tuple[tuple[int, ...], ...] | None = None
    """The parents of a step of trees on the host, row by row."""
    forks: bool = True
    """Whether a VERIFY row may have a dst that is not its src, so that a commit of 0 has work."""

    def opaque(self, call: Callable[Given, Result]) -> Callable[Given, Result]:
        """A provider's operation as this step has to call it."""
        return call if self.tape is None else self.tape.opaque(call)

    def track_decode(self, state: Tensor) -> None:
        """Keep the tracked rows' new states; no other row writes or reads the slots."""
        if self.copies is not None:
            sources, targets = self.copies
            state[targets] = state[sources]

    def clear_pads(self, out: Tensor) -> Tensor:
        """Zero what belongs to no row, in place: 0 * NaN in a gate would have left NaN there."""
        if self.pads is not None:
            out.masked_fill_(self.pads.view(-1, *[1] * (out.ndim - 1)), 0)
        if out.shape[0] > self.tokens:
            out[self.tokens :].zero_()
        return out


def make_step(batch: Batch, ring: Ring) -> Step:
    """Pack a checked batch; rows without tokens get no slots, so that nothing can address them."""
    frame = frame_of(batch)
    fields = frame.split(ring.send(pack(batch, frame)))
    held = batch.held
    src, dst = (fields.src, fields.dst) if held is None else (held.src, held.dst)
    decode = batch.mode is Mode.DECODE
    return Step(
        batch.mode,
        frame.rows,
        frame.tokens,
        batch.max_len,
        fields.query_start_loc,
        src,
        dst,
        fields.start,
        None if decode else fields.track,
        (src < 0) & (dst < 0) if _may_have_pads(batch) else None,
        tuple(batch.lengths),
        fields.parents,
        decode_copies(dst, fields.track) if decode else None,
        fields.points,
        links=links_of(batch),
        forks=may_fork(batch),
    )


def links_of(batch: Batch) -> tuple[tuple[int, ...], ...] | None:
    """The parents of a step of trees as commits check tips against them."""
    return None if batch.parents is None else tuple(map(tuple, batch.parents))


def may_fork(batch: Batch) -> bool:
    """Whether a row may leave its state in another slot than it reads; unknown means it may."""
    return batch.held is not None or batch.src != batch.dst


def decode_copies(dst: Tensor, track: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """The slots that a DECODE step copies from and to, by its rows' `dst` and its points.

    A row whose dst is none, which only a device can know, has no state to keep: its point's slot is
    copied onto itself. As an index -1 would be the pool's last slot, another request's.
    """
    if track is None:
        return None
    rows, _, slots = track.long().unbind(1)
    sources = dst.index_select(0, rows).long()
    return torch.where(sources < 0, slots, sources), slots


def track_points(batch: Batch, ring: Ring) -> Tensor | None:
    """A batch's live points (row, count, slot) on the device, `[M, 3]`; None without any."""
    points = array("i", chain.from_iterable(counted(batch)))
    return ring.send(points).view(-1, 3) if points else None


def check_held(batch: Batch, limits: Limits, device: torch.device) -> None:
    """Refuse slots on the device of another dtype, size or place, or bounded beyond the pool."""
    held = batch.held
    if held is None:
        return
    for name, ids in (("src", held.src), ("dst", held.dst)):
        if not isinstance(ids, torch.Tensor):
            raise TypeError(
                f"begin: {name} held is a {type(ids).__name__}, expected a tensor; "
                f"slots on the host go in src and dst"
            )
        if ids.dtype != torch.int32:
            raise TypeError(f"begin: {name} held is {ids.dtype}, expected torch.int32")
        if tuple(ids.shape) != (batch.rows,):
            raise ValueError(f"begin: {batch.rows} lengths, {name} held is {list(ids.shape)}")
        if ids.device.type != device.type:
            raise ValueError(f"begin: {name} held is on {ids.device}, the backend on {device}")
    if not isinstance(held.bound, SupportsIndex):
        raise TypeError(f"begin: slots held are bounded by {held.bound!r}, expected an integer")
    if not 0 <= index(held.bound) <= limits.slots:
        raise ValueError(
            f"begin: slots held are bounded by {held.bound}, pool has slots 1..{limits.slots}"
        )


def captured_step(
    mode: Mode, frame: Frame, fields: Fields, tokens: Tensor, tape: Tape | None
) -> Step:
    """A step of nothing but pads on a capture's own buffer; made while recording.

    `tokens` counts them from 0; which are pads is found from the buffer in every replay.
    """
    if mode is Mode.DECODE:
        pads = (fields.src < 0) & (fields.dst < 0)
    else:
        pads = tokens >= fields.query_start_loc[-1]
    return Step(
        mode,
        frame.rows,
        frame.tokens,
        frame.tokens // frame.rows,
        fields.query_start_loc,
        fields.src,
        fields.dst,
        fields.start,
        None,
        pads,
        (0,) * frame.rows,
        fields.parents,
        None,
        fields.points,
        tape,
    )


def _may_have_pads(batch: Batch) -> bool:
    if batch.mode is not Mode.DECODE or not batch.rows:
        return False
    if batch.held is not None:
        return True
    return min(batch.src) < 0 and min(map(max, batch.src, batch.dst)) < 0
