"""One layer of a family on the ranks of a group, against the whole model on one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

import hal
from hal.model.spec import CcaDims, DeltaDims, Dims, GateKind, LayerSpec, ScanDims, ShortConvDims
from hal.options import Shard
from hal.runtime.batch import Batch, Mode
from hal.runtime.cutting import cut_params
from hal.runtime.params import LayerParams, ShortConvParams
from hal.runtime.pool import Slot
from hal.runtime.ranks import Ranks
from hal.runtime.transfer import SlotState, cut
from support.bound import delta_params
from support.bound_scan import cca_params, scan_params
from support.model_configs import tiny
from support.slots import part_of

WIDTH = 3
DELTA = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "cca": tiny("zaya"),
    "falcon_h1": tiny("falcon_h1"),
    "gated_delta_net": tiny("qwen3_next", **DELTA),
    "kimi_delta": tiny("kimi_linear"),
    "lightning": tiny("minimax"),
    "mamba1": tiny("mamba"),
    "mamba2_one_group": tiny("bamba", mamba_n_groups=1),
    "mamba2_two_groups": tiny("bamba"),
    "mamba2_eight_groups": tiny("bamba", mamba_n_groups=8),
    "safe_delta": tiny("bailing_hybrid"),
    "short_conv": tiny("lfm2"),
    "zamba": tiny("zamba"),
}
NO_VERIFY = frozenset({"zamba"})
"""Run head by head, which has no verify."""

PROMPTS = [
    Batch(Mode.EXTEND, [5, 3], [0, 0], [-1, -1], [1, 2]),
    Batch(Mode.MIXED, [1, 2, 4], [5, 3, 0], [1, 2, -1], [1, 2, 3]),
    Batch(Mode.DECODE, [1, 1, 0], [6, 4, 0], [1, 3, -1], [1, 3, -1]),
    Batch(Mode.IDLE),
]
VERIFY = Batch(Mode.VERIFY, [3, 2], [7, 5], [1, 2], [1, 4])
ACCEPTED = [2, 1]

Inputs = list[Tensor]


@dataclass(frozen=True)
class Ran:
    """What a rank gave: an output a step, and the states that it exported."""

    outputs: list[Tensor]
    states: dict[int, SlotState]


def layer_of(family: str) -> LayerSpec:
    """The family's first layer with a state."""
    return next(hal.model.read(CONFIGS[family]).stateful_layers())


def speculation(family: str, verify: bool) -> hal.Speculative | None:
    """The option of a run with a verify step, where the family has one."""
    return hal.Speculative(WIDTH) if verify and family not in NO_VERIFY else None


def steps_of(verify: bool) -> list[Batch]:
    """The steps, with or without a verify before the last decode."""
    if not verify:
        return [*PROMPTS, Batch(Mode.DECODE, [1, 1], [7, 5], [1, 3], [1, 3])]
    return [*PROMPTS, VERIFY, Batch(Mode.DECODE, [1, 1], [9, 5], [1, 3], [1, 3])]


def lengths_after(steps: Sequence[Batch]) -> dict[int, int]:
    """What the slots hold after the steps, in tokens."""
    held: dict[int, int] = {}
    for batch in steps:
        moved_on = ACCEPTED if batch.mode is Mode.VERIFY else batch.lengths
        rows = zip(batch.dst, batch.start, moved_on, strict=True)
        held |= {slot: start + n for slot, start, n in rows if slot >= 0}
    return held


