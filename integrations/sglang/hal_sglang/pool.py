"""SGLang's pool of states, shaped by the plan: it allocates, clears, copies and hands out slots."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, Final

import torch

from hal.errors import HalError

if TYPE_CHECKING:
    from torch import Tensor

    from hal.integrations.engines.session import Session
    from hal.states import StateSpec

PARAMS: Final = "mamba2_cache_params"
"""The property of a model's config by which SGLang sizes its pool."""

_ORIGINALS: Final[dict[type, property]] = {}


def shape_pool(config: Any, session: Session) -> None:
    """Let SGLang allocate its pool in the plan's shapes, layouts and dtypes.

    Whatever else the property does stays; the newest session of a config class answers.
    """
    kind = type(config)
    original = _ORIGINALS.setdefault(kind, getattr(kind, PARAMS))
    getter = original.fget
    if getter is None:
        raise HalError(f"{kind.__name__}.{PARAMS} of SGLang cannot be read")
    setattr(kind, PARAMS, property(lambda self: planned(getter(self), session)))


def planned(params: Any, session: Session) -> Any:
    """SGLang's parameters of the pool with the plan's shapes and dtypes; both see the same layers.

    A model of short convolutions has an empty recurrent state, which stays.
    """
    layers, kinds = set(params.layers), set(session.kinds())
    if layers != kinds:
        raise HalError(f"SGLang keeps states of layers {sorted(layers)}, hal of {sorted(kinds)}")
    states = {spec.name: spec for spec in session.states(min(kinds))}
    conv, recurrent = states["conv"], states.get("recurrent")
    _same("conv channels", params.shape.conv[0][0], sum(size for _, size, _ in conv.segments))
    _same("elements of a recurrent state", prod(params.shape.temporal), _elements(recurrent))
    shape = replace(params.shape, conv=[conv.shape])
    dtype = replace(params.dtype, conv=getattr(torch, conv.dtype))
    if recurrent is not None:
        shape = replace(shape, temporal=recurrent.shape)
        dtype = replace(dtype, temporal=getattr(torch, recurrent.dtype))
    return replace(params, shape=shape, dtype=dtype)


def layer_states(pool: Any, index: int, session: Session) -> dict[str, Tensor]:
    """A layer's tensors `[slots, …]` in SGLang's pool, by the plan's names."""
    cache = pool.mamba2_layer_cache(index)
    found = {"conv": cache.conv[0], "recurrent": cache.temporal}
    return {spec.name: found[spec.name] for spec in session.states(index)}


def _elements(spec: StateSpec | None) -> int:
    return 0 if spec is None else prod(spec.shape)


def _same(what: str, engine: int, plan: int) -> None:
    if engine != plan:
        raise HalError(f"{what}: {engine} in SGLang, {plan} by hal's plan")
