"""Choose the providers: the best joint assignment over operations that share state."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from hal_registry.judge import Judged, show
from hal_registry.manifest import Offer
from hal_registry.reasons import Code, Reason
from hal_registry.registry import Candidate
from hal_registry.requirement import Requirement
from hal_registry.vocabulary import DTYPES, LAYOUTS, SCRATCH, TOGETHER, interface_of, states_of

States = Mapping[str, tuple[str, str]]
"""The layout and dtype of every state; the dtype is "" where no requirement names one."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """A provider for every operation, and the layout and dtype of every state they share.

    An optional operation that nobody serves is absent from `choices`; a state whose dtype no
    requirement names is absent from `state_dtypes`.
    """

    choices: Mapping[str, Candidate]
    layouts: Mapping[str, str]
    state_dtypes: Mapping[str, str]


def assign(
    judged: Sequence[Judged],
    requirements: Sequence[Requirement],
    overrides: Mapping[str, str] | None = None,
) -> Assignment | None:
    """The assignment of highest total priority under which shared states agree, or None.

    Once the states are fixed, groups of operations choose independently; so all layouts and dtypes
    of the states are tried, and no greedy pick can refuse what fits. Ties go to the assignment that
    serves more operations, then to preferred layouts, to the provider that serves more, by name.
    `overrides` maps an interface or operation to the only provider allowed.
    """
    problem = _Problem(judged, requirements, overrides or {})
    best: tuple[tuple[int, int, int], Assignment] | None = None
    for states in problem.state_choices():
        found = problem.solve(states)
        if found is not None and (best is None or found[0] > best[0]):
            best = found
    return best[1] if best else None


class _Problem:
    """The operations, who may serve them, and the states they share."""

    def __init__(
        self,
        judged: Sequence[Judged],
        requirements: Sequence[Requirement],
        overrides: Mapping[str, str],
    ) -> None:
        self.requirements = requirements
        self.operations = list(dict.fromkeys(need.operation for need in requirements))
        self.required = {need.operation for need in requirements if not need.optional}
        self.fitting = {
            op: [
                j.candidate
                for j in judged
                if j.fits(op) and wanted(op, overrides) in (None, j.candidate.name)
            ]
            for op in self.operations
        }
        self.states = sorted({state for op in self.operations for state in states_of(op)})

    def state_choices(self) -> Iterator[States]:
        """Every (layout, dtype) of every touched state, in a fixed order."""
        pairs = [list(product(LAYOUTS[state], self.dtypes(state))) for state in self.states]
        return (dict(zip(self.states, chosen, strict=True)) for chosen in product(*pairs))

    def dtypes(self, state: str) -> list[str]:
        """The dtypes that requirements name for a state, "" where none does."""
        own = [n for n in self.requirements if states_of(n.operation)[:1] == (state,)]
        return list(dict.fromkeys(d for n in own for d in n.state_dtypes)) or [""]

    def solve(self, states: States) -> tuple[tuple[int, int, int], Assignment] | None:
        """The best choice for fixed states, with its score."""
        choices: dict[str, Candidate] = {}
        for group in self.groups():
            found = [(c, self._served(c, group, states)) for c in self.able(group)]
            able = [(c, ops) for c, ops in found if self.required.isdisjoint(group - ops)]
            if able:
                chosen, served = min(able, key=lambda pair: self._rank(*pair))
                choices |= {op: chosen for op in self.operations if op in served}
            elif not self.required.isdisjoint(group):
                return None
        layouts = {state: layout for state, (layout, _) in states.items()}
        dtypes = {state: dtype for state, (_, dtype) in states.items() if dtype}
        score = sum(c.manifest.priority for c in choices.values())
        taste = -sum(_preference(c, op, layouts) for op, c in choices.items())
        return (score, len(choices), taste), Assignment(choices, layouts, dtypes)

    def groups(self) -> list[frozenset[str]]:
        """The operations, those together that need one provider."""
        interfaces = {interface_of(op) for op in self.operations}
        groups: dict[str, set[str]] = {}
        for op in self.operations:
            interface, _, verb = op.partition(".")
            key = f"{interface} scratch" if verb in SCRATCH else op
            together = interface in TOGETHER and interfaces >= TOGETHER
            groups.setdefault("together" if together else key, set()).add(op)
        return [frozenset(group) for group in groups.values()]

    def able(self, group: frozenset[str]) -> list[Candidate]:
        """The candidates that fit something in a group, and all of it that is required."""
        found = {c.name: c for op in self.operations if op in group for c in self.fitting[op]}
        needed = [self.fitting[op] for op in group & self.required]
        return [c for c in found.values() if all(c in fitting for fitting in needed)]

    def _served(self, candidate: Candidate, group: frozenset[str], states: States) -> set[str]:
        """The operations of a group that a candidate serves once the states are fixed."""
        mine = {op for op in group if candidate in self.fitting[op]}
        return mine - {
            need.operation
            for need in self.requirements
            if need.operation in mine and not _holds(candidate, need, states)
        }

    def _rank(self, candidate: Candidate, served: set[str]) -> tuple[int, int, int, str]:
        everywhere = sum(candidate in found for found in self.fitting.values())
        priority = candidate.manifest.priority * len(served)
        return -priority, -len(served), -everywhere, candidate.name


def wanted(operation: str, overrides: Mapping[str, str]) -> str | None:
    """The only provider that overrides allow for an operation; its own entry goes first."""
    return overrides.get(operation, overrides.get(interface_of(operation)))


def _holds(candidate: Candidate, need: Requirement, states: States) -> bool:
    """Whether the candidate takes every state that the operation touches as it is fixed here."""
    offer = candidate.manifest.offers[need.operation]
    touched = states_of(need.operation)
    dtype = states[touched[0]][1]
    takes_dtype = dtype in offer.state_dtypes and dtype in need.state_dtypes
    layouts = all(states[state][0] in offer.layouts for state in touched)
    asked = not need.layouts or states[touched[0]][0] in need.layouts
    return layouts and asked and (takes_dtype or not need.state_dtypes)


def _preference(candidate: Candidate, operation: str, layouts: Mapping[str, str]) -> int:
    """How far down the offer's own order the chosen layouts are."""
    order = list(candidate.manifest.offers[operation].layouts)
    return sum(order.index(layouts[state]) for state in states_of(operation))


