"""Where the plugin takes hold of SGLang, and the proof that it did.

SGLang logs and swallows a plugin that raises and a patch that fails. So nothing is refused while
plugins register: each hook, when it runs, first looks whether all of them took.
"""

from __future__ import annotations

import logging
import pkgutil
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from hal.errors import HalError
from hal.integrations.engines.refusals import library, refuse
from hal.integrations.engines.session import Session, forget_all
from hal.selection import choose
from hal_sglang import ask
from hal_sglang.question import DISTRIBUTION, ENGINE, decided, judged
from hal_sglang.versions import PIN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hal.refusal import Unsupported

REGISTRY: Final = "sglang.srt.plugins.hook_registry.HookRegistry"
HOOK_TYPE: Final = "sglang.srt.plugins.hook_registry.HookType"
LOGGER: Final = "sglang.srt.plugins.hal"
_BUILDING: ContextVar[Session | None] = ContextVar("hal_sglang_building", default=None)
_SERVED: Final[WeakKeyDictionary[Any, Session]] = WeakKeyDictionary()
"""Sessions by SGLang's model runner."""


def find(path: str) -> Any:
    """An attribute of SGLang by its dotted path, or a refusal that names the seam."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise moved(path, error) from error


def moved(path: str, error: Exception) -> Unsupported:
    """The refusal of an engine in which a seam is not where it was."""
    fix = f"install a version of {ENGINE} that {DISTRIBUTION} names as tested"
    reason = library(DISTRIBUTION, path, f"{type(error).__name__}: {error}", fix)
    return refuse(ENGINE, DISTRIBUTION, reason)


def check_arguments(original: Callable[[Any], Any], arguments: Any) -> Any:
    """In the process that starts the others: refuse by manifests, before any of them is there."""
    result = original(arguments)
    verify()
    decided(ask.of_arguments(arguments), judged)
    return result


def load_model(original: Callable[[Any], Any], runner: Any) -> Any:
    """Ask `hal` on the device itself, build its providers, and only then let weights be loaded."""
    verify()
    selection = decided(ask.of_runner(runner), choose)
    if selection is None:
        return original(runner)
    from hal_sglang.pool import shape_pool

    batch = int(ask.flags_of(runner.server_args).max_running_requests or ask.MAX_BATCH)
    session = Session.of(ENGINE, DISTRIBUTION, selection, batch)
    shape_pool(ask.state_config(runner.model_config), session)
    _SERVED[runner] = session
    with _building(session):
        return original(runner)


def build_model(original: Callable[..., Any], model_config: Any, *rest: Any, **named: Any) -> Any:
    """Take the built model's layers in, and say who serves them; weights come afterwards."""
    model, session = original(model_config, *rest, **named), _BUILDING.get()
    if session is None:
        if ask.state_config(model_config) is not None:
            raise HalError(f"{ENGINE} built a model with linear layers before hal was asked")
        return model
    from hal_sglang import members

    members.join(model, session)
    for line in session.lines():
        logging.getLogger(LOGGER).info(line)
    return model


def wrap_backend(original: Callable[[Any, Any], Any], runner: Any, full: Any) -> Any:
    """Give the linear layers' backend; SGLang's own is never built where `hal` serves."""
    verify()
    session, config = _SERVED.get(runner), ask.state_config(runner.model_config)
    if session is None:
        if config is not None:
            raise HalError(f"{ENGINE} builds a linear backend for a model hal was not asked about")
        return original(runner, full)
    if not session.members:
        raise HalError(f"{ENGINE} loaded a model past the seam where hal takes its layers in")
    from hal_sglang.backend import hybrid

    return hybrid(runner, full, config.full_attention_layer_ids, session)


def forget(original: Callable[..., Any], updater: Any, *given: Any, **named: Any) -> Any:
    """Bind anew after an update of weights: a provider may have laid them out its own way."""
    try:
        return original(updater, *given, **named)
    finally:
        forget_all()


_UPDATER: Final = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_UPDATES: Final = (
    "update_weights_from_disk",
    "load_weights_from_distributed",
    "end_weight_update",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)
HOOKS: Final = {
    "sglang.srt.server_args.ServerArgs.check_server_args": check_arguments,
    "sglang.srt.model_executor.model_runner.ModelRunner.load_model": load_model,
    "sglang.srt.model_loader.loader._initialize_model": build_model,
    "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper": wrap_backend,
    **{f"{_UPDATER}.{name}": forget for name in _UPDATES},
}
"""Functions of SGLang, each with what goes around it."""


def register() -> None:
    """Put every hook around its function."""
    registry, around = find(REGISTRY), find(f"{HOOK_TYPE}.AROUND")
    for target, hook in HOOKS.items():
        if hook not in [held for _, held, _ in registry._hooks.get(target, ())]:
            registry.register(target, hook, around)


def verify() -> None:
    """Refuse an SGLang of another version, or one in which a hook is not where it should be.

    A hook that another plugin wraps counts as there; one that another plugin replaced does not.
    """
    PIN.check(str(find("sglang.__version__")))
    patched = find(REGISTRY)._patched
    for target, hook in HOOKS.items():
        if target not in patched or not _reaches(find(target), hook):
            raise moved(target, HalError("hal's hook is not in place"))


def _reaches(function: Any, hook: object) -> bool:
    """Whether a wrapper or one that it wraps calls the hook."""
    while wrapped := vars(function).get("__wrapped__"):
        if any(cell.cell_contents is hook for cell in function.__closure__ or ()):
            return True
        function = wrapped
    return False


@contextmanager
def _building(session: Session) -> Iterator[None]:
    token = _BUILDING.set(session)
    try:
        yield
    finally:
        _BUILDING.reset(token)
