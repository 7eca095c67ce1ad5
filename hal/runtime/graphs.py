"""Captured steps: metadata at fixed addresses, and a record of what ran on it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from operator import index
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from hal.errors import StepOrderError
from hal.runtime.batch import Batch, Mode
from hal.runtime.packing import Frame, frame_of, pack
from hal.runtime.step import captured_step, links_of, may_fork
from hal.runtime.tape import Tape

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

    from hal.runtime.batch import Limits
    from hal.runtime.staging import Ring
    from hal.runtime.step import Step

CAPTURABLE: Final = frozenset({Mode.DECODE, Mode.VERIFY})
"""Modes whose rows are all of one size, so that a few captures serve every batch."""


class Graph(Protocol):
    """What records a block of calls and runs it again."""

    @property
    def tape(self) -> Tape | None:
        """Where providers' calls are kept, if the device does not record them by itself."""
        ...

    def recording(self) -> AbstractContextManager[object]:
        """The block that is recorded."""
        ...

    def replay(self) -> None:
        """Run the recorded calls again."""
        ...


class CudaGraph:
    """A CUDA graph; all graphs of a backend share one memory pool."""

    tape = None

    def __init__(self, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool

    def recording(self) -> AbstractContextManager[object]:
        """The block that is recorded, on a stream of its own."""
        return torch.cuda.graph(self._graph, pool=self._pool)

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self._graph.replay()


class TapeGraph:
    """A tape of the calls, for devices without graphs."""

    def __init__(self) -> None:
        self.tape = Tape()

    def recording(self) -> AbstractContextManager[object]:
        """The block that is recorded."""
        return self.tape.recording()

    def replay(self) -> None:
        """Run the calls again, one by one."""
        self.tape.replay()


class Unrecorded:
    """Nothing: the engine records the block and runs it, `hal` keeps the metadata."""

    tape = None

    def recording(self) -> AbstractContextManager[object]:
        """The block, left alone."""
        return nullcontext()

    def replay(self) -> None:
        """Run nothing."""


@dataclass(slots=True, eq=False)
class Captured:
    """A captured step: room for `rows` rows of `width` tokens, and the record of its block.

    Replays write their batch to the same addresses. Results live until the next replay.
    """

    mode: Mode
    rows: int
    width: int
    frame: Frame
    packed: Tensor
    positions: Tensor
    graph: Graph
    layers: int
    """How many layers had been bound, over the backend's life."""
    step: Step | None = None
    committed: bool = False
    """Whether the block commits by itself, with counts that it finds on the device."""
    live: Step | None = None
    """The step of the batch that was written last; in DECODE `step` itself, since none commits."""

    @property
    def recorded(self) -> bool:
        """Whether a replay runs the block, or leaves that to the engine."""
        return not isinstance(self.graph, Unrecorded)

    @property
    def tokens(self) -> int:
        """The length of the block's packed inputs."""
        return self.rows * self.width

    def open(self) -> Step:
        """The step that the block runs on, made while recording."""
        fields = self.frame.split(self.packed)
        self.step = captured_step(self.mode, self.frame, fields, self.positions, self.graph.tape)
        return self.step

    def fits(self, rows: int, width: int) -> bool:
        """Whether a batch of as many rows, the longest of `width` tokens, has room."""
        return rows <= self.rows and width <= self.width

    def write(self, batch: Batch, ring: Ring) -> Step:
        """Rewrite every field, neutral behind the batch, and give its `live` step."""
        step = self.step
        if step is None:
            raise StepOrderError("replay: the capture has not ended")
        self._check_points(batch)
        ring.write(pack(batch, self.frame), self.packed)
        if batch.held is not None and batch.rows:
            rows = slice(batch.rows)
            ids = [batch.held.src, batch.held.dst]
            torch._foreach_copy_([step.src[rows], step.dst[rows]], ids)
        self.live = live = _live(step, batch)
        self._fill(None if self.recorded else live)
        return live

    def run(self) -> None:
        """Run the recorded block on what was written; only then do its drafts hold that batch."""
        self.graph.replay()
        self._fill(self.live)

    def _check_points(self, batch: Batch) -> None:
        if self.mode is not Mode.VERIFY:
            return
        wanted, room = frame_of(batch).points, self.frame.points
        if wanted > room:
            raise ValueError(
                f"replay: a row has {wanted} track points, "
                f"a captured VERIFY step has room for {room}"
            )

    def _fill(self, live: Step | None) -> None:
        """Say whose tokens the scratch of the block's drafts holds, None for nobody's."""
        for draft in () if self.step is None else self.step.filled:
            draft.filled = live


def _live(step: Step, batch: Batch) -> Step:
    """What a commit holds the batch's rows against, which a DECODE has no use for."""
    if step.mode is Mode.DECODE:
        return step
    return replace(
        step,
        lengths=tuple(batch.lengths),
        parents=None if batch.parents is None else step.parents,
        tape=None,
        links=links_of(batch),
        forks=may_fork(batch),
    )


class Graphs:
    """The captured steps of one backend, by mode, rows and width."""

    def __init__(self, device: torch.device, ring: Ring, limits: Limits) -> None:
        self._device = device
        self._ring = ring
        self._limits = limits
        self._captured: dict[tuple[Mode, int, int], Captured] = {}
        self._replaced: list[Captured] = []
        self._pool: Any = None

    def prepare(self, mode: Mode, rows: int, width: int, record: bool, layers: int) -> Captured:
        """Metadata of nothing but pads, in memory of its own."""
        self.check(mode, rows, width)
        rows, width = index(rows), index(width)
        self._replaced.clear()
        verify = mode is Mode.VERIFY
        tracks = verify and self._limits.track is not None
        frame = Frame(rows, rows * width, 0, verify and self._limits.tree, int(tracks))
        with torch.inference_mode(False):
            packed = torch.empty(frame.size, dtype=torch.int32, device=self._device)
            positions = torch.arange(rows * width, dtype=torch.int32, device=self._device)
        self._ring.write(pack(Batch(mode), frame), packed)
        graph = self._graph() if record else Unrecorded()
        return Captured(mode, rows, width, frame, packed, positions, graph, layers)

    def keep(self, captured: Captured) -> None:
        """Offer a captured step to replays, in place of one of its size.

        That one lives on until the next capture is prepared: an engine may be recording now, and
        the end of a graph would break its record.
        """
        key = captured.mode, captured.rows, captured.width
        if key in self._captured:
            self._replaced.append(self._captured[key])
        self._captured[key] = captured

    def fit(self, batch: Batch, layers: int) -> Captured:
        """The smallest captured step that has room for the batch."""
        own = [captured for captured in self._captured.values() if captured.mode is batch.mode]
        if not own:
            raise StepOrderError(f"replay: no {batch.mode} step was captured")
        width = batch.max_len
        fitting = [captured for captured in own if captured.fits(batch.rows, width)]
        if not fitting:
            sizes = ", ".join(sorted(f"{c.rows} x {c.width}" for c in own))
            raise ValueError(
                f"replay: {batch.rows} rows of up to {width} tokens, "
                f"captured {batch.mode} steps have room for {sizes}"
            )
        found = min(fitting, key=lambda captured: (captured.tokens, captured.rows))
        if found.layers != layers:
            raise StepOrderError(
                f"replay: the step was captured after {found.layers} layers were bound, "
                f"now it is {layers}: capture it again"
            )
        return found

    def _graph(self) -> Graph:
        if self._device.type != "cuda":
            return TapeGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return CudaGraph(self._pool)

    def check(self, mode: Mode, rows: int, width: int) -> None:
        """Refuse a step that has no graph or is larger than the backend was built for."""
        limits = self._limits
        if not isinstance(mode, Mode):
            raise ValueError(f"Invalid forward mode: {mode}")
        if mode not in CAPTURABLE:
            raise ValueError(f"capture: mode {mode} has no graphs, DECODE and VERIFY have")
        if mode not in limits.modes:
            raise ValueError(f"capture: mode {mode} needs a selection with speculative")
        rows, width = index(rows), index(width)
        if not 1 <= rows <= limits.max_batch:
            raise ValueError(
                f"capture: {rows} rows, the backend was built for 1..{limits.max_batch}"
            )
        most = limits.width if mode is Mode.VERIFY else 1
        if not 1 <= width <= most:
            raise ValueError(f"capture: width {width} in a {mode} step, expected 1..{most}")
        if rows * width > limits.max_tokens:
            raise ValueError(
                f"capture: {rows * width} tokens, the backend was built for {limits.max_tokens}"
            )