def clashes(
    judged: Sequence[Judged],
    requirements: Sequence[Requirement],
    overrides: Mapping[str, str] | None = None,
) -> tuple[Reason, ...]:
    """Why no joint assignment exists although every operation fits somewhere by itself."""
    problem = _Problem(judged, requirements, overrides or {})
    required = [op for op in problem.operations if op in problem.required]
    if not all(problem.fitting[op] for op in required):
        return ()
    parted = [_parted(problem, [op for op in required if op in g]) for g in problem.groups()]
    apart = [reason for state in problem.states for reason in _apart(problem, state, required)]
    both = f"{' and '.join(problem.states)} states"
    needed = f"one choice of layouts and dtypes for {', '.join(required)}"
    words = [word for state in problem.states for word in (*LAYOUTS[state], *DTYPES)]
    entangled = _told(problem, Code.LAYOUT_UNSUPPORTED, both, needed, required, words)
    return tuple(reason for reason in (*parted, *apart) if reason) or (entangled,)


def _parted(problem: _Problem, operations: Sequence[str]) -> Reason | None:
    """Operations that need one provider, each served by another one."""
    if not operations or problem.able(frozenset(operations)):
        return None
    subject, needed = ", ".join(operations), "one provider for all of them"
    return _told(problem, Code.OPERATION_MISSING, subject, needed, operations, ())


def _apart(problem: _Problem, state: str, required: Sequence[str]) -> Iterator[Reason]:
    """A state for which the operations' providers have no layout or no dtype in common."""
    dtypes = [dtype for dtype in problem.dtypes(state) if dtype]
    for code, word, known, touched in (
        (Code.LAYOUT_UNSUPPORTED, "layout", LAYOUTS[state], len(problem.states)),
        (Code.DTYPE_UNSUPPORTED, "state dtype", dtypes, 1),
    ):
        sharing = [op for op in required if state in states_of(op)[:touched]]
        held = [
            {w for c in problem.fitting[op] for w in _held(c.manifest.offers[op], known)}
            for op in sharing
        ]
        if known and sharing and not set(known).intersection(*held):
            needed = f"one {word} for {', '.join(sharing)}"
            yield _told(problem, code, f"{state} state", needed, sharing, known)


def _held(offer: Offer, known: Collection[str]) -> list[str]:
    """The layouts and state dtypes of an offer that are among the known."""
    return [word for word in (*offer.layouts, *offer.state_dtypes) if word in known]


def _told(
    problem: _Problem,
    code: Code,
    subject: str,
    needed: str,
    operations: Sequence[str],
    known: Collection[str],
) -> Reason:
    """A clash as a reason: who offers each operation, and what they hold of the known words."""
    offered = []
    for op in operations:
        for c in problem.fitting[op]:
            held = _held(c.manifest.offers[op], known)
            offered.append(f"{c.name} {op}" + (f": {show(held)}" if held else ""))
    fix = "choose providers that share it, or leave the choice to hal"
    return Reason(code, subject, needed, "; ".join(offered), fix=fix)