def run(
    family: str,
    device: str = "cpu",
    rank: int = 0,
    size: int = 1,
    ranks: Ranks | None = None,
    verify: bool = True,
    turns: range | None = None,
    given: dict[int, SlotState] | None = None,
) -> Ran:
    """Run the steps on one rank, with its part of the weights and of the inputs.

    `turns` are those of the steps to run, all without it; `given` are the whole states before them.
    """
    layer_spec = layer_of(family)
    speculative = speculation(family, verify)
    selection = hal.select(
        device, CONFIGS[family], dtype="float32", tp=Shard(rank, size), speculative=speculative
    )
    backend = selection.backend(slots=4, max_batch=4, max_tokens=32, ranks=ranks)
    assert layer_spec.dims is not None
    whole = params_of(layer_spec.dims)
    params = moved(cut_params(selection, layer_spec.index, whole), backend.device)
    layer = backend.layer(layer_spec.index, params)
    outputs = []
    backend.pool.alloc(4)
    for slot, state in (given or {}).items():
        own_state = cut(state, selection.states, Shard(rank, size))
        backend.pool.import_state(Slot(slot), own_state)
    steps = steps_of(speculative is not None)
    turns = range(len(steps)) if turns is None else turns
    with torch.inference_mode():
        for turn in turns:
            batch = steps[turn]
            backend.begin(batch)
            own = cut_inputs(layer_spec, inputs_of(layer_spec, batch.tokens, turn), rank, size)
            outputs.append(call(family, layer, [t.to(backend.device) for t in own]).cpu())
            if batch.mode is Mode.VERIFY:
                backend.commit(ACCEPTED)
    held = lengths_after(steps[: turns.stop])
    pool = backend.pool
    return Ran(outputs, {n: pool.export_state(Slot(n), held[n]).to("cpu") for n in held})


def params_of(dims: Dims) -> LayerParams:
    """The whole model's weights, the same in every process."""
    if isinstance(dims, DeltaDims):
        return delta_params(dims)
    if isinstance(dims, ScanDims):
        return scan_params(dims)
    if isinstance(dims, CcaDims):
        return cca_params(dims)
    rng = torch.Generator().manual_seed(0)
    return ShortConvParams(torch.randn(dims.hidden, dims.W, generator=rng), None)


def moved(value: Any, device: torch.device) -> Any:
    """Parameters on a device, records and all."""
    if isinstance(value, Tensor):
        return value.to(device)
    if not is_dataclass(value):
        return value
    changed = {field.name: moved(getattr(value, field.name), device) for field in fields(value)}
    return replace(value, **changed)


def inputs_of(layer: LayerSpec, tokens: int, seed: int) -> Inputs:
    """The whole model's inputs of a step, the same in every process."""
    rng = torch.Generator().manual_seed(100 + seed)
    return [torch.randn(tokens, *shape, generator=rng) for shape in _shapes(layer.dims)]


def _shapes(dims: Dims | None) -> list[tuple[int, ...]]:
    match dims:
        case DeltaDims():
            raw = (dims.HV,) if dims.gate is GateKind.SCALAR else (dims.HV, dims.K)
            return [(sum(n for _, n in dims.segments),), raw, (dims.HV,), (dims.HV, dims.V)]
        case ScanDims(W=0):
            return [(dims.H, dims.P), (dims.H, dims.N), (dims.H, dims.N)]
        case ScanDims(dt_rank=None):
            return [(dims.I + 2 * dims.G * dims.N,), (dims.H,), (dims.I,)]
        case ScanDims():
            groups = (dims.G, dims.N)
            return [(dims.I,), (dims.I,), groups, groups, (dims.I,)]
        case CcaDims():
            return [(dims.channels,), (dims.hidden,)]
        case ShortConvDims():
            return [(dims.hidden,)] * 3
    raise AssertionError(dims)


