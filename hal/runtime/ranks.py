"""How the ranks of a tensor-parallel group talk, for the one norm whose groups they may cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import torch.distributed as dist

from hal.sharding import norm_span

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from hal.model.spec import Dims


class Ranks(Protocol):
    """The ranks that share a model, as far as `hal` needs them."""

    def mean_over(self, span: int) -> Callable[[Tensor], Tensor]:
        """What gives the mean of a tensor over every `span` neighbours, on each of them.

        Asked for once a layer, at bind, on all ranks in the same order.
        """
        ...


class ProcessRanks:
    """Ranks that are processes of a `torch.distributed` group; None is the default group."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self._world: Final = dist.get_process_group_ranks(group or dist.group.WORLD)
        self._blocks: dict[int, ProcessGroup] = {}

    def mean_over(self, span: int) -> Callable[[Tensor], Tensor]:
        """The mean by one all-reduce in float32; a tensor without elements is left alone."""
        if len(self._world) % span:
            raise ValueError(f"ranks: {len(self._world)} do not fall into blocks of {span}")
        if span not in self._blocks:
            self._blocks[span] = self._block(span)
        group = self._blocks[span]

        def mean(tensor: Tensor) -> Tensor:
            total = tensor.clone()
            if total.numel():
                dist.all_reduce(total, group=group)
            return total / span

        return mean

    def _block(self, span: int) -> ProcessGroup:
        """This rank's neighbours; every rank takes part in making every block."""
        starts = range(0, len(self._world), span)
        blocks = [self._world[start : start + span] for start in starts]
        made: list[ProcessGroup] = [dist.new_group(block) for block in blocks]
        return next(g for g, block in zip(made, blocks, strict=True) if dist.get_rank() in block)


def mean_of_norm(
    layer_id: int, dims: Dims, size: int, ranks: Ranks | None
) -> Callable[[Tensor], Tensor] | None:
    """The mean for a layer of whole `dims`, None where every group of its norm is on one rank."""
    span = norm_span(dims, size)
    if span == 1:
        return None
    if ranks is None:
        raise ValueError(
            f"layer {layer_id}: on {size} ranks a group of the gated norm spans {span}, and needs "
            f"the mean over them: build the backend with ranks=ProcessRanks(group)"
        )
    return ranks.mean_over(span)
