"""Hold manifests against requirements: which candidate fits what, and every reason why not."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hal_registry.guard import Failure, attempt
from hal_registry.manifest import Check, Manifest, Offer
from hal_registry.reasons import Code, Reason
from hal_registry.registry import Candidate, broken
from hal_registry.requirement import Requirement
from hal_registry.vocabulary import LAYOUTS, interface_of, states_of


@dataclass(frozen=True, slots=True)
class Judged:
    """A candidate and its reasons by operation; an operation without reasons fits."""

    candidate: Candidate
    reasons: Mapping[str, tuple[Reason, ...]]

    def fits(self, operation: str) -> bool:
        """Whether the candidate can serve the operation."""
        return not self.reasons[operation]

    def all_reasons(self, operations: Collection[str]) -> tuple[Reason, ...]:
        """The reasons for these operations, equal ones once."""
        found = (reason for op in operations for reason in self.reasons[op])
        return tuple(dict.fromkeys(found))


def judge(candidate: Candidate, requirements: Sequence[Requirement]) -> Judged:
    """Judge one candidate by data alone: no torch, no vendor library, no device."""
    reasons: dict[str, list[Reason]] = {need.operation: [] for need in requirements}
    for need in requirements:
        reasons[need.operation] += _against(candidate, need, requirements)
    return Judged(candidate, {op: tuple(dict.fromkeys(found)) for op, found in reasons.items()})


def _against(
    candidate: Candidate, need: Requirement, all_needs: Sequence[Requirement]
) -> Iterator[Reason]:
    manifest = candidate.manifest
    offer = manifest.offers.get(need.operation)
    if offer is None:
        yield _missing(manifest, need, all_needs)
        return
    yield from _layouts(need, offer)
    for rule in _RULES:
        yield from rule.apply(need, offer, manifest)
    if manifest.check is not None:
        yield from _vendor(candidate, manifest.check, need)


def _missing(manifest: Manifest, need: Requirement, all_needs: Sequence[Requirement]) -> Reason:
    """The whole interface is missing, which is one finding, or only this operation of it."""
    interface = interface_of(need.operation)
    siblings = [name for name in manifest.offers if interface_of(name) == interface]
    same = [n for n in all_needs if interface_of(n.operation) == interface and not n.optional]
    whys = dict.fromkeys(n.why for n in (same or [need]))
    whole = not siblings
    subject = interface if whole else need.operation
    return Reason(
        Code.INTERFACE_MISSING if whole else Code.OPERATION_MISSING,
        subject,
        needed=", ".join(whys) if whole else need.why,
        offered=", ".join((manifest.interfaces if whole else siblings) or ["nothing"]),
        fix=f"install a provider for {manifest.device} that offers {subject}",
    )


def _layouts(need: Requirement, offer: Offer) -> Iterator[Reason]:
    """An operation has to know some layout of every state that it touches, of those asked for."""
    for place, state in enumerate(states_of(need.operation)):
        asked = need.layouts if place == 0 and need.layouts else LAYOUTS[state]
        if not set(asked) & set(offer.layouts):
            known = [name for name in offer.layouts if name in LAYOUTS[state]]
            yield _reason(
                Code.LAYOUT_UNSUPPORTED,
                need,
                f"{state} layout {show(asked, ' or ')}",
                f"{state} layout {show(known)}",
            )


def _vendor(candidate: Candidate, check: Check, need: Requirement) -> Iterator[Reason]:
    """The vendor's own constraints; a check that fails speaks against its plugin alone."""
    found = attempt(lambda: list(check(need)))
    if isinstance(found, list) and all(isinstance(reason, Reason) for reason in found):
        yield from found
    else:
        text = found.text if isinstance(found, Failure) else repr(found)
        yield broken(candidate.name, "reasons from its check", text)


