"""Bound layers through `hal.select`, over steps of every mode, against the float64 oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

import hal
from hal import reference
from hal.model.spec import CcaDims, DeltaDims, ShortConvDims
from hal.runtime.backend import Backend
from hal.runtime.batch import Batch, Mode
from hal.runtime.cca_layer import CcaLayer
from hal.runtime.layers import DeltaLayer, ShortConvLayer
from hal.runtime.params import CcaParams, DeltaParams, ShortConvParams
from hal_cuda.plugin import MANIFEST
from hal_registry import Registry
from support.backends import poison
from support.bound import GDN_CONFIG, LFM2_CONFIG, delta_params
from support.bound_scan import cca_alone, cca_params
from support.model_configs import tiny

DELTA_CONFIG = {**GDN_CONFIG, "linear_key_head_dim": 16, "linear_value_head_dim": 24}
LIMITS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Relative errors of a whole layer, whose conv result is rounded before the recurrence."""
GRID = 64
LONG = 2 * GRID + 2
NONE = torch.tensor([-1])


@dataclass(frozen=True)
class Place:
    """Where a selection is made, and from which manifest."""

    device: str = "cuda:0"
    registry: Registry = field(default_factory=lambda: Registry.of(MANIFEST))

    def backend(self, config: dict[str, object], dtype: torch.dtype, track: bool) -> Backend:
        """A backend whose pool is full of NaN."""
        name = str(dtype).removeprefix("torch.")
        selection = hal.select(
            self.device, config, dtype=name, registry=self.registry, prefix_cache=track
        )
        backend = selection.backend(slots=8, max_batch=4, max_tokens=256)
        poison(backend)
        return backend


@dataclass(frozen=True)
class Subject:
    """A layer, the inputs of one request, how to call it, and what the request gives alone."""

    backend: Backend
    given: list[Tensor]
    call: Callable[[list[Tensor]], Tensor]
    want: Tensor
    track: bool

    def step(
        self, mode: Mode, rows: list[tuple[int, int, int, int]], **more: object
    ) -> list[Tensor]:
        """Run rows of (start, tokens, src, dst), every one a piece of the request; -1 is a pad."""
        start, count, src, dst = (list(values) for values in zip(*rows, strict=True))
        batch = Batch(mode, count, start, src, dst, **more)  # type: ignore[arg-type]
        self.backend.begin(batch)
        packed = [torch.cat([_piece(t, row) for row in rows]) for t in self.given]
        out = self.call([t.to(self.backend.device) for t in packed]).cpu()
        return list(out.split(count))

    def hold(self, mode: Mode, rows: list[tuple[int, int, int, int]], **more: object) -> None:
        """Assert that every row gives what the request gives alone, and pads give zero."""
        limit = LIMITS[self.given[0].dtype]
        for (start, count, src, dst), got in zip(rows, self.step(mode, rows, **more), strict=True):
            if src < 0 and dst < 0:
                assert (got == 0).all()
                continue
            want = self.want[start : start + count]
            error = (got.double() - want).norm() / want.norm()
            assert error <= limit, f"{mode} {start}+{count}: {error:.2e}"

    def run(self) -> None:
        """Extend, mix, decode with pads, and go on from forks and from tracked slots."""
        tracked = {"track": [(0, GRID, 5)]} if self.track else {}
        self.hold(Mode.EXTEND, [(0, LONG - 4, -1, 1), (0, 5, -1, 2)], **tracked)
        self.hold(Mode.MIXED, [(LONG - 4, 1, 1, 1), (0, 9, -1, 4), (5, 4, 2, 3)])
        decoded = {"track": [(0, 2 * GRID, 7)]} if self.track else {}
        rows = [(LONG - 3, 1, 1, 1), (0, 1, -1, -1), (9, 1, 3, 3), (9, 1, 4, 6)]
        self.hold(Mode.DECODE, rows, **decoded)
        self.hold(Mode.EXTEND, [(LONG - 2, 2, 1, 1), (5, 20, 2, 2), (9, 3, 4, 8)])
        self.hold(Mode.DECODE, [(10, 1, 6, 6), (0, 1, -1, -1)])
        if self.track:
            self.hold(Mode.MIXED, [(GRID, 7, 5, 5), (2 * GRID, 1, 7, 7)])


def _piece(tensor: Tensor, row: tuple[int, int, int, int]) -> Tensor:
    start, count, src, dst = row
    piece = tensor[start : start + count]
    return piece if src >= 0 or dst >= 0 else torch.full_like(piece, float("nan"))


