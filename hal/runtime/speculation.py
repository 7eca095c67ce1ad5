"""What a commit says: which token of every verified row is the last that stays."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from hal.errors import ProviderError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hal.runtime.binder import Layer
    from hal.runtime.pool import Pool
    from hal.runtime.staging import Ring
    from hal.runtime.step import Step


def last_tokens(
    step: Step, accepted: Sequence[int] | Tensor, tips: Sequence[int] | Tensor | None, ring: Ring
) -> Tensor:
    """The row-relative index of each row's last accepted token, i32 `[B]`, -1 for none."""
    tree = step.parents is not None
    if tree and tips is None:
        raise ValueError("commit: a tree needs tips, the last accepted token of every row")
    if tips is not None and not tree:
        raise ValueError("commit: tips were given, but the verify step was of chains")
    given = accepted if tips is None else tips
    _check_counts(step, accepted)
    if isinstance(given, Tensor):
        _check_tensor(given, step)
        last = given if tree else given - 1
        gap = step.rows - last.shape[0]
        return pad(last, (0, gap), value=-1) if gap else last
    if tips is not None:
        _check_tips(step, accepted, given)
    shift = 0 if tree else 1  # from plain integers: a numpy.uint8 of 0 less 1 is 255
    pads = [-1] * (step.rows - len(given))
    return ring.send(array("i", [*(index(count) - shift for count in given), *pads]))


def targets(step: Step, last: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Where a commit leaves states, and after which token: the track points, then the rows' dst.

    The points go first, since they start from the states that the rows' own commit moves on.
    """
    found = [(slots, _reached(step, table, last)) for slots, table in step.points]
    return [*found, (step.dst, last)]


@dataclass(frozen=True, slots=True, eq=False)
class Stays:
    """The rows of forks and fresh requests that keep no token: slots i64 `[B]`, fresh bool `[B]`.

    Which rows those are is known on the device alone. The others copy slot 0 onto itself.
    """

    sources: Tensor
    targets: Tensor
    fresh: Tensor

    def copy(self, state: Tensor) -> None:
        """Leave in each of the rows' dst what its src holds, zeros where it has none."""
        kept = state.index_select(0, self.sources)
        kept.masked_fill_(self.fresh.view(-1, *[1] * (state.ndim - 1)), 0)
        state.index_copy_(0, self.targets, kept)


def host_counts(
    accepted: Sequence[int] | Tensor, tips: Sequence[int] | Tensor | None
) -> Sequence[int] | None:
    """The counts where they decide; None where the device does, whatever the host was told."""
    return None if isinstance(accepted, Tensor) or isinstance(tips, Tensor) else accepted


def stays(step: Step, counts: Sequence[int] | None, last: Tensor) -> Stays | None:
    """What a commit copies; None where the host knows that no row can be of the kind."""
    if not step.forks or not (counts is None or 0 in counts):
        return None
    bounds = step.query_start_loc
    moves = (last < 0) & (step.dst >= 0) & (bounds[1:] > bounds[:-1])
    sources, targets = (torch.where(moves, ids, 0) for ids in (step.src, step.dst))
    return Stays(sources.clamp(min=0).long(), targets.long(), moves & (step.src < 0))


def move(
    layers: Mapping[int, Layer], pool: Pool, step: Step, last: Tensor, still: Stays | None
) -> None:
    """Commit in every layer; a failure names the layer, and those before it have moved."""
    found = targets(step, last)
    for layer_id, layer in layers.items():
        try:
            for dst, token in found:
                layer.commit(step, token, dst)
            if still is not None:
                for state in pool.tensors(layer_id).values():
                    still.copy(state)
        except RuntimeError as error:
            raise ProviderError(f"commit failed in layer {layer_id}: {error}") from error


def _reached(step: Step, table: Tensor, last: Tensor) -> Tensor:
    """The last token of each row's point on the path to `last`, -1 where the path ends before."""
    if not table.shape[0]:
        return last
    tips = step.query_start_loc[:-1] + last.clamp(min=0)
    found = table.index_select(0, tips.clamp_(max=table.shape[0] - 1))
    return torch.where(last < 0, last, found)


def _check_tensor(given: Tensor, step: Step) -> None:
    """A count for each live row, or for each row of a captured step."""
    sizes = {len(step.lengths), step.rows}
    if given.dtype != torch.int32 or given.ndim != 1 or given.shape[0] not in sizes:
        expected = " or ".join(f"[{size}]" for size in sorted(sizes))
        raise ValueError(
            f"commit: got {list(given.shape)} {given.dtype}, expected {expected} torch.int32"
        )


def _check_counts(step: Step, accepted: Sequence[int] | Tensor) -> None:
    if isinstance(accepted, Tensor):
        _check_tensor(accepted, step)
        return
    rows = len(step.lengths)
    if len(accepted) != rows:
        raise ValueError(f"commit: {len(accepted)} counts, the verify step had {rows} rows")
    for row, (count, length) in enumerate(zip(accepted, step.lengths, strict=True)):
        if not 0 <= index(count) <= length:
            raise ValueError(f"commit: {count} accepted in row {row}, width is {length}")


def _check_tips(step: Step, accepted: Sequence[int] | Tensor, tips: Sequence[int]) -> None:
    """A tip is a token of its row, and the path to it is as long as the host's count says."""
    rows = len(step.lengths)
    if len(tips) != rows:
        raise ValueError(f"commit: {len(tips)} tips, the verify step had {rows} rows")
    for row, (tip, length) in enumerate(zip(tips, step.lengths, strict=True)):
        if not -1 <= index(tip) < length:
            raise ValueError(f"commit: tip {tip} in row {row}, which has {length} tokens")
        if not isinstance(accepted, Tensor) and accepted[row] != _depth(step, row, tip):
            raise ValueError(
                f"commit: {accepted[row]} accepted in row {row}, but the path to its tip {tip} "
                f"has {_depth(step, row, tip)} tokens"
            )


def _depth(step: Step, row: int, tip: int) -> int:
    """How many tokens the path to a tip has, that of -1 none."""
    depth, links = 0, () if step.links is None else step.links[row]
    while tip >= 0:
        depth, tip = depth + 1, links[tip]
    return depth
