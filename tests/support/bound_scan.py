"""Bound scan layers, CCA among them, and the oracle of a whole run of each."""

import torch
from torch import Tensor

from hal import reference
from hal.model.spec import CcaDims, ScanDims
from hal.runtime.backend import Backend
from hal.runtime.cca_layer import CcaLayer
from hal.runtime.params import CcaParams, ScanParams
from hal.runtime.scan_layer import ScanLayer
from support.backends import Bound, backend_for
from support.model_configs import tiny


def scan_params(dims: ScanDims, seed: int = 0, before: bool = False) -> ScanParams:
    """Random weights of a scan layer, rates spread from slow to fast; a norm where dims name one.

    Mamba-1 has a rate for each channel and state, lightning neither conv nor skip nor bias.
    """
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    by_channel = dims.dt_rank is not None
    count = dims.I if by_channel else dims.H
    rates = (count, dims.N) if by_channel else (count,)
    A_log = torch.rand(*rates, generator=rng) * 2 - 1.5
    if not dims.W:
        return ScanParams(None, None, A_log, None, None)
    channels = dims.I if by_channel else dims.I + 2 * dims.G * dims.N
    norm = draw(dims.I).abs() + 0.5 if dims.norm_groups else None
    return ScanParams(
        draw(channels, dims.W), draw(channels), A_log, draw(count), draw(count), norm, 1e-5, before
    )


def scan_layer(config: dict[str, object], before: bool = False) -> tuple[Backend, ScanLayer]:
    """The first scan layer of a config, bound with random weights."""
    backend = backend_for(config)
    spec = next(backend.selection.model.stateful_layers())
    assert isinstance(spec.dims, ScanDims)
    layer = backend.layer(spec.index, scan_params(spec.dims, before=before))
    assert isinstance(layer, ScanLayer)
    return backend, layer


def conv_alone(params: ScanParams, x: Tensor) -> Tensor:
    """The oracle's convolution of a whole row."""
    assert params.conv_weight is not None
    channels, width = params.conv_weight.shape
    none, ends = torch.tensor([-1]), torch.tensor([0, x.shape[0]])
    mixed, _ = reference.conv_prefill(
        x, params.conv_weight, params.conv_bias, torch.zeros(2, channels, width - 1),
        none, none, none, ends, x.shape[0], activation="silu",
    )  # fmt: skip
    return mixed


def scan_alone(
    layer: ScanLayer, x: Tensor, dt: Tensor | None, B: Tensor, C: Tensor, z: Tensor | None
) -> Tensor:
    """The oracle's scan of a whole row with a layer's rates."""
    params, none = layer.params, torch.tensor([-1])
    ends, state = torch.tensor([0, x.shape[0]]), torch.zeros(2, *x.shape[1:], B.shape[2])
    y, _ = reference.scan_prefill(
        x, dt, -params.A_log.double().exp(), B, C, params.D, params.dt_bias, z, state,
        none, none, ends, x.shape[0], dt_limit=layer.dims.dt_limit, dt_softplus=dt is not None,
    )  # fmt: skip
    return y


def norm_alone(y: Tensor, z: Tensor, layer: ScanLayer) -> Tensor:
    """The grouped gated norm in float64, group by group."""
    params, groups = layer.params, layer.dims.norm_groups
    assert params.norm_weight is not None and groups is not None
    gate = z.double() / (1 + (-z.double()).exp())
    x = y if params.norm_before_gate else y * gate
    parts = [
        p / (p.square().mean(-1, keepdim=True) + params.norm_eps).sqrt()
        for p in x.chunk(groups, -1)
    ]
    normed = torch.cat(parts, -1) * params.norm_weight.double()
    return normed * gate if params.norm_before_gate else normed


def mamba2(config: dict[str, object] | None = None, before: bool = False) -> Bound:
    """A Mamba-2 layer: conv, scan, and the norm or the gate inside the scan."""
    backend, layer = scan_layer(config or tiny("bamba"), before)
    dims = layer.dims
    sizes = (dims.I, dims.G * dims.N, dims.G * dims.N)

    def inputs(tokens: int) -> list[Tensor]:
        return [torch.randn(tokens, n) for n in (sum(sizes), dims.H, dims.I)]

    def alone(given: list[Tensor]) -> Tensor:
        mixed, dt, z = given
        x, B, C = conv_alone(layer.params, mixed).split(sizes, dim=-1)
        heads, groups = (-1, dims.H, dims.P), (-1, dims.G, dims.N)
        gate = None if dims.norm_groups else z.reshape(heads)
        y = scan_alone(
            layer, x.reshape(heads), dt, B.reshape(groups), C.reshape(groups), gate
        ).reshape(-1, dims.I)
        return norm_alone(y, z, layer) if dims.norm_groups else y

    return Bound(backend, inputs, lambda given: layer(*given), alone)