def cut_inputs(layer: LayerSpec, inputs: Inputs, rank: int, size: int) -> Inputs:
    """A rank's part of every input, by the families' rules."""
    dims = layer.dims

    def channels(x: Tensor, sizes: dict[str, int]) -> Tensor:
        segments = x.transpose(0, 1).split_with_sizes(list(sizes.values()))
        parts = [
            part_of(t, name, layer, rank, size) for name, t in zip(sizes, segments, strict=True)
        ]
        return torch.cat(parts).transpose(0, 1)

    def heads(x: Tensor) -> Tensor:
        return x.tensor_split(size, dim=1)[rank]

    match dims:
        case DeltaDims():
            return [channels(inputs[0], dict(dims.segments)), *map(heads, inputs[1:])]
        case ScanDims(W=0):
            return list(map(heads, inputs))
        case ScanDims(dt_rank=None):
            group = dims.G * dims.N
            return [
                channels(inputs[0], {"x": dims.I, "B": group, "C": group}),
                *map(heads, inputs[1:]),
            ]
        case ScanDims():
            first = rank * dims.G // size
            own = slice(first, first + max(1, dims.G // size))
            x, dt, B, C, z = inputs
            return [heads(x), heads(dt), B[:, own], C[:, own], heads(z)]
        case CcaDims():
            return [channels(inputs[0], {"q": dims.HQ * dims.D, "k": dims.HKV * dims.D}), inputs[1]]
        case _:
            return list(map(heads, inputs))


def call(family: str, layer: Any, inputs: Inputs) -> Tensor:
    """The layer on its inputs, as one tensor."""
    if family == "lightning":
        v, k, q = inputs
        return layer.scan(v, None, k, q)
    if family == "cca":
        return torch.cat(layer(*inputs), dim=-1)
    if family not in ("mamba1", "zamba"):
        return layer(*inputs)
    mixed, dt, B, C, z = inputs
    x, parts = layer.conv(mixed), layer.heads()
    outs = [
        head.scan(xi, di, B[:, i : i + 1], C[:, i : i + 1], zi)
        for i, (head, xi, di, zi) in enumerate(
            zip(parts, *(t.chunk(len(parts), -1) for t in (x, dt, z)), strict=True)
        )
    ]
    return torch.cat(outs, dim=-1)


def join(layer: LayerSpec, outputs: Sequence[Tensor]) -> Tensor:
    """The ranks' outputs as the whole layer's."""
    dims = layer.dims
    if not isinstance(dims, CcaDims):
        return torch.cat(list(outputs), dim=1)
    size = len(outputs)
    sizes = [dims.HQ * dims.D // size, dims.HKV * dims.D // size, dims.hidden]
    q, k, hidden = zip(*(out.split_with_sizes(sizes, 1) for out in outputs), strict=True)
    assert all(torch.equal(each, hidden[0]) for each in hidden)
    return torch.cat([*q, *k, hidden[0]], dim=1)


class ThreadRanks:
    """Ranks that are threads of one process: they meet at a barrier and add what each brought."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank = rank
        self.meeting = meeting

    def mean_over(self, span: int) -> Callable[[Tensor], Tensor]:
        """The mean over a block of `span` threads."""

        def mean(tensor: Tensor) -> Tensor:
            self.meeting.brought[self.rank] = tensor
            self.meeting.barrier.wait()
            first = self.rank // span * span
            total = sum(self.meeting.brought[i] for i in range(first, first + span)) / span
            self.meeting.barrier.wait()
            assert isinstance(total, Tensor)
            return total

        return mean


class Meeting:
    """Where the threads of one group meet."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.brought: dict[int, Tensor] = {}


def run_threads(
    family: str,
    size: int,
    turns: range | None = None,
    given: dict[int, SlotState] | None = None,
) -> list[Ran]:
    """Run a family on `size` ranks in threads, in rank order."""
    meeting = Meeting(size)
    found: dict[int, Ran | BaseException] = {}

    def work(rank: int) -> None:
        try:
            ranks = ThreadRanks(rank, meeting)
            found[rank] = run(family, "cpu", rank, size, ranks, turns=turns, given=given)
        except BaseException as error:
            found[rank] = error
            meeting.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ran = [found[rank] for rank in range(size)]
    for each in ran:
        if isinstance(each, BaseException):
            raise each
    return [each for each in ran if isinstance(each, Ran)]
