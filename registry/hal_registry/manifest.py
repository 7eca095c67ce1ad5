"""What a plugin declares: one manifest, its offers by operation, and the proofs behind them."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Literal

from hal_registry import vocabulary as words
from hal_registry.reasons import Reason
from hal_registry.requirement import Requirement

Values = Collection[str]
Ints = Collection[int]
Check = Callable[[Requirement], Iterable[Reason]]


class ManifestError(ValueError):
    """A manifest that says something impossible; the text names the field and what it expects."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What one operation can do, as sets and ranges. A field left out refuses all that names it.

    `layouts` is in order of preference. `head_dims` holds dims that K and V (or P) may each have,
    or (K, V) pairs. `ratios` is HV / H. `track` holds granularities of prefix tracking: 1 for any
    position, 64 for multiples of 64. `arches` narrows the manifest's.
    """

    dtypes: Values = ()
    state_dtypes: Values = ()
    layouts: Values = ()
    gates: Values = ()
    kinds: Values = ()
    activations: Values = ()
    head_dims: Ints | Collection[tuple[int, int]] = ()
    ratios: Ints = ()
    widths: Ints = ()
    state_sizes: Ints = ()
    verify: Values = ()
    verify_widths: Ints = ()
    track: Ints = ()
    features: Values = ()
    arches: Values = ()


@dataclass(frozen=True, slots=True)
class Proof:
    """How an operation was shown to be right, for one arch and dtype.

    `hardware` ran on the device, `interpreter` ran the same source elsewhere, `compiled` was only
    built. `report` names the document, `date` and `versions` say when and with what; proofs by
    hardware have all three.
    """

    operation: str
    dtype: str
    level: Literal["hardware", "interpreter", "compiled"]
    arch: str = ""
    date: str = ""
    versions: str = ""
    report: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A provider as data: read without torch, without the vendor's libraries and the device.

    `load` and `probe` are dotted paths "module:name", imported only after the manifest has won.
    `needs` are version requirements of libraries, `hints` say how to get those that are not on
    PyPI. `check` adds constraints that sets cannot say; a function of a module, so that what holds
    the manifest can be pickled. Higher `priority` wins, 0 is the ordinary. Without `probe` there is
    one device.
    """

    name: str
    device: str
    api: tuple[int, int]
    load: str
    offers: Mapping[str, Offer]
    probe: str = ""
    needs: tuple[str, ...] = ()
    hints: Mapping[str, str] = field(default_factory=dict)
    arches: tuple[str, ...] = ()
    priority: int = 0
    note: str = ""
    check: Check | None = None
    proofs: tuple[Proof, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a manifest that cannot be meant, and freeze its mappings."""
        for name, (fits, expected) in _FORMS.items():
            _hold(fits(getattr(self, name)), self, name, expected, getattr(self, name))
        named = self.name.startswith(f"{self.device}.") and self.name != f"{self.device}."
        _hold(named, self, "name", f"'{self.device}.<flavour>'", self.name)
        if words.speaks(self.api):  # the words of another API are its own
            _check_offers(self)
        object.__setattr__(self, "offers", MappingProxyType(dict(self.offers)))
        object.__setattr__(self, "hints", MappingProxyType(dict(self.hints)))

    def __reduce__(self) -> tuple[Callable[[], "Manifest"], tuple[()]]:
        """Pickle and copy by plain dicts: read-only views of them cross no process."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values |= {"offers": dict(self.offers), "hints": dict(self.hints)}
        return partial(type(self), **values), ()

    @property
    def interfaces(self) -> tuple[str, ...]:
        """The interfaces with at least one offered operation, sorted."""
        return tuple(sorted({words.interface_of(name) for name in self.offers}))

    def to_dict(self) -> dict[str, object]:
        """The declaration as plain data; proofs and the check function are not part of it."""
        skipped = {"offers", "check", "proofs", "hints"}
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in skipped}
        offers = {operation: _plain(offer) for operation, offer in sorted(self.offers.items())}
        return {**plain, "hints": dict(self.hints), "offers": offers}

    def digest(self) -> str:
        """SHA-256 of the declaration, so that a report can name what it tested."""
        import hashlib
        import json

        text = json.dumps(self.to_dict(), sort_keys=True, default=list)
        return hashlib.sha256(text.encode()).hexdigest()


def _hold(good: bool, manifest: Manifest, where: str, expected: str, value: object) -> None:
    if not good:
        raise ManifestError(f"{manifest.name}: {where}: expected {expected}, got {value!r}")


def is_text(value: object) -> bool:
    """Whether a plugin gave text."""
    return isinstance(value, str)


