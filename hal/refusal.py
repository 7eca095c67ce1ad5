"""The refusal: every reason of every candidate, nearest first, in one text and as data."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hal.errors import HalError
from hal_registry import Candidate, Code, Reason


@dataclass(frozen=True, slots=True)
class Rejected:
    """A candidate, or a plugin that could not be one, and what speaks against it."""

    name: str
    distribution: str
    version: str
    reasons: tuple[Reason, ...]
    note: str = ""

    @classmethod
    def of(cls, candidate: Candidate, reasons: tuple[Reason, ...]) -> "Rejected":
        """A candidate with its reasons and its manifest's note."""
        note = candidate.manifest.note
        return cls(candidate.name, candidate.distribution, candidate.version, reasons, note)

    def __str__(self) -> str:
        """Name, distribution, version and note."""
        note = f": {self.note}" if self.note else ""
        return f"{one_line(self.name)}  " + one_line(f"({self.distribution} {self.version}){note}")

    def to_dict(self) -> dict[str, object]:
        """The candidate and its reasons as plain data."""
        return {
            "name": self.name,
            "distribution": self.distribution,
            "version": self.version,
            "note": self.note,
            "reasons": [reason.to_dict() for reason in self.reasons],
        }


_MISSING: Final = "{subject} is needed by {needed} and {name} does not offer it"
_ALL_MISSING: Final = "{subject} are needed by {needed} and {name} does not offer them"
MAX_LINE: Final = 2000
"""Characters of a line, or of a cell of one, at most; what plugins say may have any length."""

_PHRASES: Final[Mapping[Code, str]] = {
    Code.INTERFACE_MISSING: _MISSING,
    Code.OPERATION_MISSING: _MISSING,
    Code.LIBRARY_MISSING: "{name} needs {needed}, which is {offered}",
    Code.LIBRARY_VERSION: "{name} needs {needed}, installed is {offered}",
    Code.DEVICE_ABSENT: "{name} needs {needed} and found {offered}",
    Code.PLUGIN_BROKEN: "{subject} is broken: {offered}",
    Code.PLUGIN_BLOCKED: "{subject} is {offered}",
    Code.NAME_CONFLICT: "{offered}",
    Code.API_MISMATCH: "{offered}",
    Code.PROTOCOL_VIOLATION: "{subject} of {name} has to be {needed}, found {offered}",
}
"""The first line, by the code of the nearest candidate's first reason."""

_MODEL_PHRASES: Final[Mapping[Code, str]] = {
    Code.PLUGIN_BROKEN: "{subject} is broken: {offered}",
    Code.DEVICE_ABSENT: "no plugin serves {subject}, there are {offered}",
    Code.FAMILY_UNKNOWN: "hal knows no family of that name, and no plugin does",
    Code.NOT_HYBRID: "no layer keeps a conv or recurrent state, it has {offered}",
    Code.SHARD_UNSUPPORTED: "{needed} does not divide {offered} of its {subject} layers",
}
"""The same where the first reason is about the model or the options, not about a candidate."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a model cannot run on a device: the model's own reasons, then those by candidate.

    `alternatives` are (device, provider) pairs that fit by their manifests; where the machine was
    asked, they have their libraries there.
    """

    model_type: str
    device: str
    reasons: tuple[Reason, ...]
    candidates: tuple[Rejected, ...] = ()
    alternatives: tuple[tuple[str, str], ...] = ()

    def all_reasons(self) -> tuple[Reason, ...]:
        """The model's reasons, then every candidate's, nearest candidate first."""
        return self.reasons + tuple(r for c in self.candidates for r in c.reasons)

    def headline(self) -> str:
        """One line that says enough to be read alone in a log."""
        return one_line(f"{self.model_type} cannot run on {self.device}: {self._first()}")

    def _first(self) -> str:
        if self.reasons:
            reason, name = self.reasons[0], ""
            default = "{subject} needs {needed}, offered: {offered}"
            phrase = _MODEL_PHRASES.get(reason.code, default)
        else:
            reason, name = self.candidates[0].reasons[0], self.candidates[0].name
            if reason.code is Code.INTERFACE_MISSING:
                return _missing_interfaces(self.candidates[0])
            phrase = _PHRASES.get(reason.code, "{subject} needs {needed}, {name} offers {offered}")
        return phrase.format(**reason.to_dict(), name=name)

    def fix(self) -> str:
        """What to do: the first fix of the nearest candidate, or a device that fits."""
        first = next((reason.fix for reason in self.all_reasons() if reason.fix), "")
        others = ", ".join(f'"{device}" ({name} fits)' for device, name in self.alternatives)
        return ", or ".join(part for part in (first, others and f"use device {others}") if part)

    def to_dict(self) -> dict[str, object]:
        """The refusal as plain data."""
        return {
            "fits": False,
            "model_type": self.model_type,
            "device": self.device,
            "headline": self.headline(),
            "reasons": [reason.to_dict() for reason in self.reasons],
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            "alternatives": [list(pair) for pair in self.alternatives],
            "fix": self.fix(),
        }

    def __str__(self) -> str:
        """The whole text: headline, candidates with their reasons, the fix."""
        return "\n".join((self.headline(), *self._body()))

    def _body(self) -> Iterator[str]:
        yield from table(self.reasons)
        for candidate in self.candidates:
            yield f"  {candidate}"
            yield from table(candidate.reasons, indent=4, by=True)
        if fix := self.fix():
            yield one_line(f"Fix: {fix}.", indent=2)


