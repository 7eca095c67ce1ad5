"""Full and linear attention as one backend, each layer's part found by its id."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Final, overload

import torch

from hal.errors import CompositionError, StepOrderError
from hal.model.spec import ATTENTION_KINDS
from hal.runtime.batch import Mode
from hal.runtime.inputs import AttentionInputs
from hal.runtime.phases import DECODES, EXTENDS, Phases, not_by_phase

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from hal.runtime.backend import Backend
    from hal.runtime.batch import Batch, Limits
    from hal.runtime.binder import Layer
    from hal.runtime.full_attention import FullAttention, SpeculativeAttention
    from hal.runtime.graphs import Captured
    from hal.runtime.inputs import (
        CcaInputs,
        DeltaInputs,
        LinearInputs,
        ScanInputs,
        ShortConvInputs,
    )
    from hal.runtime.params import LayerParams
    from hal.runtime.pool import Pool
    from hal.selection import Selection

    Output = Tensor | tuple[Tensor, Tensor]


class HybridBackend:
    """The engine's full attention and `hal`'s linear layers, begun and committed as one.

    A step begins in the linear part first, which checks the batch whole; where the full part then
    fails, the linear step is forgotten, so that no layer of either can run. A commit goes the same
    way: the counts are checked before the full part moves.
    """

    def __init__(self, full: FullAttention, linear: Backend) -> None:
        self.full = full
        self.linear = linear
        self._committer = _committer(full, linear)
        self._attends: Final = frozenset(
            layer.index
            for layer in linear.selection.model.layers
            if ATTENTION_KINDS.intersection(layer.kinds)
        )
        self._bound: dict[int, Layer] = {}

    @property
    def pool(self) -> Pool:
        """The linear part's states; the full part keeps its own memory."""
        return self.linear.pool

    @property
    def selection(self) -> Selection:
        """What the linear part was built from."""
        return self.linear.selection

    @property
    def limits(self) -> Limits:
        """What a batch may be, for both parts."""
        return self.linear.limits

    @property
    def device(self) -> torch.device:
        """Where the linear part runs."""
        return self.linear.device

    @property
    def mode(self) -> Mode | None:
        """The running step's mode; None where no layer may be called."""
        return self.linear.mode

    def layer(self, layer_id: int, params: LayerParams) -> Layer:
        """Bind a linear layer's weights; `forward` finds the layer by its id from then on."""
        self._bound[layer_id] = bound = self.linear.layer(layer_id, params)
        return bound

    def phases(self, layer_id: int) -> Phases:
        """Whether the linear layer of this id may be called by phase, or has one call for all."""
        return self._layer(layer_id).phases

    def begin(self, batch: Batch) -> None:
        """Begin the step in both parts, or in none."""
        self.linear.begin(batch)
        try:
            self.full.begin(batch)
        except BaseException:
            self.linear.abandon()
            raise

    @overload
    def forward(
        self, layer_id: int, inputs: AttentionInputs | DeltaInputs | ScanInputs | ShortConvInputs
    ) -> Tensor: ...

    @overload
    def forward(self, layer_id: int, inputs: CcaInputs) -> tuple[Tensor, Tensor]: ...

    def forward(self, layer_id: int, inputs: AttentionInputs | LinearInputs) -> Output:
        """Run one part of a layer in any mode; the kind of inputs says which, where it has both.

        An IDLE step gives the layer's empty output and does not call the full part.
        """
        mode = self._mode()
        if isinstance(inputs, AttentionInputs):
            return self._attend(layer_id, inputs, mode)
        return inputs.run(self._layer(layer_id))

    def forward_decode(self, layer_id: int, inputs: AttentionInputs | LinearInputs) -> Output:
        """`forward` of a DECODE step, for layers that may be called by phase."""
        return self._by_phase("forward_decode", DECODES, layer_id, inputs)

    def forward_extend(self, layer_id: int, inputs: AttentionInputs | LinearInputs) -> Output:
        """`forward` of any other step, for layers that may be called by phase."""
        return self._by_phase("forward_extend", EXTENDS, layer_id, inputs)

    def commit(
        self, accepted: Sequence[int] | Tensor, tips: Sequence[int] | Tensor | None = None
    ) -> None:
        """Move both parts on by the accepted tokens of the verify step."""
        if self._committer is None:
            raise StepOrderError("verify and commit need a selection with speculative")
        self.linear.commit(accepted, tips)
        self._committer.commit(_plain(accepted), None if tips is None else _plain(tips))

    def capture(
        self, mode: Mode, rows: int, width: int = 1, *, record: bool = True
    ) -> AbstractContextManager[Captured]:
        """Record the block over both parts; `Backend.capture` says what it may hold.

        The call itself makes both parts' metadata, the full part's first, so that an engine's own
        graph that is recorded inside the block holds none of it.
        """
        self.linear.check_capture(mode, rows, width)
        self.linear.end()  # the full part's metadata is of the capture from here on
        self.full.capture(mode, index(rows), index(width))
        return self.linear.capture(mode, rows, width, record=record)

    def stage(self, batch: Batch) -> Captured:
        """Write the batch to the captured metadata of both parts, or of none that can be run."""
        captured = self.linear.stage(batch)
        try:
            self.full.replay(batch)
        except BaseException:
            self.linear.abandon()
            raise
        return captured

    def replay(self, batch: Batch) -> Captured:
        """Stage the batch and run the recorded block on it; a verify step still owes its commit."""
        captured = self.stage(batch)
        self.linear.launch(captured)
        return captured

    def launch(self, captured: Captured) -> None:
        """Run the block of the step staged last; one that fails owes no commit and no copy."""
        self.linear.launch(captured)

    def abandon(self) -> None:
        """Forget the step and the commit that it may owe; the full part forgets at `begin`."""
        self.linear.abandon()

    def end(self) -> None:
        """End the step: no layer may run before the next `begin`. A commit is still owed."""
        self.linear.end()

    def warmup(self) -> None:
        """Let the linear part compile what it can launch; the full part warms up by itself."""
        self.linear.warmup()

    def _mode(self) -> Mode:
        mode = self.linear.mode
        if mode is None:
            raise StepOrderError("a layer was called before begin(batch), or after one that failed")
        return mode

    def _layer(self, layer_id: int) -> Layer:
        if layer_id not in self._bound:
            bound = ", ".join(map(str, sorted(self._bound))) or "none"
            raise ValueError(f"layer {layer_id} has no linear part that was bound; bound: {bound}")
        return self._bound[layer_id]

    def _attend(self, layer_id: int, inputs: AttentionInputs, mode: Mode) -> Tensor:
        if layer_id not in self._attends:
            layers = ", ".join(map(str, sorted(self._attends))) or "none"
            raise ValueError(f"layer {layer_id} has no full attention; layers that have: {layers}")
        if mode is Mode.IDLE:
            return inputs.q.new_zeros(*inputs.q.shape[:2], inputs.v.shape[2])
        return self.full.forward(inputs.q, inputs.k, inputs.v, layer_id)

    def _by_phase(
        self,
        called: str,
        modes: frozenset[Mode],
        layer_id: int,
        inputs: AttentionInputs | LinearInputs,
    ) -> Output:
        linear = not isinstance(inputs, AttentionInputs)
        if linear and self.phases(layer_id) is Phases.UNIFIED:
            raise not_by_phase(called, "forward(layer_id, inputs)")
        mode = self._mode()
        if mode not in modes:
            raise StepOrderError(f"{called}: layer {layer_id} was called in a {mode} step")
        return self.forward(layer_id, inputs)


def _plain(counts: Sequence[int] | Tensor) -> Sequence[int] | Tensor:
    """Counts of the host as plain integers, as the linear part takes them; a tensor as it is."""
    return counts if isinstance(counts, torch.Tensor) else [*map(index, counts)]


def _committer(full: FullAttention, linear: Backend) -> SpeculativeAttention | None:
    """The full part's commit where speculation was selected; a part without one is refused."""
    speculative = linear.selection.options.speculative
    if speculative is None:
        return None
    committer = full.speculation
    if committer is None:
        raise CompositionError(
            f"hybrid: speculation of width {speculative.width} was selected, and the full part "
            f"{full.label} has no commit; compose one that has, or select without speculative"
        )
    return committer
