"""Where the plugin takes hold of vLLM, and the proof that it did.

Names and seams move between versions, and an override that no longer applies says nothing. So every
name is looked up when the plugin registers, and every layer is looked at when a model is built.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

from hal.integrations.engines.refusals import library, refuse
from hal.integrations.engines.session import Session
from hal_vllm.question import Place, ask
from hal_vllm.session import building
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
PAGES: Final = ("get_mamba_state_shape_from_config", "get_mamba_state_dtype_from_config")
"""Class methods of a model by which vLLM sizes pages."""

_MARK: Final = "hal_vllm_original"


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
        taken = registry.get(name)
        if taken not in (None, layer):
            fix = "keep one of the two plugins, for example with VLLM_PLUGINS"
            reason = library(
                f"layer {name}", "hal_vllm", f"{taken.__module__}.{taken.__name__}", fix
            )
            raise refuse(PIN.engine, PIN.distribution, reason)
        if taken is None:
            find("vllm.model_executor.custom_op", "PluggableLayer").register_oot(layer, name=name)


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


def wrap_loader(announce: Callable[[str], None], place: Callable[[Any], Place]) -> None:
    """Ask `hal` before a model is built, and hold the built one against its answer.

    Both come before any weight is read. Wrapping twice changes nothing.
    """
    loader = find("vllm.model_executor.model_loader.base_loader", "BaseModelLoader")
    original = find(loader.__module__, loader.__name__, "create_model")
    if _MARK in vars(original):
        return

    @wraps(original)
    def create_model(self: Any, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        selection = ask(vllm_config, place(vllm_config))
        if selection is None:
            return original(self, vllm_config, model_config, prefix=prefix)
        check_backends()
        rows = vllm_config.scheduler_config.max_num_seqs
        made = Session.of(PIN.engine, PIN.distribution, selection, rows)
        with building(made) as session:
            model = original(self, vllm_config, model_config, prefix=prefix)
        session.check_complete()
        answer_pages(type(model), session)
        for line in session.lines():
            announce(line)
        return model

    vars(create_model)[_MARK] = original
    loader.create_model = create_model


def answer_pages(model: type, session: Session) -> None:
    """Let vLLM size its pages by the plan; a model without attention sizes them by its layers.

    The newest session of a model class answers.
    """
    states = session.states(next(iter(session.members)))
    shapes = tuple(spec.shape for spec in states)
    dtypes = tuple(find("torch", spec.dtype) for spec in states)
    for name, answer in zip(PAGES, (shapes, dtypes), strict=True):
        if name in dir(model):
            setattr(model, name, _constant(answer))


def _constant(answer: object) -> classmethod[Any, Any, object]:
    def get(cls: type, vllm_config: object) -> object:
        return answer

    return classmethod(get)
