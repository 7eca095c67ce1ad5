"""What engines' plugins ask alike: the selection, and ways of running that `hal` does not serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hal.errors import ConfigError
from hal.integrations.engines.refusals import mode
from hal.refusal import Unsupported
from hal_registry import Code, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from hal.selection import Selection

STATELESS: Final = frozenset({Code.FAMILY_UNKNOWN, Code.NOT_HYBRID})
"""What `hal` says of a model without linear layers; the engine then runs it by itself."""


@dataclass(frozen=True, slots=True)
class Feature:
    """A way to run the engine that `hal` does not serve there, and how to see that it is on."""

    name: str
    wanted: Callable[[Any], bool]
    offered: str
    fix: str


def selected(choose: Callable[[], Selection], stateful: bool) -> Selection | None:
    """What `choose` selects; None for a model in which neither side sees linear layers.

    `stateful` says whether the engine keeps a state for the model; its refusal is then raised.
    """
    try:
        return choose()
    except Unsupported as refused:
        if stateful or not {each.code for each in refused.reasons} <= STATELESS:
            raise
    except ConfigError:
        if stateful:
            raise
    return None


def features(known: Iterable[Feature], given: Any, by: str) -> Iterator[Reason]:
    """A reason for every feature that is on in what the engine was `given`, `by` its arguments."""
    for feature in known:
        if feature.wanted(given):
            yield mode(feature.name, by, feature.offered, feature.fix)


def conv_dtype(given: str, dtype: str, fix: str) -> Iterator[Reason]:
    """A reason where the engine was given another dtype for the conv state than the model's."""
    if given != dtype:
        yield Reason(Code.DTYPE_UNSUPPORTED, "conv state", given, dtype, fix=fix)