def delta(place: Place, dtype: torch.dtype, track: bool = True) -> Subject:
    """A Gated DeltaNet layer with its gated norm."""
    backend = place.backend(DELTA_CONFIG, dtype, track)
    spec = next(backend.selection.model.stateful_layers())
    dims = spec.dims
    assert isinstance(dims, DeltaDims)
    params = delta_params(dims)
    params = replace(params, conv_weight=params.conv_weight.to(dtype))
    layer = backend.layer(spec.index, _moved(params, backend.device))
    assert isinstance(layer, DeltaLayer)
    gen = torch.Generator().manual_seed(3)
    channels = sum(size for _, size in dims.segments)
    shapes = ((channels,), (dims.HV,), (dims.HV,), (dims.HV, dims.V))
    given = [torch.randn(LONG, *shape, generator=gen).to(dtype) for shape in shapes]
    want = delta_alone(params, dims, given)
    return Subject(backend, given, lambda args: layer(*args), want, track)


def _moved(params: DeltaParams, device: torch.device) -> DeltaParams:
    gate, norm = params.gate, params.norm_weight
    assert gate is not None and norm is not None
    gate = replace(gate, A_log=gate.A_log.to(device), dt_bias=gate.dt_bias.to(device))
    weight = params.conv_weight.to(device)
    return replace(params, conv_weight=weight, gate=gate, norm_weight=norm.to(device))


def delta_alone(params: DeltaParams, dims: DeltaDims, given: list[Tensor]) -> Tensor:
    """What a request gives that runs alone in one piece, in float64."""
    x, a, b, z = given
    ends, slot = torch.tensor([0, LONG], dtype=torch.int32), torch.tensor([1])
    window = torch.zeros(2, x.shape[1], dims.W - 1)
    mixed, _ = reference.conv_prefill(
        x, params.conv_weight, None, window, NONE, slot, NONE, ends, LONG, activation="silu"
    )
    q, k, v = (
        part.unflatten(1, (heads, -1))
        for part, heads in zip(
            mixed.split([size for _, size in dims.segments], 1),
            (dims.H, dims.H, dims.HV),
            strict=True,
        )
    )
    state = torch.zeros(2, dims.HV, dims.V, dims.K)
    o, _ = reference.delta_rule_prefill(q, k, v, a, b, params.gate, state, NONE, slot, ends, LONG)
    assert params.norm_weight is not None
    return reference.gated_rms_norm(o, z, params.norm_weight, params.norm_eps, activation="silu")


def short_conv(place: Place, dtype: torch.dtype) -> Subject:
    """An LFM2 short-conv layer."""
    backend = place.backend(LFM2_CONFIG, dtype, track=False)
    spec = next(backend.selection.model.stateful_layers())
    dims = spec.dims
    assert isinstance(dims, ShortConvDims)
    gen = torch.Generator().manual_seed(4)
    weight = torch.randn(dims.hidden, dims.W, generator=gen).to(dtype)
    layer = backend.layer(spec.index, ShortConvParams(weight.to(backend.device), None))
    assert isinstance(layer, ShortConvLayer)
    given = [torch.randn(LONG, dims.hidden, generator=gen).to(dtype) for _ in range(3)]
    B, C, x = given
    ends = torch.tensor([0, LONG], dtype=torch.int32)
    window = torch.zeros(2, dims.hidden, dims.W - 1)
    y, _ = reference.conv_prefill(
        B * x, weight, None, window, NONE, NONE, NONE, ends, LONG, activation=None
    )
    return Subject(backend, given, lambda args: layer(*args), C.double() * y, track=False)


def cca(place: Place, dtype: torch.dtype) -> Subject:
    """A CCA layer, composed from the provider's convolution; its two results side by side."""
    backend = place.backend(tiny("zaya", cca_time0=3, cca_time1=4), dtype, track=False)
    spec = next(backend.selection.model.stateful_layers())
    dims = spec.dims
    assert isinstance(dims, CcaDims)
    held = cca_params(dims)
    weights = (held.depthwise_weight, held.depthwise_bias, held.grouped_weight, held.grouped_bias)
    params = CcaParams(*(None if w is None else w.to(dtype) for w in weights))
    there = CcaParams(*(None if w is None else w.to(dtype).to(backend.device) for w in weights))
    layer = backend.layer(spec.index, there)
    assert isinstance(layer, CcaLayer)
    gen = torch.Generator().manual_seed(5)
    given = [torch.randn(LONG, n, generator=gen).to(dtype) for n in (dims.channels, dims.hidden)]
    r, h = (tensor.double() for tensor in given)
    before = torch.cat((torch.zeros_like(h[:1]), h[:-1]))
    want = torch.cat((cca_alone(params, dims, r), before), -1)
    return Subject(backend, given, lambda args: torch.cat(layer(*args), -1), want, track=False)


def bound_checks(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], None]]]:
    """Every kind of layer on the device, as named checks."""
    yield "delta.bound layer", lambda: delta(Place(), dtype).run()
    yield "conv_state.step bound layer", lambda: short_conv(Place(), dtype).run()
    yield "conv_state.step bound cca layer", lambda: cca(Place(), dtype).run()
