"""Where the plugin takes hold of vLLM's loaders: `hal` is asked there, and the model looked at."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

from hal.integrations.engines.refusals import mode, refuse
from hal.integrations.engines.session import Session, forget_all
from hal_vllm.question import Place, ask
from hal_vllm.seams import check_backends, find
from hal_vllm.session import building
from hal_vllm.versions import PIN

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGES: Final = ("get_mamba_state_shape_from_config", "get_mamba_state_dtype_from_config")
"""Class methods of a model by which vLLM sizes pages."""

UPDATES: Final = ("reload_weights", "update_weights", "finish_weight_update")
"""Methods of vLLM's worker that change weights under bound layers."""

_MARK: Final = "hal_vllm_original"


def wrap_loaders(announce: Callable[[str], None], place: Callable[[Any], Place]) -> None:
    """Ask `hal` before a model is built, and hold the built one against its answer.

    Both come before any weight is read. Wrapping twice changes nothing.
    """
    home = "vllm.model_executor.model_loader.base_loader"
    base = find(home, "BaseModelLoader")
    find(home, "BaseModelLoader", "create_model")
    find("vllm.model_executor.model_loader", "get_model_loader")  # it imports every loader
    _wrap(base, "create_model", lambda original: _asking(original, announce, place))
    for loader in _below(base):
        if "load_model" in vars(loader):
            _wrap(loader, "load_model", lambda original: _refusing(original, place))


def _wrap(owner: type, name: str, around: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    if _MARK not in vars(original):
        made = wraps(original)(around(original))
        vars(made)[_MARK] = original
        setattr(owner, name, made)


def _below(owner: type) -> Iterator[type]:
    each: type
    for each in owner.__subclasses__():
        yield each
        yield from _below(each)


def _asking(
    original: Any, announce: Callable[[str], None], place: Callable[[Any], Place]
) -> Callable[..., Any]:
    """What goes around the building of a model."""

    def create_model(self: Any, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        selection = ask(vllm_config, place(vllm_config))
        if selection is None:
            return original(self, vllm_config, model_config, prefix=prefix)
        check_backends()
        wrap_updates()
        rows = vllm_config.scheduler_config.max_num_seqs
        made = Session.of(PIN.engine, PIN.distribution, selection, rows)
        key_compiled(vllm_config, made)
        with building(made) as session:
            model = original(self, vllm_config, model_config, prefix=prefix)
        session.check_complete()
        answer_pages(type(model), session)
        for line in session.lines():
            announce(line)
        return model

    return create_model


def _refusing(original: Any, place: Callable[[Any], Place]) -> Callable[..., Any]:
    """What goes around a loader that builds its model elsewhere, where nobody would look at it."""

    def load_model(self: Any, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        if selection := ask(vllm_config, place(vllm_config)):
            given, fix = str(vllm_config.load_config.load_format), "use the default load format"
            offered = "formats that vLLM's BaseModelLoader.load_model loads"
            reason = mode("load format", given, offered, fix)
            raise refuse(selection.model.model_type, f"{selection.device} in {PIN.engine}", reason)
        return original(self, vllm_config, model_config, prefix=prefix)

    return load_model


def wrap_updates() -> None:
    """Bind anew after weights changed in place: gates and rates are computed when layers are bound.

    The worker is imported by the time a model is built; importing it with the plugin would not do.
    """
    home = "vllm.v1.worker.gpu_worker"
    worker = find(home, "Worker")
    for name in UPDATES:
        find(home, "Worker", name)
        _wrap(worker, name, _forgetting)


def _forgetting(original: Any) -> Callable[..., Any]:
    def update(self: Any, *given: Any, **named: Any) -> Any:
        try:
            return original(self, *given, **named)
        finally:
            forget_all()

    return update


def key_compiled(vllm_config: Any, session: Session) -> None:
    """Keep compiled graphs apart from those of the engine alone, which call its own operators.

    vLLM keeps graphs on disk by a hash of its config, in which a dictionary here is a part.
    """
    given = vllm_config.additional_config
    if isinstance(given, dict):
        vllm_config.additional_config = {**given, "hal": [*session.lines()]}


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
