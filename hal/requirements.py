"""What a model and the options need from the operations, each need with its why."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from hal.model.spec import CcaDims, DeltaDims, Dims, GateKind, Kind, ModelSpec, ScanDims
from hal.options import Options
from hal.sharding import LABELS, shard
from hal_registry import Requirement

_READY: Final = {
    GateKind.SCALAR: "ready_scalar",
    GateKind.CHANNEL: "ready_channel",
    GateKind.SAFE: "ready_channel",
}
"""The offer that serves a gate kind too, since the runtime can make log decay and beta itself."""

_CCA_LAYOUTS: Final = ("CW", "WC")
"""Layouts of a CCA window: the previous hidden state has one row, a ring of one input two."""


def requirements(model: ModelSpec, options: Options, arch: str = "") -> tuple[Requirement, ...]:
    """Every need of the stateful layers, one for each operation and different dims."""
    dtype, state_dtype = dtypes(model, options)
    groups = Counter((layer.stateful, layer.dims) for layer in model.stateful_layers())
    found = (
        replace(
            need,
            why=f"{count} {LABELS[kind]} layer{'s' if count > 1 else ''}",
            dtype=dtype,
            state_dtypes=need.state_dtypes and (state_dtype,),
            arch=arch,
        )
        for (kind, dims), count in groups.items()
        if kind is not None
        for need in _layer_needs(kind, dims and shard(dims, options.tp.size), options)
    )
    return tuple(dict.fromkeys(found))


def dtypes(model: ModelSpec, options: Options) -> tuple[str, str]:
    """The activation dtype and the recurrent state's dtype of a run."""
    return (
        options.dtype or model.dtype,
        options.state_dtype or model.state_dtype or "float32",
    )


def _layer_needs(kind: Kind, dims: Dims | None, options: Options) -> Iterator[Requirement]:
    if isinstance(dims, DeltaDims):
        yield from _conv_needs(Requirement("conv", "", width=dims.W, activation="silu"), options)
        yield from _delta_needs(dims, options)
    elif isinstance(dims, ScanDims):
        if dims.W:
            bias = ("bias",) if dims.conv_bias else ()
            conv = Requirement("conv", "", width=dims.W, activation="silu", features=bias)
            yield from _conv_needs(conv, options)
        yield from _scan_needs(kind, dims, options)
    elif isinstance(dims, CcaDims):
        yield from _sidecar_needs(kind, options)
        yield from _cca_needs(dims, options)
    elif dims is not None:
        bias = ("bias",) if dims.bias else ()
        conv = Requirement("conv", "", width=dims.W, activation="none", features=bias)
        yield from _sidecar_needs(kind, options)
        yield from _conv_needs(conv, options)
    else:
        yield Requirement(f"{kind}.prefill", "")


def _conv_needs(base: Requirement, options: Options) -> Iterator[Requirement]:
    yield from _phases(base, options)
    yield from _speculative(base, options)


def _delta_needs(dims: DeltaDims, options: Options) -> Iterator[Requirement]:
    ready = _READY[dims.gate]
    gates = (ready,) if options.ready_gates else (dims.gate.value, ready)
    base = Requirement(
        "delta_rule",
        "",
        state_dtypes=("float32",),
        gates=gates,
        head_dims=(dims.K, dims.V),
        ratio=dims.HV // dims.H,
        features=("strided",),
    )
    yield from _phases(base, options)
    yield from _speculative(base, options)
    fused = _need(base, "decode_fused", options, graph=True)
    yield replace(fused, gates=(dims.gate.value,), width=dims.W, activation="silu", optional=True)
    yield replace(_need(base, "prefill_fused", options), gates=(dims.gate.value,), optional=True)


def _scan_needs(kind: Kind, dims: ScanDims, options: Options) -> Iterator[Requirement]:
    base = Requirement(
        "scan",
        "",
        state_dtypes=("float32",),
        kind=kind.value,
        head_dims=(dims.P, dims.P) if kind is Kind.MAMBA2 else None,
        ratio=dims.H // dims.G if kind is Kind.MAMBA2 else None,
        state_size=dims.N,
        features=("strided",),
    )
    yield from _phases(base, options)
    yield from _speculative(base, options)


def _sidecar_needs(kind: Kind, options: Options) -> Iterator[Requirement]:
    """The sidecar's view alone: commit and tracking are the convolution's, on the same tensors."""
    yield _need(Requirement("conv_state", "", kind=kind.value), "step", options)


def _cca_needs(dims: CcaDims, options: Options) -> Iterator[Requirement]:
    """A convolution over the carry of both stages, and one of two taps, which is the delay."""
    conv = Requirement("conv", "", activation="none", layouts=_CCA_LAYOUTS)
    yield from _conv_needs(replace(conv, width=dims.carry + 1, features=("bias",)), options)
    yield from _conv_needs(replace(conv, width=2), options)


def _phases(base: Requirement, options: Options) -> Iterator[Requirement]:
    """Prefill, with tracking where prefixes are cached, and decode, captured where asked for."""
    prefill = _need(base, "prefill", options)
    if options.prefix_cache is not False:
        grid = 0 if options.prefix_cache is True else options.prefix_cache
        prefill = replace(prefill, track=grid)
    yield prefill
    yield _need(base, "decode", options, graph=True)


def _speculative(base: Requirement, options: Options) -> Iterator[Requirement]:
    if options.speculative is None:
        return
    shape = "tree" if options.speculative.tree else "chain"
    verify = _need(base, "verify", options, graph=True)
    yield replace(verify, verify=shape, verify_width=options.speculative.width)
    yield replace(_need(base, "commit", options), gates=(), activation="", width=None)


def _need(base: Requirement, verb: str, options: Options, *, graph: bool = False) -> Requirement:
    features = (*base.features, "negative_slots")
    if graph and options.graphs:
        features = (*features, "graph")
    return replace(base, operation=f"{base.operation}.{verb}", features=features)
