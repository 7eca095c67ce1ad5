"""The backend: a selection bound to providers, with its pool and the step that is running."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch

from hal.binding import build
from hal.errors import StepOrderError
from hal.runtime.batch import Batch, Limits, Mode, check
from hal.runtime.binder import Binder, Layer
from hal.runtime.pool import Pool
from hal.runtime.seam import Current
from hal.runtime.speculation import last_tokens
from hal.runtime.step import make_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from hal.device import Device
    from hal.interfaces import Provider
    from hal.runtime.params import LayerParams
    from hal.runtime.step import Step
    from hal.selection import Selection

SERVED: Final = frozenset({Mode.DECODE, Mode.EXTEND, Mode.MIXED, Mode.IDLE})


class Backend:
    """One rank's linear layers on one device.

    `slots` allocatable slots (slot 0 comes on top), steps of at most `max_batch` rows and
    `max_tokens` packed tokens. Call `begin(batch)` once a step, then every bound layer.
    """

    def __init__(
        self,
        selection: Selection,
        slots: int,
        max_batch: int,
        max_tokens: int,
        *,
        device_index: int | None = None,
    ) -> None:
        if max_batch < 1 or max_tokens < 1:
            raise ValueError(
                f"backend: max_batch {max_batch}, max_tokens {max_tokens}: expected at least 1"
            )
        place = selection.device
        if device_index is not None:
            place = replace(place, index=device_index)
        self.selection = selection
        self.device = torch.device(
            place.type if place.index is None else f"{place.type}:{place.index}"
        )
        self.pool = Pool(selection.states, slots, self.device)
        self.limits = _limits(selection, slots, max_batch, max_tokens)
        self._providers = _build_providers(selection, place)
        self._current = Current()
        self._binder = Binder(selection, self._providers, self.pool, self._current, max_batch)
        self._layers: dict[int, Layer] = {}
        self._uncommitted: Step | None = None
        self._sidecar = self._binder.sidecar()

    def begin(self, batch: Batch) -> None:
        """Check the batch and make the step's metadata; ValueError leaves no step to run.

        After a VERIFY step comes a commit, and no other step before it.
        """
        if self._uncommitted is not None:
            raise StepOrderError("begin: step after an uncommitted verify")
        self._current.step = None
        check(batch, self.limits)
        step = make_step(batch, self.device)
        if self._sidecar is not None:
            self._sidecar.begin(step.src, step.dst, step.start, step.query_start_loc, step.max_len)
        self._current.step = step
        if batch.mode is Mode.VERIFY:
            self._uncommitted = step

    def commit(
        self, accepted: Sequence[int] | Tensor, tips: Sequence[int] | Tensor | None = None
    ) -> None:
        """Move every row on by its accepted tokens, 0 up to all of them, in all layers.

        The state in a row's `dst` is then that of as many decodes along the path. A tree names each
        path by its tip, the row-relative index of the last accepted token. Counts that are host
        integers are checked; an i32 tensor is taken as it is, without a sync.
        """
        step = self._uncommitted
        if step is None:
            raise StepOrderError("commit without a verify")
        last = last_tokens(step, accepted, tips, self.device)
        for layer in self._layers.values():
            layer.commit(step, last)
        self._uncommitted = self._current.step = None

    def end(self) -> None:
        """End the step: no layer may run before the next `begin`. A commit is still owed."""
        self._current.step = None

    def layer(self, layer_id: int, params: LayerParams) -> Layer:
        """Bind a layer's weights, checked against the model's dims; the provider lays them out."""
        self._layers[layer_id] = bound = self._binder.layer(layer_id, params)
        return bound

    def warmup(self) -> None:
        """Let the providers compile what the bound layers can launch."""
        for provider in self._providers.values():
            provider.warmup()


def _build_providers(selection: Selection, place: Device) -> dict[str, Provider]:
    candidates = {choice.provider: choice.candidate for choice in selection.choices.values()}
    return {
        name: build(candidate, place, selection.layouts) for name, candidate in candidates.items()
    }


def _limits(selection: Selection, slots: int, max_batch: int, max_tokens: int) -> Limits:
    speculative = selection.options.speculative
    if speculative is None:
        return Limits(slots, max_batch, max_tokens, SERVED, _track(selection))
    return Limits(
        slots,
        max_batch,
        max_tokens,
        SERVED | {Mode.VERIFY, Mode.DRAFT_EXTEND},
        _track(selection),
        speculative.width,
        speculative.tree,
    )


def _track(selection: Selection) -> int | None:
    """The coarsest granularity among the chosen operations, None without prefix_cache."""
    if selection.options.prefix_cache is False:
        return None
    offers = (c.candidate.manifest.offers[op].track for op, c in selection.choices.items())
    return max((min(grids) for grids in offers if grids), default=None)
