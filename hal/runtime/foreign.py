"""Bound layers over state tensors that an engine owns: it allocates, hands out and copies slots.

A `Backend` owns its pool. An engine with a pool of its own gives each layer's tensors instead, as
views into its pages, and names slots on the device; nothing of them is read back.
"""

from __future__ import annotations

from dataclasses import replace
from operator import index
from typing import TYPE_CHECKING, cast

import torch

from hal.runtime.batch import NO_SLOT, Mode
from hal.runtime.binder import Binder, Layer
from hal.runtime.building import providers_of
from hal.runtime.seam import Current
from hal.runtime.step import Step

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from hal.interfaces import ConvState
    from hal.runtime.params import LayerParams
    from hal.runtime.pool import Pool
    from hal.selection import Selection
    from hal.states import StateSpec


class ForeignPool:
    """The state tensors `[slots, …]` of an engine's pool, each held against the plan."""

    def __init__(self, selection: Selection, device: torch.device) -> None:
        self.device = device
        self._specs = {(spec.layer, spec.name): spec for spec in selection.states}
        self._tensors: dict[int, dict[str, Tensor]] = {}

    @property
    def layers(self) -> frozenset[int]:
        """The layers whose tensors were taken."""
        return frozenset(self._tensors)

    def take(self, layer: int, tensors: Mapping[str, Tensor]) -> None:
        """Take a layer's tensors by state name; strides are free, shape and dtype are the plan's.

        A tensor of another plan is refused, since equal bytes may be laid out otherwise.
        """
        planned = {name for of, name in self._specs if of == layer}
        if planned != set(tensors):
            raise ValueError(f"layer {layer}: got states {sorted(tensors)}, expected {planned}")
        for name, tensor in tensors.items():
            self._check(self.spec(layer, name), tensor)
        slots = {name: tensor.shape[0] for name, tensor in tensors.items()}
        if len(set(slots.values())) > 1:
            raise ValueError(f"layer {layer}: got slots {slots}, expected as many in every state")
        self._tensors[layer] = {name: tensors[name] for name in tensors}

    def _check(self, spec: StateSpec, tensor: Tensor) -> None:
        what, dtype = f"layer {spec.layer}: state {spec.name}", getattr(torch, spec.dtype)
        if tuple(tensor.shape[1:]) != spec.shape:
            raise ValueError(f"{what} is {list(tensor.shape)}, expected [slots, *{spec.shape}]")
        if tensor.dtype != dtype:
            raise TypeError(f"{what} is {tensor.dtype}, expected {dtype}")
        if tensor.device.type != self.device.type:
            raise ValueError(f"{what} is on {tensor.device}, expected {self.device}")

    def tensors(self, layer: int) -> dict[str, Tensor]:
        """A layer's state tensors by name, slot axis first."""
        if layer not in self._tensors:
            raise ValueError(f"layer {layer}: the engine gave no state tensors")
        return self._tensors[layer]

    def spec(self, layer: int, name: str) -> StateSpec:
        """The plan's entry of one state."""
        return self._specs[layer, name]


class Attachment:
    """The linear layers of one rank, bound to providers over an engine's pool.

    Give every layer's tensors with `take`, then bind each with `layer`; `enter(step)` comes before
    the calls of a step. Layers whose slots have other numbers each enter a step of their own.
    """

    def __init__(
        self, selection: Selection, max_batch: int, *, device_index: int | None = None
    ) -> None:
        place = selection.device
        if device_index is not None:
            place = replace(place, index=device_index)
        self.selection = selection
        self.pool = ForeignPool(selection, torch.device(place.torch_name))
        self._max_batch = index(max_batch)
        self._providers = providers_of(selection, place)
        self._current = Current()
        self._sidecar: ConvState | None = None

    def take(self, layer: int, tensors: Mapping[str, Tensor]) -> None:
        """Take a layer's state tensors; whatever was bound before has to be bound again.

        A layer that was bound over other tensors runs in no step any more.
        """
        self.pool.take(layer, tensors)
        self._current.step = None
        self._current = Current()
        self._sidecar = None

    def layer(self, layer_id: int, params: LayerParams) -> Layer:
        """Bind a layer's weights, checked against the model's dims, over the tensors taken."""
        held = tuple(s for s in self.selection.states if s.layer in self.pool.layers)
        binder = Binder(
            replace(self.selection, states=held),
            self._providers,
            cast("Pool", self.pool),  # of a pool, a binder asks the tensors and the plan alone
            self._current,
            self._max_batch,
        )
        if self._sidecar is None:
            self._sidecar = binder.sidecar()
        return binder.layer(layer_id, params)

    def enter(self, step: Step) -> None:
        """Make this the step that layers run in; entering the running one again is free."""
        if self._current.step is step:
            return
        if self._sidecar is not None:
            self._sidecar.begin(step.src, step.dst, step.start, step.query_start_loc, step.max_len)
        self._current.step = step

    def warmup(self) -> None:
        """Let the providers compile what the bound layers can launch."""
        for provider in self._providers.values():
            provider.warmup()


def engine_step(
    slots: Tensor, seen: Tensor, query_start_loc: Tensor, *, tokens: int, max_len: int
) -> Step:
    """A step of rows that each keep one slot: integers `[B]`, and `[B+1]` that ends at `tokens`.

    `seen[i]` tokens of row i came before; a row that has seen none starts from zeros. A negative
    slot is none. Every row has to have tokens; when each has one, it is a DECODE step. Values stay
    on the device and are not checked.
    """
    rows = slots.shape[0]
    dst, start = slots.to(torch.int32), seen.to(torch.int32)
    return Step(
        mode=Mode.DECODE if max_len == 1 and tokens == rows else Mode.MIXED,
        rows=rows,
        tokens=tokens,
        max_len=max_len,
        query_start_loc=query_start_loc.to(torch.int32),
        src=dst.masked_fill(start <= 0, NO_SLOT),
        dst=dst,
        start=start,
        track=None,
        pads=None,
    )
