"""What a manifest does not declare: needs one beyond its borders, and the code they must get."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hal.cli.matrix import example
from hal.decision import Question
from hal.device import Device
from hal.model import read
from hal.model.families import FAMILIES
from hal.options import Options, Speculative
from hal.requirements import requirements
from hal.selection import Explanation, judge_only
from hal.testing.borders import other, outside, pairs_outside
from hal.testing.plan import ADMISSIONS
from hal_registry import (
    DTYPES,
    OPERATIONS,
    Candidate,
    Code,
    Manifest,
    Offer,
    Registry,
    Requirement,
    interface_of,
)
from hal_registry.vocabulary import ACTIVATIONS, FEATURES, GATES, KINDS, VERIFY

WHY: Final = "the conformance kit"


@dataclass(frozen=True, slots=True)
class Beyond:
    """A need that nothing declares, and the code that refuses it."""

    operation: str
    label: str
    need: Requirement
    code: Code

    def __str__(self) -> str:
        """What the refusal is called in reports."""
        return f"{self.operation}: {self.label}"


def missing(manifest: Manifest) -> Iterator[Beyond]:
    """Every operation that is not offered."""
    for operation in OPERATIONS:
        if operation not in manifest.offers:
            known = interface_of(operation) in manifest.interfaces
            code = Code.OPERATION_MISSING if known else Code.INTERFACE_MISSING
            yield Beyond(operation, str(code), Requirement(operation, WHY), code)


def beyond(manifest: Manifest) -> Iterator[Beyond]:
    """One need beyond every border of every declared field, the empty ones included."""
    for operation, offer in manifest.offers.items():
        for name, (code, values) in _FIELDS.items():
            for value in values(offer, manifest):
                shown = value[0] if name in _PLURAL else value
                need = Requirement(operation, WHY, **{name: value})
                yield Beyond(operation, f"{name}={shown}", need, code)


_Values = Callable[[Offer, Manifest], list[Any]]
_PLURAL: Final = ("state_dtypes", "gates", "features")


def _grids(offer: Offer) -> list[int]:
    """A granularity finer than any that is offered; any at all where none is."""
    if not offer.track:
        return [0]
    return [min(offer.track) - 1] if min(offer.track) > 1 else []


_ASKED: Final = tuple(word for word in FEATURES if word not in ADMISSIONS)
_SHAPE, _DTYPE, _MODE = Code.SHAPE_UNSUPPORTED, Code.DTYPE_UNSUPPORTED, Code.MODE_UNSUPPORTED
_FIELDS: Final[Mapping[str, tuple[Code, _Values]]] = {
    "dtype": (_DTYPE, lambda o, _: [other(o.dtypes, DTYPES)]),
    "state_dtypes": (_DTYPE, lambda o, _: [(other(o.state_dtypes, DTYPES),)]),
    "gates": (_SHAPE, lambda o, _: [(other(o.gates, GATES),)]),
    "kind": (_SHAPE, lambda o, _: [other(o.kinds, KINDS)]),
    "activation": (_SHAPE, lambda o, _: [other(o.activations, ACTIVATIONS)]),
    "head_dims": (_SHAPE, lambda o, _: pairs_outside(o.head_dims)),
    "ratio": (_SHAPE, lambda o, _: outside(o.ratios)),
    "width": (_SHAPE, lambda o, _: outside(o.widths)),
    "state_size": (_SHAPE, lambda o, _: outside(o.state_sizes)),
    "verify": (_MODE, lambda o, _: [other(o.verify, VERIFY)]),
    "verify_width": (_MODE, lambda o, _: outside(o.verify_widths)),
    "track": (_MODE, lambda o, _: _grids(o)),
    "features": (_MODE, lambda o, _: [(other(o.features, _ASKED),)]),
    "arch": (Code.ARCH_UNSUPPORTED, lambda o, m: [other(o.arches or m.arches, ())]),
}

OPTIONS: Final[Mapping[str, Options]] = {
    "plain": Options(),
    "float32": Options(dtype="float32"),
    "float16": Options(dtype="float16"),
    "state in bfloat16": Options(state_dtype="bfloat16"),
    "prefixes": Options(prefix_cache=True),
    "graphs": Options(graphs=True),
    "chain of 3": Options(speculative=Speculative(3)),
    "tree of 5": Options(speculative=Speculative(5, tree=True)),
}
"""What a run may ask for beside the model."""


def asked(candidate: Candidate, family: str, options: Options) -> Explanation:
    """The answer for a family of a usual size where this candidate is all there is."""
    device, registry = Device(candidate.manifest.device), Registry((candidate,))
    return judge_only(Question(device, example(family), options, registry))


def lacking(candidate: Candidate, family: str, options: Options) -> set[str]:
    """The operations that the family has to have and the manifest does not offer."""
    needs = requirements(read(example(family)), options)
    return {n.operation for n in needs if not n.optional} - set(candidate.manifest.offers)


def families() -> list[str]:
    """The families that a config can be made of, by name."""
    return sorted(FAMILIES)


def served(candidate: Candidate) -> list[str]:
    """The families that the candidate serves alone."""
    return [name for name in families() if asked(candidate, name, Options()).fits]
