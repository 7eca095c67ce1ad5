"""The backend: a selection bound to providers, with its pool and the step that is running."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from hal.errors import ProviderError, StepOrderError
from hal.runtime.batch import Batch, Mode, check, check_mode
from hal.runtime.binder import Binder, Layer
from hal.runtime.building import largest_frame, limits_of, providers_of
from hal.runtime.graphs import Graphs
from hal.runtime.owed import Commit, Copies
from hal.runtime.pool import Pool
from hal.runtime.seam import Current
from hal.runtime.speculation import host_counts, last_tokens, move, stays
from hal.runtime.staging import Ring
from hal.runtime.step import check_held, make_step

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from hal.runtime.graphs import Captured
    from hal.runtime.params import LayerParams
    from hal.runtime.ranks import Ranks
    from hal.runtime.step import Step
    from hal.selection import Selection


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
        ranks: Ranks | None = None,
    ) -> None:
        self.limits = limits_of(selection, slots, max_batch, max_tokens)
        place = selection.device
        if device_index is not None:
            place = replace(place, index=device_index)
        self.selection = selection
        self.device = torch.device(place.torch_name)
        self.pool = Pool(selection.states, self.limits.slots, self.device, selection.options.tp)
        self._providers = providers_of(selection, place)
        self._current = Current()
        self._binder = Binder(
            selection, self._providers, self.pool, self._current, self.limits.max_batch, ranks
        )
        self._layers: dict[int, Layer] = {}
        self._bound = 0
        self._capturing: Captured | None = None
        self._staged: Captured | None = None
        self._sidecar = self._binder.sidecar()
        self._ring = Ring(self.device, largest_frame(self.limits).size)
        self._graphs = Graphs(self.device, self._ring, self.limits)
        self._owed, self._copies = Commit(), Copies(self._ring)
        self.pool.attach(self._owed)
        self.pool.attach(self._copies)

    def begin(self, batch: Batch) -> None:
        """Check the batch and make the step's metadata; ValueError leaves no step to run.

        After a VERIFY step comes a commit, and no other step before it. A mode that is unknown or
        not selected is refused before anything changes, the running step included.
        """
        self._check("begin", batch)
        self._store_tracked()
        self._open(make_step(batch, self._ring), batch)

    def capture(
        self, mode: Mode, rows: int, width: int = 1, *, record: bool = True
    ) -> AbstractContextManager[Captured]:
        """Record a `with` block: a DECODE or VERIFY step of up to `rows` rows of `width` tokens.

        The block runs on pads and moves no state; its packed inputs are `rows * width` tokens. With
        `record=False` the engine records it: the call, which writes to the device, comes before the
        engine's own capture, and the block in it. A commit in the block, with counts on the device,
        is part of every replay.
        """
        self.check_capture(mode, rows, width)
        return self._recording(self._graphs.prepare(mode, rows, width, record, self._bound))

    def check_capture(self, mode: Mode, rows: int, width: int = 1) -> None:
        """Refuse what `capture` would refuse, with nothing changed."""
        self._check_order("capture")
        if not self.selection.options.graphs:
            raise ValueError(
                "capture: the selection was made without graphs: hal.select(..., graphs=True)"
            )
        self._graphs.check(mode, rows, width)

    @contextmanager
    def _recording(self, captured: Captured) -> Iterator[Captured]:
        self._check_order("capture")
        self._capturing = captured
        try:
            with captured.graph.recording():
                self._open(captured.open())
                yield captured
        finally:
            self._capturing = self._current.step = None
            self._owed.close()
        self._graphs.keep(captured)

    def stage(self, batch: Batch) -> Captured:
        """Check the batch and write it to the smallest captured step with room; nothing runs yet.

        For an engine that prepares more before `launch`, which takes a staged step once. Another
        step, `end`, `abandon` and a layer that is bound take it back, with its track points.
        """
        self._check("replay", batch)
        captured = self._graphs.fit(batch, self._bound)
        self._store_tracked()
        live = captured.write(batch, self._ring)
        self._owed.close()
        if batch.mode is Mode.DECODE:
            self._copies.open(batch, live.dst, ran=not captured.recorded)
        elif not captured.committed:
            self._owed.open(live, batch)
        self._staged = captured
        return captured

    def replay(self, batch: Batch) -> Captured:
        """Stage the batch and run the recorded block on it; the results are the block's tensors.

        Where the engine runs its own graph, `end()` behind it stores the tracked decode rows, and
        `abandon()` behind one that failed forgets them and the commit.
        """
        captured = self.stage(batch)
        self.launch(captured)
        return captured

    def launch(self, captured: Captured) -> None:
        """Run the block of the step staged last; one that fails owes no commit and no copy."""
        self._check_recording("launch")
        if self._staged is None or captured is not self._staged:
            raise StepOrderError(
                "launch: the step is not the one staged last, or has been run; stage its batch"
            )
        self._staged = None
        try:
            captured.run()
        except BaseException as error:
            self.abandon()
            if not isinstance(error, RuntimeError):
                raise
            size = f"{captured.mode} step of {captured.rows} rows"
            raise ProviderError(f"replay: the captured {size} failed: {error}") from error
        if captured.recorded:
            self._copies.ran = True
            self._store_tracked()

    def commit(
        self, accepted: Sequence[int] | Tensor, tips: Sequence[int] | Tensor | None = None
    ) -> None:
        """Move every row on by its accepted tokens, 0 up to all of them, in all layers.

        The state in a row's `dst` is then that of as many decodes along the path, with 0 that of
        its `src`. A tree names each path by its tip, the row-relative index of the last accepted
        token. Host integers are checked; an i32 tensor is taken as it is, without a sync. A commit
        that is refused stays owed, one that would use a slot freed since among them; where the
        slots of all rows were freed, it may be left out. One that fails while it writes is owed no
        more: some layers have moved, so that `dst` and track slots hold no request's state.
        """
        step = self._owed.step
        if step is None:
            raise StepOrderError("commit without a verify")
        capturing = self._capturing
        given = accepted if tips is None else tips
        if capturing is not None and not isinstance(given, torch.Tensor):
            raise ValueError("capture: a commit in the block takes counts and tips on the device")
        last = last_tokens(step, accepted, tips, self._ring)
        counts = host_counts(accepted, tips)
        self._owed.check(counts)
        for layer in self._layers.values():
            layer.check_verified(step)
        self._current.step = None
        self._owed.close()
        move(self._layers, self.pool, step, last, stays(step, counts, last))
        if capturing is not None:
            capturing.committed = True

    def end(self) -> None:
        """End the step: no layer may run before the next `begin`. A commit is still owed."""
        self._check_recording("end")
        self._store_tracked()
        self._current.step = self._staged = None

    def abandon(self) -> None:
        """Forget the step and the commit that it may owe; what a verify left is never committed.

        No state moves back: what layers of another step have already stored stays.
        """
        self._check_recording("abandon")
        self._current.step = self._staged = None
        self._owed.close()
        self._copies.close()

    @property
    def mode(self) -> Mode | None:
        """The running step's mode; None where no layer may be called."""
        return None if self._current.step is None else self._current.step.mode

    def layer(self, layer_id: int, params: LayerParams) -> Layer:
        """Bind a layer's weights, checked against the model's dims; the provider lays them out."""
        self._layers[layer_id] = bound = self._binder.layer(layer_id, params)
        self._bound += 1
        self._staged = None
        return bound

    def warmup(self) -> None:
        """Let the providers compile what the bound layers can launch."""
        for provider in self._providers.values():
            provider.warmup()

    def _check(self, call: str, batch: Batch) -> None:
        check_mode(batch, self.limits)
        self._check_order(call)
        self._current.step = self._staged = None
        check(batch, self.limits)
        check_held(batch, self.limits, self.device)

    def _check_recording(self, call: str) -> None:
        if self._capturing is not None:
            raise StepOrderError(f"{call}: a step is being captured")

    def _check_order(self, call: str) -> None:
        self._check_recording(call)
        if self._owed.due:
            raise StepOrderError(f"{call}: step after an uncommitted verify")

    def _open(self, step: Step, batch: Batch | None = None) -> None:
        if self._sidecar is not None:
            self._sidecar.begin(step.src, step.dst, step.start, step.query_start_loc, step.max_len)
        self._current.step = step
        self._owed.close()
        if step.mode is Mode.VERIFY:
            self._owed.open(step, batch)

    def _store_tracked(self) -> None:
        """Copy the tracked rows of a replayed decode, once all of its layers have run."""
        pairs = self._copies.take()
        if pairs is None:
            return
        sources, slots = pairs
        for layer in self._layers:
            for state in self.pool.tensors(layer).values():
                state[slots] = state[sources]
