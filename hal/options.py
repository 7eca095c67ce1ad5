"""The options of a run, checked when they are given."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from hal.model.fields import shown
from hal_registry import DTYPES, OPERATIONS, interface_of

_INTERFACES: Final = frozenset(interface_of(operation) for operation in OPERATIONS)


@dataclass(frozen=True, slots=True)
class Shard:
    """This process's part of a tensor-parallel group: `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        """Refuse a rank outside the group."""
        _integer("tp: rank", self.rank)
        _integer("tp: size", self.size)
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(
                f"tp: rank {self.rank} of {self.size}: expected size >= 1 and 0 <= rank < size"
            )


@dataclass(frozen=True, slots=True)
class Speculative:
    """Verify steps of `width` tokens a row: the newest sampled one and `width` - 1 drafts."""

    width: int
    tree: bool = False

    def __post_init__(self) -> None:
        """Refuse a width that verifies nothing."""
        _integer("speculative: width", self.width)
        _instance("speculative: tree", self.tree, bool, "a bool")
        if self.width < 1:
            raise ValueError(f"speculative: width {self.width}: expected at least 1")


@dataclass(frozen=True, slots=True)
class Options:
    """What a run asks for beyond the model: dtypes, sharding, speculation, tracking, graphs.

    `prefix_cache` is False, True (any granularity that is offered) or the granularity needed.
    `ready_gates` says that the caller hands over log decay and beta instead of raw projections.
    """

    dtype: str | None = None
    state_dtype: str | None = None
    tp: Shard = field(default_factory=Shard)
    speculative: Speculative | None = None
    prefix_cache: bool | int = False
    graphs: bool = False
    providers: Mapping[str, str] = field(default_factory=dict)
    ready_gates: bool = False

    def __post_init__(self) -> None:
        """Normalise dtype names and refuse values and words that mean nothing."""
        _instance("tp", self.tp, Shard, "hal.Shard(rank, size)")
        if self.speculative is not None:
            _instance("speculative", self.speculative, Speculative, "hal.Speculative(width)")
        _instance("graphs", self.graphs, bool, "a bool")
        _instance("ready_gates", self.ready_gates, bool, "a bool")
        _instance("providers", self.providers, Mapping, "provider names by interface")
        for name in ("dtype", "state_dtype"):
            object.__setattr__(self, name, _dtype(name, getattr(self, name)))
        if not isinstance(self.prefix_cache, bool):
            _integer("prefix_cache: granularity", self.prefix_cache)
            if self.prefix_cache < 1:
                raise ValueError(
                    f"prefix_cache: granularity {self.prefix_cache}: expected at least 1, or a bool"
                )
        object.__setattr__(self, "providers", dict(self.providers))
        for target, name in self.providers.items():
            _instance(f"providers: {target}", name, str, "a provider's name")
            if target not in _INTERFACES and target not in OPERATIONS:
                raise ValueError(
                    f"providers: {target!r} is neither an interface nor an operation; "
                    f"interfaces are {', '.join(sorted(_INTERFACES))}"
                )


def _integer(what: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{what} {shown(value)}: expected an integer")


def _instance(what: str, value: object, kind: type, expected: str) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{what}: got {shown(value)}, expected {expected}")


def _dtype(name: str, value: object) -> str | None:
    """A dtype's name from a string or a torch dtype."""
    if value is None:
        return None
    text = str(value).removeprefix("torch.")
    if text not in DTYPES:
        raise ValueError(f"{name}: got {shown(text)}, expected one of {', '.join(DTYPES)}")
    return text