def _reason(code: Code, need: Requirement, needed: str, offered: str) -> Reason:
    fix = f"use a provider that offers {need.operation} with {needed}"
    return Reason(code, need.operation, f"{needed} ({need.why})", offered, fix=fix)


def _has(value: Any, offered: Collection[Any]) -> bool:
    return value in offered


def _has_dims(pair: Any, offered: Collection[Any]) -> bool:
    """A (K, V) pair is offered as such, or each of its dims by itself."""
    return pair in offered or all(dim in offered for dim in pair)


def _has_grid(grid: Any, offered: Collection[Any]) -> bool:
    """Any offered granularity that divides the needed one will do; 0 takes whatever there is."""
    return any(grid % step == 0 for step in offered)


@dataclass(frozen=True, slots=True)
class _Rule:
    """A field that requirements name, and the field of an offer that has to hold its value."""

    code: Code
    word: str
    need: str
    offer: str
    has: Callable[[Any, Collection[Any]], bool] = _has

    def apply(self, need: Requirement, offer: Offer, manifest: Manifest) -> Iterator[Reason]:
        """The reason why the offer does not hold what is needed, if it does not."""
        value = getattr(need, self.need)
        if value in (None, "", ()):
            return
        any_of, all_of = self.need in _ANY_OF, self.need == "features"
        needed = value if any_of or all_of else (value,)
        offered = getattr(offer, self.offer) or getattr(manifest, self.offer, ())
        missing = [item for item in needed if not self.has(item, offered)]
        if missing and not (any_of and len(missing) < len(needed)):
            words = f"{self.word} {show(missing, ' or ' if any_of else ', ')}"
            yield _reason(self.code, need, words, f"{self.word} {show(offered)}")


_ANY_OF: Final = ("state_dtypes", "gates")
"""Fields of a requirement that hold alternatives."""

_RULES: Final = (
    _Rule(Code.ARCH_UNSUPPORTED, "arch", "arch", "arches"),
    _Rule(Code.DTYPE_UNSUPPORTED, "dtype", "dtype", "dtypes"),
    _Rule(Code.DTYPE_UNSUPPORTED, "state dtype", "state_dtypes", "state_dtypes"),
    _Rule(Code.SHAPE_UNSUPPORTED, "gate", "gates", "gates"),
    _Rule(Code.SHAPE_UNSUPPORTED, "kind", "kind", "kinds"),
    _Rule(Code.SHAPE_UNSUPPORTED, "activation", "activation", "activations"),
    _Rule(Code.SHAPE_UNSUPPORTED, "head dims", "head_dims", "head_dims", _has_dims),
    _Rule(Code.SHAPE_UNSUPPORTED, "HV/H", "ratio", "ratios"),
    _Rule(Code.SHAPE_UNSUPPORTED, "conv width", "width", "widths"),
    _Rule(Code.SHAPE_UNSUPPORTED, "state size", "state_size", "state_sizes"),
    _Rule(Code.MODE_UNSUPPORTED, "verify", "verify", "verify"),
    _Rule(Code.MODE_UNSUPPORTED, "verify width", "verify_width", "verify_widths"),
    _Rule(Code.MODE_UNSUPPORTED, "prefix tracking granularity", "track", "track", _has_grid),
    _Rule(Code.MODE_UNSUPPORTED, "feature", "features", "features"),
)


def show(values: Collection[Any], joiner: str = ", ") -> str:
    """A set, tuple or range in words: "2..8", "float32, bfloat16", "64 x 96", "none"."""
    if isinstance(values, range) and len(values) > 2:
        step = f" step {values.step}" if values.step != 1 else ""
        return f"{values[0]}..{values[-1]}{step}"
    words = sorted(values, key=str) if isinstance(values, (set, frozenset)) else values
    return joiner.join(_word(value) for value in words) or "none"


def _word(value: object) -> str:
    if isinstance(value, tuple):
        return " x ".join(str(part) for part in value)
    return "any" if value == 0 else str(value)
