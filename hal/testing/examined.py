"""What a suite is about: its candidate, whether it can run here, and its plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from hal.testing import refusals
from hal.testing.plan import Plan, Trial
from hal.testing.subject import Absent, Subject
from hal_registry import Candidate, default_registry

if TYPE_CHECKING:
    from hal.testing.suite import ProviderSuite


@dataclass(frozen=True, slots=True, eq=False)
class Examined:
    """A provider, looked up once for a suite; `problem` says why there is none."""

    candidate: Candidate | None
    subject: Subject | Absent
    plan: Plan = field(default_factory=Plan)
    problem: str = ""

    @property
    def arch(self) -> str:
        """The arch of the device that was found, or nothing."""
        return self.subject.presence.arch if isinstance(self.subject, Subject) else ""

    def tests(self, operation: str) -> bool:
        """Whether an offered operation has at least one case."""
        interface, _, verb = operation.partition(".")
        verified = {trial.operation for trial in self.plan.verify}
        if interface != "conv_state" and verb in ("verify", "commit"):
            return f"{interface}.verify" in verified
        return operation in self.plan.base or operation in WITHOUT_TOKENS


WITHOUT_TOKENS: Final = frozenset({"conv_state.step"})
"""Operations that the sidecar's test and the runtime's own tests hold."""


@cache
def examine(suite: type[ProviderSuite]) -> Examined:
    """Look the suite's provider up, probe its device and plan its tests."""
    registry = suite.registry or default_registry()
    found = [c for c in registry.candidates if c.name == suite.provider]
    if not found:
        faults = [str(f.reason()) for f in registry.faults if f.name == suite.provider]
        known = ", ".join(c.name for c in registry.candidates) or "none"
        problem = "; ".join(faults) or f"{suite.provider!r} is not installed, installed: {known}"
        return Examined(None, Absent(problem), problem=problem)
    subject = Subject.find(found[0], suite.stand_in)
    arch = subject.presence.arch if isinstance(subject, Subject) else ""
    return Examined(found[0], subject, Plan.of(found[0].manifest, arch))


def _pairs(examined: Examined) -> list[tuple[Trial, Trial]]:
    """Prefill and decode of an interface where both take the same arguments."""
    return [
        (trials[op], trials[other])
        for trials in (examined.plan.base, examined.plan.corners)
        for op in trials
        if op.endswith(".prefill") and (other := op.replace("prefill", "decode")) in trials
    ]


def _corners(examined: Examined, *ends: str) -> list[Trial]:
    """The trials of the last words, of operations whose names end so."""
    return [t for t in examined.plan.corners.values() if t.operation.endswith(ends)]


def _drafts(examined: Examined) -> list[Trial]:
    """The first trial of each verify operation."""
    first: dict[str, Trial] = {}
    for trial in examined.plan.verify:
        first.setdefault(trial.operation, trial)
    return [*first.values()]


def _with_feature(examined: Examined, word: str) -> list[Trial]:
    """The first trial of each operation that declares a feature, and that of its corner."""
    trials = (*examined.plan.base.values(), *_drafts(examined), *_corners(examined, ""))
    return [trial for trial in trials if word in trial.offer.features]


def _first_of_each_dtype(trials: list[Trial]) -> list[Trial]:
    """One trial for every operation and dtype."""
    first: dict[tuple[str, str], Trial] = {}
    for trial in trials:
        first.setdefault((trial.operation, trial.settings["dtype"]), trial)
    return [*first.values()]


_PACKED: Final = (".prefill", ".prefill_fused", ".verify")
"""How the names of operations end that take rows of any length; drafts last."""


def _of(values: Callable[[Candidate], list[Any]]) -> Callable[[Examined], list[Any]]:
    return lambda examined: values(examined.candidate) if examined.candidate else []


PARAMETERS: Final[Mapping[str, Callable[[Examined], list[Any]]]] = {
    "any_trial": lambda e: e.plan.trials,
    "trial": lambda e: [*e.plan.base.values(), *_drafts(e), *_corners(e, "")],
    "plain_trial": lambda e: [*e.plan.base.values(), *_drafts(e)],
    "packed_trial": lambda e: (
        [t for t in e.plan.base.values() if not t.decode] + _drafts(e) + _corners(e, *_PACKED)
    ),
    "dtype_trial": lambda e: _first_of_each_dtype([*e.plan.trials, *e.plan.verify]),
    "prefill_trial": lambda e: (
        [t for t in e.plan.base.values() if not t.decode] + _corners(e, *_PACKED[:2])
    ),
    "decode_trial": lambda e: [t for t in e.plan.base.values() if t.decode],
    "strided_trial": lambda e: _with_feature(e, "strided"),
    "graph_trial": lambda e: _with_feature(e, "graph"),
    "track_trial": lambda e: [
        t for t in (*e.plan.base.values(), *_corners(e, "")) if t.offer.track and not t.decode
    ],
    "verify_trial": lambda e: e.plan.verify,
    "plain_verify_trial": _drafts,
    "pair": _pairs,
    "joint": lambda e: e.plan.refused,
    "offered": _of(lambda c: [*c.manifest.offers]),
    "sidecar": _of(lambda c: ["conv_state.step"] * ("conv_state.step" in c.manifest.offers)),
    "beyond": _of(lambda c: [*refusals.beyond(c.manifest)]),
    "not_offered": _of(lambda c: [*refusals.missing(c.manifest)]),
    "family": _of(lambda _: refusals.families()),
    "served": _of(lambda c: refusals.served(c)[:3]),
}
"""The arguments of the kit's tests, and their values for a provider."""


def operation_of(values: Mapping[str, Any]) -> str:
    """The operation that a test with these arguments runs; none for tests of the declaration."""
    for name, value in values.items():
        if name == "pair":
            return str(value[0].operation)
        if name == "sidecar":
            return str(value)
        if isinstance(value, Trial) and name != "joint":
            return value.operation
    return ""


def label(value: Any) -> str:
    """The name of a value in a test's name."""
    return str(value[0]) if isinstance(value, tuple) else str(value)