def mamba1(name: str = "mamba") -> Bound:
    """A Mamba-1 layer, run in its pieces; Zamba's head by head."""
    backend, layer = scan_layer(tiny(name))
    dims, heads = layer.dims, layer.heads()

    def inputs(tokens: int) -> list[Tensor]:
        wide, narrow = (tokens, dims.I), (tokens, dims.G, dims.N)
        return [torch.randn(shape) for shape in (wide, wide, narrow, narrow, wide)]

    def call(given: list[Tensor]) -> Tensor:
        mixed, dt, B, C, z = given
        wide = (layer.conv(mixed), dt, z)
        parts = [[t.chunk(len(heads), -1)[i] for t in wide] for i in range(len(heads))]
        return torch.cat(
            [
                head.scan(x, step, B[:, i : i + 1], C[:, i : i + 1], gate)
                for i, (head, (x, step, gate)) in enumerate(zip(heads, parts, strict=True))
            ],
            dim=-1,
        )

    def alone(given: list[Tensor]) -> Tensor:
        mixed, dt, B, C, z = given
        return scan_alone(layer, conv_alone(layer.params, mixed), dt, B, C, z)

    return Bound(backend, inputs, call, alone)


def lightning() -> Bound:
    """A lightning layer: a scan of v by k, read by q, with one group a head."""
    backend, layer = scan_layer(tiny("minimax"))
    dims = layer.dims

    def inputs(tokens: int) -> list[Tensor]:
        return [torch.randn(tokens, dims.H, n) for n in (dims.P, dims.N, dims.N)]

    def call(given: list[Tensor]) -> Tensor:
        v, k, q = given
        return layer.scan(v, None, k, q)

    return Bound(
        backend, inputs, call, lambda given: scan_alone(layer, given[0], None, *given[1:], None)
    )


def cca_params(dims: CcaDims, seed: int = 0) -> CcaParams:
    """Random weights of both convolutions."""
    rng = torch.Generator().manual_seed(seed)
    shapes = (
        (dims.channels, dims.time0),
        (dims.channels,),
        (dims.channels, dims.D, dims.time1),
        (dims.channels,),
    )
    return CcaParams(*(torch.randn(shape, generator=rng) for shape in shapes))


def cca(config: dict[str, object] | None = None) -> Bound:
    """A CCA layer; its two results side by side."""
    backend = backend_for(config or tiny("zaya", cca_time0=3, cca_time1=4))
    spec = next(backend.selection.model.stateful_layers())
    dims = spec.dims
    assert isinstance(dims, CcaDims)
    params = cca_params(dims)
    layer = backend.layer(spec.index, params)
    assert isinstance(layer, CcaLayer)

    def inputs(tokens: int) -> list[Tensor]:
        return [torch.randn(tokens, dims.channels), torch.randn(tokens, dims.hidden)]

    def alone(given: list[Tensor]) -> Tensor:
        r, h = (tensor.double() for tensor in given)
        before = torch.cat((torch.zeros(1, dims.hidden, dtype=h.dtype), h[:-1]))
        return torch.cat((cca_alone(params, dims, r), before), dim=-1)

    return Bound(backend, inputs, lambda given: torch.cat(layer(*given), dim=-1), alone)


def cca_alone(params: CcaParams, dims: CcaDims, r: Tensor) -> Tensor:
    """Both convolutions in float64, by torch's own, over the row behind its zeros."""
    weights = (params.depthwise_weight.unsqueeze(1), params.grouped_weight)
    biases = (params.depthwise_bias, params.grouped_bias)
    groups = (dims.channels, dims.HQ + dims.HKV)
    x = torch.nn.functional.pad(r.T[None], (dims.carry, 0))
    for weight, bias, count in zip(weights, biases, groups, strict=True):
        x = torch.nn.functional.conv1d(x, weight.double(), bias.double(), groups=count)
    return x[0].T