def is_count(value: object) -> bool:
    """Whether a plugin gave an integer from 0 up; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_path(value: object) -> bool:
    return isinstance(value, str) and all(value.partition(":")) and value.count(":") == 1


def _is_name(value: object) -> bool:
    return isinstance(value, str) and words.NAME.fullmatch(value) is not None


_CLAUSE: Final = r"(==|!=|<=|>=|<|>)[0-9]+(\.[0-9]+)*"
_PLAIN_NEED: Final = re.compile(rf"[a-z0-9]+(-[a-z0-9]+)*({_CLAUSE}(,{_CLAUSE})*)?")
"""Requirements that `packaging`, whose import costs more than a whole answer, need not look at."""


def _is_need(value: object) -> bool:
    return isinstance(value, str) and bool(_PLAIN_NEED.fullmatch(value) or _parses(value))


def _parses(text: str) -> bool:
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        marker = Requirement(text).marker
        return marker is None or marker.evaluate() in (True, False)
    except (InvalidRequirement, ValueError):  # a marker may compare what cannot be compared
        return False


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(map(is_count, value))


def _all(fits: Callable[[object], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, (tuple, list)) and all(map(fits, value))


_FORMS: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "name": (is_text, "text"),
    "device": (_is_name, "a device type such as 'cuda'"),
    "api": (_is_pair, "(major, minor)"),
    "load": (_is_path, "'module:name'"),
    "offers": (lambda v: isinstance(v, Mapping), "offers by operation"),
    "probe": (lambda v: v == "" or _is_path(v), "'module:name' or nothing"),
    "needs": (_all(_is_need), "a tuple of version requirements, as 'torch>=2.11'"),
    "hints": (
        lambda v: isinstance(v, Mapping) and all(map(is_text, [*v, *v.values()])),
        "texts by library",
    ),
    "arches": (_all(_is_name), "a tuple of names such as 'sm_90'"),
    "priority": (is_count, "an integer from 0 up"),
    "note": (is_text, "text"),
    "check": (lambda v: v is None or callable(v), "a function or nothing"),
    "proofs": (_all(lambda v: isinstance(v, Proof)), "a tuple of Proof"),
}

_KNOWN: Final[Mapping[str, Collection[str]]] = {
    "dtypes": words.DTYPES,
    "state_dtypes": words.DTYPES,
    "layouts": [name for names in words.LAYOUTS.values() for name in names],
    "gates": words.GATES,
    "kinds": words.KINDS,
    "activations": words.ACTIVATIONS,
    "verify": words.VERIFY,
    "features": words.FEATURES,
}


def _check_offers(manifest: Manifest) -> None:
    """Offers use the vocabulary, and proofs are of offered operations."""
    known = f"one of {', '.join(words.OPERATIONS)}"
    for operation, offer in manifest.offers.items():
        _hold(operation in words.OPERATIONS, manifest, "offers", known, operation)
        _hold(isinstance(offer, Offer), manifest, f"offers: {operation}", "an Offer", offer)
        for item in fields(offer):
            where = f"offers: {operation}: {item.name}"
            _check_values(manifest, where, item.name, getattr(offer, item.name))
    for proof in manifest.proofs:
        offered = proof.operation in manifest.offers
        _hold(offered, manifest, "proofs", "an offered operation", proof.operation)
        levels = ", ".join(words.LEVELS)
        _hold(proof.level in words.LEVELS, manifest, "proofs", f"one of {levels}", proof.level)
        told = (proof.date, proof.versions, proof.report)
        whole = all(told) or proof.level != "hardware"
        texts = whole and all(map(is_text, (*told, proof.dtype, proof.arch)))
        _hold(texts, manifest, f"proofs: {proof.operation}", "date, versions and report", told)


def _check_values(manifest: Manifest, where: str, name: str, values: Any) -> None:
    sized = isinstance(values, Collection) and not isinstance(values, (str, bytes, Mapping))
    _hold(sized, manifest, where, "a set, tuple or range", values)
    if isinstance(values, range):
        values = (*values[:1], *values[-1:])  # a long one is as good as its ends
    for value in values:
        if name in _KNOWN:
            expected = f"one of {', '.join(_KNOWN[name])}"
            _hold(value in _KNOWN[name], manifest, where, expected, value)
        elif name == "arches":
            _hold(_is_name(value), manifest, where, "names such as 'sm_90'", value)
        else:
            pair = name == "head_dims" and _is_pair(value)
            _hold(pair or is_count(value), manifest, where, "integers", value)


def _plain(offer: Offer) -> dict[str, object]:
    """An offer as JSON-ready data: ranges as first, last and step, sets sorted, orders kept."""
    return {f.name: _values(getattr(offer, f.name)) for f in fields(offer)}


def _values(value: Collection[object]) -> object:
    if isinstance(value, range):
        return {"first": value[0], "last": value[-1], "step": value.step} if value else []
    return sorted(value, key=str) if isinstance(value, (set, frozenset)) else list(value)
