"""One model of one engine process: its selection, its layers, and what they ran."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol
from weakref import WeakKeyDictionary

from hal.errors import HalError
from hal.integrations.engines.refusals import library, refuse
from hal.model.spec import Kind
from hal.runtime.foreign import Attachment
from hal.sharding import LABELS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor

    from hal.runtime.binder import Layer
    from hal.runtime.params import LayerParams
    from hal.runtime.step import Step
    from hal.selection import Choice, Selection
    from hal.states import StateSpec

SESSIONS: Final[WeakKeyDictionary[Session, None]] = WeakKeyDictionary()
"""The live models of this process, the oldest first: a weak set has no order."""


class Member(Protocol):
    """A linear layer of the engine, as its session sees it."""

    @property
    def hal_params(self) -> LayerParams:
        """The loaded weights of this rank."""
        ...

    @property
    def hal_states(self) -> Mapping[str, Tensor]:
        """The layer's state tensors in the engine's pool, by the plan's names."""
        ...


@dataclass(eq=False, slots=True, weakref_slot=True)
class Session:
    """A selection, the engine's layers that joined it, and their bound counterparts.

    `calls` counts by layer kind and mode what the providers were given.
    """

    engine: str
    distribution: str
    selection: Selection
    attachment: Attachment
    members: dict[int, Member] = field(default_factory=dict)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    _bound: dict[int, Layer] = field(default_factory=dict)

    @classmethod
    def of(cls, engine: str, distribution: str, selection: Selection, max_batch: int) -> Session:
        """Build the providers, so that a broken one is seen before the model is."""
        made = cls(engine, distribution, selection, Attachment(selection, max_batch))
        SESSIONS[made] = None
        return made

    def kinds(self) -> dict[int, Kind]:
        """The stateful layers of the model and their kinds."""
        layers = self.selection.model.stateful_layers()
        return {layer.index: layer.stateful for layer in layers if layer.stateful is not None}

    def join(self, index: int, kind: Kind, member: Member) -> None:
        """Take a layer in; one that the config has as something else, or has twice, is an error."""
        found = self.kinds().get(index)
        if found is not kind:
            planned = LABELS[found] if found else "without state"
            text = f"layer {index} is {LABELS[kind]} in {self.engine}, {planned} by its config"
            raise HalError(text)
        if index in self.members:
            raise HalError(f"layer {index} was built twice by {self.engine}")
        self.members[index] = member

    def check_complete(self) -> None:
        """Refuse a model of which a stateful layer did not join: it would run without `hal`."""
        missing = {i: kind for i, kind in self.kinds().items() if i not in self.members}
        if not missing:
            return
        counted = Counter(LABELS[kind] for kind in missing.values())
        named = ", ".join(f"{count} {label} layers" for label, count in counted.items())
        layers = ", ".join(map(str, missing))
        needed = f"layers of {self.engine} that {self.distribution} serves"
        fix = "use a model of a served family, or hal with another engine"
        reason = library(named, needed, f"none for layers {layers}", fix)
        model = self.selection.model.model_type
        raise refuse(model, f"{self.selection.device} in {self.engine}", reason)

    def states(self, index: int) -> tuple[StateSpec, ...]:
        """The plan of a layer's states."""
        return tuple(spec for spec in self.selection.states if spec.layer == index)

    def forget(self) -> None:
        """Bind anew before the next step: weights or state tensors have changed."""
        self._bound.clear()

    def run(self, index: int, step: Step) -> Layer:
        """The bound layer, inside the step; what it serves is counted."""
        if index not in self._bound:
            self._bind()
        self.attachment.enter(step)
        self.calls[str(self.kinds()[index]), str(step.mode)] += 1
        return self._bound[index]

    def _bind(self) -> None:
        for index, member in self.members.items():
            self.attachment.take(index, member.hal_states)
        for index, member in self.members.items():
            self._bound[index] = self.attachment.layer(index, member.hal_params)

    def lines(self) -> Iterator[str]:
        """Who serves which layers, a line for each kind."""
        chosen = self.selection.choices
        for kind, count in Counter(self.kinds().values()).items():
            interfaces = ("delta_rule", "scan") if kind is not Kind.SHORT_CONV else ()
            needed = [op for op in chosen if op.partition(".")[0] in ("conv", *interfaces)]
            yield (
                f"hal: {count} {LABELS[kind]} layers of {self.selection.model.model_type} on "
                f"{self.selection.device} are served by {_names(chosen[op] for op in needed)}"
            )

    def to_dict(self) -> dict[str, object]:
        """The session as plain data."""
        return {
            "engine": self.engine,
            "selection": self.selection.to_dict(),
            "layers": {index: str(kind) for index, kind in self.kinds().items()},
            "calls": {f"{kind} {mode}": count for (kind, mode), count in self.calls.items()},
        }


def _names(choices: Iterable[Choice]) -> str:
    """Providers with their distributions, each once."""
    named = (f"{each.provider} ({each.distribution} {each.version})" for each in choices)
    return ", ".join(dict.fromkeys(named))


def forget_all() -> None:
    """Bind every model anew: weights of one of them may have changed."""
    for session in SESSIONS:
        session.forget()


def report() -> list[dict[str, object]]:
    """What this process served, the oldest first: a live model's selection, layers and calls."""
    return [session.to_dict() for session in SESSIONS]
