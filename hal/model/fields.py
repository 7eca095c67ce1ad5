"""Typed access to the entries of one config, with spelling variants, family defaults and bounds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeGuard

from hal.errors import ConfigError
from hal.model.spec import DTYPE_BYTES

MAX_LAYERS: Final = 10_000
"""Most layers, and most entries of any list, that a config may name."""

MAX_DIM: Final = 1 << 24
"""Largest width, head count or size that is taken for real."""


def shown(value: object) -> str:
    """Describe a value found in a config, briefly whatever its size or depth."""
    match value:
        case None:
            return "nothing"
        case str():
            return repr(value[:40]) + "..." * (len(value) > 40)
        case int() | float():
            big = isinstance(value, int) and value.bit_length() > 64
            return "an integer beyond 64 bits" if big else repr(value)
        case list() | tuple():
            return f"a list of {len(value)}"
    return "a mapping" if isinstance(value, Mapping) else f"a {type(value).__name__}"


def whole(value: object, low: int, high: int) -> TypeGuard[int]:
    """Tell an integer from `low` to `high`; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


@dataclass(frozen=True, slots=True)
class Fields:
    """The entries of one text config, with the values that its family takes where none is given.

    Of several spellings the first that is present and not null wins, then the family's default.
    """

    data: Mapping[str, object]
    model_type: str
    defaults: Mapping[str, object] = field(default_factory=dict)
    prefix: str = ""

    def error(self, name: str, need: str, found: str | None = None) -> ConfigError:
        """Make the error that names an entry, what it needs and what was found."""
        label, found = self.prefix + name, found or shown(self.data.get(name))
        return ConfigError(f"{self.model_type}: {label} must be {need}, found {found}", label)

    def disagree(self, first: str, second: str, what: str) -> ConfigError:
        """Make the error for two entries that contradict each other."""
        text = f"{self.model_type}: {first} and {second} disagree: {what}; remove the stale one"
        return ConfigError(text, first)

    def name(self, *names: str) -> str | None:
        """Return the first of the spellings that is present and not null."""
        return next((name for name in names if self.data.get(name) is not None), None)

    def null(self, name: str) -> bool:
        """Tell an explicit null, which some classes read as "derive it", from an absent entry."""
        return name in self.data and self.data[name] is None

    def value(self, *names: str) -> tuple[str, object]:
        """Return the spelling that holds and its value, or the first spelling and None."""
        for source in (self.data, self.defaults):
            for name in names:
                if source.get(name) is not None:
                    return name, source[name]
        return names[0], None

    def optional(self, *names: str, low: int = 1, high: int = MAX_DIM) -> int | None:
        """Return an integer from `low` to `high`, or None where no spelling is present."""
        present = self.value(*names)[1] is not None
        return self.integer(*names, low=low, high=high) if present else None

    def integer(self, *names: str, low: int = 1, high: int = MAX_DIM) -> int:
        """Return an integer from `low` to `high`; it has to be there."""
        name, value = self.value(*names)
        if not whole(value, low, high):
            raise self.error(name, f"an integer from {low} to {high}")
        return value

    def automatic(self, name: str) -> int | None:
        """Return an integer, or None for absent, null and the word "auto"."""
        return None if self.value(name)[1] == "auto" else self.optional(name)

    def flag(self, *names: str) -> bool | None:
        """Return true or false, or None where no spelling is present."""
        name, value = self.value(*names)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def number(self, *names: str) -> float | None:
        """Return a number, infinities included, or None where no spelling is present."""
        name, value = self.value(*names)
        return None if value is None else self._number(name, value)

    def limits(self, name: str) -> tuple[float, float]:
        """Return a (low, high) pair of non-negative numbers, (0, inf) where it is absent."""
        pair = self.items(name)
        found = [self._number(name, item) for item in (pair if pair is not None else (0, math.inf))]
        if len(found) != 2 or not 0 <= found[0] <= found[1]:
            raise self.error(name, "a pair of numbers, 0 <= low <= high")
        return found[0], found[1]

    def items(self, name: str) -> Sequence[object] | None:
        """Return a list of at most `MAX_LAYERS` entries of any type, or None if it is absent."""
        value = self.value(name)[1]
        if value is not None and (not isinstance(value, list | tuple) or len(value) > MAX_LAYERS):
            raise self.error(name, f"a list of at most {MAX_LAYERS}")
        return value

    def strings(self, name: str) -> list[str] | None:
        """Return a list of strings, or None where the entry is absent."""
        items = self.items(name)
        for item in items or ():
            if not isinstance(item, str):
                raise self.error(name, "a list of strings", f"{shown(item)} in it")
        return None if items is None else [str(item) for item in items]

    def integers(self, name: str, low: int, high: int) -> list[int] | None:
        """Return a list of integers from `low` to `high`, or None where the entry is absent."""
        items = self.items(name)
        found = [item for item in items or () if whole(item, low, high)]
        if len(found) < len(items or ()):
            bad = next(item for item in items or () if not whole(item, low, high))
            need = f"a list of integers from {low} to {high}"
            raise self.error(name, need, f"{shown(bad)} in it")
        return None if items is None else found

    def section(self, name: str) -> "Fields":
        """Return a nested mapping as fields; an absent one has no entries."""
        value = self.data.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(name, "a mapping")
        return Fields(value or {}, self.model_type, prefix=f"{self.prefix}{name}.")

    def dtype(self, *names: str) -> str | None:
        """Return the name of a floating dtype, with or without "torch.", or None if absent."""
        name, value = self.value(*names)
        word = str(value) if type(value).__module__ == "torch" else value
        word = word.removeprefix("torch.") if isinstance(word, str) else word
        if word is not None and (not isinstance(word, str) or word not in DTYPE_BYTES):
            raise self.error(name, f"one of {', '.join(DTYPE_BYTES)}")
        return word

    def _number(self, name: str, value: object) -> float:
        """Check one number; transformers saves infinity as {"__float__": "Infinity"}."""
        if isinstance(value, Mapping) and value.get("__float__") == "Infinity":
            return math.inf
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, "made of numbers", shown(value))
        if not abs(value) <= MAX_DIM and value != math.inf:
            raise self.error(name, f"made of numbers up to {MAX_DIM}, or infinity", shown(value))
        return float(value)
