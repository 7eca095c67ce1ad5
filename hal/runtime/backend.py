"""The backend: a selection bound to providers, with its pool and the step that is running."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from hal.binding import build
from hal.runtime.batch import Batch, Limits, Mode, check
from hal.runtime.binder import Binder, Layer
from hal.runtime.layers import Current
from hal.runtime.pool import Pool
from hal.runtime.step import make_step

if TYPE_CHECKING:
    from hal.interfaces import Provider
    from hal.runtime.params import LayerParams
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
        index = selection.device.index if device_index is None else device_index
        name = selection.device.type
        self.selection = selection
        self.device = torch.device(name if index is None else f"{name}:{index}")
        self.pool = Pool(selection.states, slots, self.device)
        self.limits = Limits(slots, max_batch, max_tokens, SERVED, _track(selection))
        self._providers = _build_providers(selection)
        self._current = Current()
        self._binder = Binder(selection, self._providers, self.pool, self._current)
        self._sidecar = self._binder.sidecar()

    def begin(self, batch: Batch) -> None:
        """Check the batch and make the step's metadata; ValueError leaves no step to run."""
        self._current.step = None
        check(batch, self.limits)
        step = make_step(batch, self.device)
        if self._sidecar is not None:
            self._sidecar.begin(step.src, step.dst, step.start, step.query_start_loc, step.max_len)
        self._current.step = step

    def layer(self, layer_id: int, params: LayerParams) -> Layer:
        """Bind a layer's weights, checked against the model's dims; the provider lays them out."""
        return self._binder.layer(layer_id, params)

    def warmup(self) -> None:
        """Let the providers compile what the bound layers can launch."""
        for provider in self._providers.values():
            provider.warmup()


def _build_providers(selection: Selection) -> dict[str, Provider]:
    candidates = {choice.provider: choice.candidate for choice in selection.choices.values()}
    return {
        name: build(candidate, selection.device, selection.layouts)
        for name, candidate in candidates.items()
    }


def _track(selection: Selection) -> int | None:
    """The coarsest granularity among the chosen operations, None without prefix_cache."""
    if selection.options.prefix_cache is False:
        return None
    offers = (c.candidate.manifest.offers[op].track for op, c in selection.choices.items())
    return max((min(grids) for grids in offers if grids), default=None)
