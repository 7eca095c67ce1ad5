"""Where the plugin takes hold of vLLM's layers and backends, and the proof that it did.

Names and seams move between versions, and an override that no longer applies says nothing. So every
name is looked up when the plugin registers; `hal_vllm.loader` looks at the layers of a built model.
"""

from __future__ import annotations

import importlib
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

from hal.integrations.engines.refusals import library, refuse
from hal_vllm.versions import PIN

if TYPE_CHECKING:
    from types import ModuleType

LAYERS: Final = {
    "QwenGatedDeltaNetAttention": "HalGatedDeltaNet",
    "KimiGatedDeltaNetAttention": "HalKimiDelta",
    "MambaMixer2": "HalMamba2",
    "ShortConv": "HalShortConv",
}
"""vLLM's class names, by which it looks replacements up, and ours."""

BACKENDS: Final = ("GDN_ATTN", "MAMBA2", "SHORT_CONV")
"""Members of `MambaAttentionBackendEnum` that get the one metadata builder."""

BACKEND: Final = "hal_vllm.metadata.HalBackend"
ADDED: Final = "process_weights_after_loading"
"""A method that vLLM calls on any layer that has it; its linear layers have not."""


def find(module: str, *names: str) -> Any:
    """An attribute path in a module of vLLM, or a refusal that names the seam."""
    try:
        found: Any = importlib.import_module(module)
        for name in names:
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        where = ".".join((module, *names))
        fix = "install a version of vLLM that hybrid-hal-vllm names as tested"
        reason = library(PIN.distribution, where, f"{type(error).__name__}: {error}", fix)
        raise refuse(PIN.engine, PIN.distribution, reason) from error
    return found


def override_layers(layers: ModuleType) -> None:
    """Register each layer under the engine's class name; another owner is refused."""
    registry = find("vllm.model_executor.custom_op", "op_registry_oot")
    for name, own in LAYERS.items():
        layer = getattr(layers, own)
        check_methods(layer)
        taken = registry.get(name)
        if taken not in (None, layer):
            fix = "keep one of the two plugins, for example with VLLM_PLUGINS"
            reason = library(
                f"layer {name}", "hal_vllm", f"{taken.__module__}.{taken.__name__}", fix
            )
            raise refuse(PIN.engine, PIN.distribution, reason)
        if taken is None:
            find("vllm.model_executor.custom_op", "PluggableLayer").register_oot(layer, name=name)


def check_methods(layer: type) -> None:
    """Refuse an engine in which a method that the layer replaces has another name.

    The engine would call its own method then, and the layer's never.
    """
    served, stock = layer.__bases__
    for name, replaced in sorted({**vars(served), **vars(layer)}.items()):
        if isinstance(replaced, FunctionType) and not name.startswith(("hal_", "__", ADDED)):
            find(stock.__module__, stock.__name__, name)


def override_backends() -> None:
    """Give the layers' metadata builder; before its first use, since vLLM remembers the answer."""
    module = "vllm.v1.attention.backends.registry"
    register = find(module, "register_backend")
    for name in BACKENDS:
        member = find(module, "MambaAttentionBackendEnum", name)
        register(member, BACKEND, is_mamba=True)


def check_backends() -> None:
    """Refuse an engine that answers with another backend than was registered."""
    select = find("vllm.v1.attention.selector", "get_mamba_attn_backend")
    enum = find("vllm.v1.attention.backends.registry", "MambaAttentionBackendEnum")
    for name in BACKENDS:
        backend = select(enum[name])
        path = f"{backend.__module__}.{backend.__qualname__}"
        if path != BACKEND:
            reason = library(f"metadata of {name}", BACKEND, path, "load hybrid-hal-vllm earlier")
            raise refuse(PIN.engine, PIN.distribution, reason)