def _missing_interfaces(candidate: Rejected) -> str:
    """All interfaces that are missing in one sentence, with everybody who needs them."""
    missing = [r for r in candidate.reasons if r.code is Code.INTERFACE_MISSING]
    whys = dict.fromkeys(why for reason in missing for why in reason.needed.split(", "))
    *others, last = [reason.subject for reason in missing]
    subject = f"{', '.join(others)} and {last}" if others else last
    phrase = _ALL_MISSING if others else _MISSING
    return phrase.format(subject=subject, needed=", ".join(whys), name=candidate.name)


def one_line(text: str, indent: int = 0) -> str:
    """A text without line breaks and control characters, which names from outside may hold."""
    kept = text[:MAX_LINE] + "..." * (len(text) > MAX_LINE)
    printable = "".join(c if c.isprintable() else " " for c in kept)
    return " " * indent + " ".join(printable.split())


def table(reasons: Sequence[Reason], indent: int = 2, *, by: bool = False) -> Iterator[str]:
    """Reasons as lines with aligned columns: code, subject, needed, offered.

    `by` says that what is missing is needed by somebody, as a candidate's reasons tell it.
    """
    rows = [tuple(map(one_line, _cells(reason, by))) for reason in reasons]
    widths = [min(48, max(map(len, column))) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
        yield (" " * indent + "  ".join(cells)).rstrip()


def _cells(reason: Reason, by: bool) -> tuple[str, ...]:
    missing = reason.code in (Code.INTERFACE_MISSING, Code.OPERATION_MISSING)
    needed = f"needed by {reason.needed}" if by and missing else f"needed: {reason.needed}"
    detail = f"({reason.detail})" if reason.detail else ""
    return f"[{reason.code}]", reason.subject, needed, f"offered: {reason.offered}", detail


class Unsupported(HalError, NotImplementedError):
    """A model that cannot run on a device as asked; raised before anything runs.

    `.refusal` holds the report; `.reasons` and `.candidates` are its parts.
    """

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal

    def __reduce__(self) -> tuple[type["Unsupported"], tuple[Refusal]]:
        """Pickle by the report, so that it crosses a process boundary whole."""
        return type(self), (self.refusal,)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Every reason, the model's first, then those of the nearest candidate."""
        return self.refusal.all_reasons()

    @property
    def candidates(self) -> tuple[Rejected, ...]:
        """The candidates with their reasons, nearest first."""
        return self.refusal.candidates

    def to_dict(self) -> dict[str, object]:
        """The refusal as plain data."""
        return self.refusal.to_dict()


Unsupported.__module__ = "hal"  # a traceback names it as callers import it
