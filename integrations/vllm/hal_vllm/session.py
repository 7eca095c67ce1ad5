"""The session of the model that vLLM is building, which its layers join."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from hal.errors import HalError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hal.integrations.engines.session import Session

_BUILDING: ContextVar[Session | None] = ContextVar("hal_vllm_building", default=None)


@contextmanager
def building(session: Session) -> Iterator[Session]:
    """While the engine builds its model, its layers join this session."""
    token = _BUILDING.set(session)
    try:
        yield session
    finally:
        _BUILDING.reset(token)


def joining() -> Session:
    """The session of the model that is being built."""
    session = _BUILDING.get()
    if session is None:
        raise HalError(
            "vLLM built a linear layer outside BaseModelLoader.create_model, where hal decides "
            "who serves it: use the default load format"
        )
    return session
