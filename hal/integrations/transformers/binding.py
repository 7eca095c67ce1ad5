"""Bind one model of transformers to a backend: every mixer, or a refusal that names the rest."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from transformers import PreTrainedConfig

from hal.errors import HalError
from hal.integrations.transformers import attention
from hal.integrations.transformers.mixers import MIXERS, rebind, replace, uses
from hal.integrations.transformers.witness import Place, Witness

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn
    from transformers import PreTrainedModel

    from hal.model.spec import Kind, LayerSpec, ModelSpec
    from hal.runtime.backend import Backend


def bind_mixers(model: PreTrainedModel, backend: Backend) -> Witness:
    """Send each linear layer's kernels through `hal`; the model's other instances stay as is.

    Raises `HalError` unless the modules found are the stateful layers of the config, one by one.
    """
    check_placement(model)
    spec = backend.selection.model
    mixers = dict(find_mixers(model.get_decoder(), spec))
    check_all(mixers, spec)
    witness = Witness()
    for layer in spec.stateful_layers():
        _bind(mixers[layer.index], layer, backend, witness)
    return witness


def bind_attention(model: PreTrainedModel) -> None:
    """Send the decoder's attention to the step's slots, under a config of this instance's own."""
    attention.register()
    memo: dict[int, object] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if isinstance(config, PreTrainedConfig):
            vars(module)["config"] = copy.deepcopy(config, memo)
    model.get_decoder().config._attn_implementation = attention.NAME


def find_mixers(decoder: nn.Module, spec: ModelSpec) -> Iterator[tuple[int, nn.Module]]:
    """Modules whose forward names a kernel of this model's kinds, by the layer they are in."""
    kinds = {layer.stateful for layer in spec.stateful_layers()}
    kernels = frozenset(name for kind, how in MIXERS.items() if kind in kinds for name in how.seams)
    found: dict[int, str] = {}
    for name, module in decoder.named_modules():
        layer_id = vars(module).get("layer_idx")
        if not uses(module, kernels) or not isinstance(layer_id, int):
            continue
        if layer_id in found:
            raise HalError(f"layer {layer_id} has two mixers, {found[layer_id]} and {name}")
        found[layer_id] = name
        yield layer_id, module


def check_all(mixers: Mapping[int, nn.Module], spec: ModelSpec) -> None:
    """A mixer that was missed would run without its state, and nobody would see it."""
    wanted = {layer.index: layer for layer in spec.stateful_layers()}
    stray = sorted(set(mixers) - set(wanted))
    if stray:
        raise HalError(f"layers {stray} have a mixer, but keep no state by the config")
    missed = [layer for i, layer in wanted.items() if not _served(mixers.get(i), layer.stateful)]
    if missed:
        named = ", ".join(f"{layer.index} ({layer.stateful})" for layer in missed)
        raise HalError(
            f"hal would drive {len(wanted) - len(missed)} of {len(wanted)} stateful layers, "
            f"missed are layers {named}: this version of transformers has other seams"
        )


def check_placement(model: PreTrainedModel) -> None:
    """Refuse offloaded weights: a rebound forward skips the hooks that would fetch them."""
    places = vars(model).get("hf_device_map")
    if places is None:
        return
    homes = {str(place) for place in places.values()}
    if len(homes) > 1 or "disk" in homes:
        raise HalError(
            f"the model is spread over {', '.join(sorted(homes))}: load it whole on one device, "
            f"without device_map"
        )


def _served(mixer: nn.Module | None, kind: Kind | None) -> bool:
    """Whether a module names every kernel that its kind of layer is driven through."""
    if mixer is None or kind is None or kind not in MIXERS:
        return False
    names = frozenset(MIXERS[kind].seams)
    return uses(mixer, names) == names


def _bind(mixer: nn.Module, layer: LayerSpec, backend: Backend, witness: Witness) -> None:
    kind = layer.stateful
    if kind is None:
        raise HalError(f"layer {layer.index} keeps no state")
    how = MIXERS[kind]
    bound = backend.layer(layer.index, how.params(mixer))
    seams = {
        name: make(Place(name, mixer, bound, layer.index, witness))
        for name, make in how.seams.items()
    }
    if how.whole:
        (forward,) = seams.values()
        replace(mixer, forward)
    else:
        rebind(mixer, seams)
    witness.expected.update({(layer.index, name): seam.calls for name, seam in seams.items()})
