"""The decision: read, judge, probe, bind; an assignment or a refusal with every reason."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, cast

from hal import model as models
from hal.device import Device
from hal.model.families import FAMILIES
from hal.model.source import ConfigLike
from hal.model.spec import ModelSpec
from hal.options import Options
from hal.refusal import Refusal, Rejected
from hal.requirements import requirements
from hal.sharding import shard_reasons
from hal_registry import (
    Assignment,
    Candidate,
    Code,
    Failure,
    Judged,
    Reason,
    Registry,
    Requirement,
    assign,
    attempt,
    broken,
    clashes,
    device_presence,
    interface_of,
    judge,
    library_reasons,
    wanted,
)

Examine = Callable[[Judged, Sequence[Requirement], Assignment], Mapping[str, tuple[Reason, ...]]]
"""Looks at a chosen candidate beyond its manifest; gives reasons by operation."""


@dataclass(frozen=True, slots=True)
class Question:
    """A model config, a device and the options of a run, asked of a registry."""

    device: Device
    config: object
    options: Options
    registry: Registry


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer: an assignment, or a refusal; `model` is None where the family is unknown."""

    question: Question
    model: ModelSpec | None
    needs: tuple[Requirement, ...]
    judged: tuple[Judged, ...]
    assignment: Assignment | None
    refusal: Refusal | None


def decide(question: Question, examine: Examine | None = None) -> Decision:
    """Judge all candidates; `examine` probes and binds the chosen, and what fails is left out."""
    failures: list[Reason] = []
    extend = partial(_outside_family, question.registry, failures)
    try:
        model = models.read(cast("ConfigLike", question.config), extend=extend)
    except models.UnknownFamily as error:
        reasons: tuple[Reason, ...] = (_family_unknown(error), *failures)
        refusal = Refusal(_brief(error.model_type), str(question.device), reasons)
        return Decision(question, None, (), (), None, refusal)
    device, options = question.device, question.options
    if reasons := (*_not_hybrid(model), *shard_reasons(model, options.tp.size)):
        refusal = Refusal(model.model_type, str(device), reasons)
        return Decision(question, model, (), (), None, refusal)
    needs = _insist(requirements(model, options, device.arch), options.providers)
    judged = [_judge(c, needs, device) for c in question.registry.on(device.type)]
    own = tuple(_override_reasons(question, needs))
    assignment = None if own else _choose(judged, needs, options.providers, examine)
    here = examine is not None
    refused = None if assignment else _refusal(question, model, needs, judged, own, here)
    return Decision(question, model, needs, tuple(judged), assignment, refused)


def _judge(candidate: Candidate, needs: Sequence[Requirement], device: Device) -> Judged:
    """Judge by data alone, to which the index belongs where there is no probe to ask."""
    judged = judge(candidate, needs)
    if candidate.manifest.probe or not device.index:
        return judged
    there = device_presence(candidate, device.index)
    absent = (there,) if isinstance(there, Reason) else ()
    return _with(judged, dict.fromkeys(judged.reasons, absent))


def _insist(needs: Sequence[Requirement], overrides: Mapping[str, str]) -> tuple[Requirement, ...]:
    """An operation that an override names is required, so that the override cannot be ignored."""
    return tuple(
        replace(need, optional=need.optional and need.operation not in overrides) for need in needs
    )


def _choose(
    judged: list[Judged],
    needs: Sequence[Requirement],
    overrides: Mapping[str, str],
    examine: Examine | None,
) -> Assignment | None:
    """Assign, examine the chosen, and assign again without what failed.

    What an examination finds is added to `judged`, so that a refusal shows it.
    """
    while (assignment := assign(judged, needs, overrides)) is not None:
        chosen = {candidate.name for candidate in assignment.choices.values()}
        examined = [j for j in judged if examine is not None and j.candidate.name in chosen]
        found = {j.candidate.name: examine(j, needs, assignment) for j in examined if examine}
        if not any(found.values()):
            return assignment
        judged[:] = [_with(j, found.get(j.candidate.name, {})) for j in judged]
    return None


def _with(judged: Judged, found: Mapping[str, tuple[Reason, ...]]) -> Judged:
    return replace(
        judged, reasons={op: (*old, *found.get(op, ())) for op, old in judged.reasons.items()}
    )


def _outside_family(
    registry: Registry, failures: list[Reason], config: Mapping[str, object]
) -> ModelSpec | None:
    """Ask the plugins for a family that `hal` does not know; what fails is noted."""
    for plugin, answer in registry.ask("hal_requirements", config):
        checked = attempt(partial(_checked, answer))
        if isinstance(checked, ModelSpec):
            return checked
        if checked is not None:
            text = checked.text if isinstance(checked, Failure) else repr(checked)
            failures.append(broken(plugin, "a ModelSpec from hal_requirements", text))
    return None


def _checked(answer: object) -> object:
    """A hook's answer; a ModelSpec that cannot be read raises here, and not in the decision."""
    if isinstance(answer, ModelSpec):
        requirements(answer, Options())
        shard_reasons(answer, 1)
        if not isinstance(answer.model_type, str):
            raise TypeError(f"model_type: expected text, got {answer.model_type!r}")
    return answer


def _brief(name: str) -> str:
    """A name from outside, cut where it is longer than any that is meant."""
    return name[:40] + "..." * (len(name) > 40)


def _family_unknown(error: models.UnknownFamily) -> Reason:
    return Reason(
        Code.FAMILY_UNKNOWN,
        subject=_brief(error.model_type),
        needed="a family that hal or a plugin knows",
        offered=", ".join(sorted(FAMILIES)),
        fix="install a plugin whose hal_requirements hook describes this family",
    )


def _not_hybrid(model: ModelSpec) -> Iterator[Reason]:
    if not any(model.stateful_layers()):
        kinds = sorted({kind.value for layer in model.layers for kind in layer.kinds})
        yield Reason(
            Code.NOT_HYBRID,
            subject=model.model_type,
            needed="a layer with a conv or recurrent state",
            offered=f"{len(model.layers)} layers of {', '.join(kinds)}",
            fix="serve the model without hal, or correct its layer pattern",
        )


def _override_reasons(question: Question, needs: Sequence[Requirement]) -> Iterator[Reason]:
    """Overrides that name nothing this model needs, or nobody who is there."""
    operations = {need.operation for need in needs}
    interfaces = {interface_of(operation) for operation in operations}
    names = [c.name for c in question.registry.on(question.device.type)]
    for target, name in question.options.providers.items():
        whole = "." not in target
        code = Code.INTERFACE_MISSING if whole else Code.OPERATION_MISSING
        known = interfaces if whole else operations
        subject = f"the override of {target}"
        if target not in known:
            missing = f"an {'interface' if whole else 'operation'} that the model needs"
            yield Reason(code, subject, missing, ", ".join(sorted(known)), fix="drop the override")
        elif name not in names:
            fix = f"install {name}, or name another provider"
            yield Reason(code, subject, name, ", ".join(names) or "no provider", fix=fix)


def _no_plugin(question: Question) -> Iterator[Reason]:
    device, registry = question.device.type, question.registry
    if not registry.on(device) and not registry.faults_on(device):
        devices = registry.devices()
        yield Reason(
            Code.DEVICE_ABSENT,
            subject=device,
            needed="a provider plugin for this device",
            offered=f"plugins for {', '.join(devices)}" if devices else "no plugins",
            fix=f"install a provider for {device}",
        )


def _refusal(
    question: Question,
    model: ModelSpec,
    needs: Sequence[Requirement],
    judged: Sequence[Judged],
    own: tuple[Reason, ...],
    here: bool,
) -> Refusal:
    """All reasons of all candidates, the nearest candidate first, then the faults."""
    overrides = question.options.providers
    if judged and not own:
        own = clashes(judged, needs, overrides)
    faults = question.registry.faults_on(question.device.type)
    absent = any(r.code is Code.DEVICE_ABSENT for j in judged for r in j.all_reasons(j.reasons))
    usable = partial(_usable, asked=question.device.type, absent=absent)
    return Refusal(
        model.model_type,
        str(question.device),
        (*_no_plugin(question), *own),
        (
            *_nearest_first(judged, needs, overrides),
            *(Rejected(f.name, f.distribution, f.version, (f.reason(),)) for f in faults),
        ),
        tuple(alternatives(question, needs, usable if here else None)),
    )


def _nearest_first(
    judged: Sequence[Judged], needs: Sequence[Requirement], overrides: Mapping[str, str]
) -> list[Rejected]:
    """The candidates with something against them, those first that serve the most.

    An operation that an override gives to one candidate speaks against no other, and comes first.
    """
    asked = {n.operation: wanted(n.operation, overrides) for n in needs if not n.optional}
    ranked = []
    for j in judged:
        mine = [op for op, name in asked.items() if name in (None, j.candidate.name)]
        mine.sort(key=lambda op: asked[op] is None)
        reasons = j.all_reasons(mine)
        missing = sum(reason.code in _MISSING for reason in reasons)
        rank = (sum(not j.fits(op) for op in mine), missing, len(reasons), j.candidate.name)
        ranked.append((rank, Rejected.of(j.candidate, reasons)))
    return [rejected for _, rejected in sorted(ranked, key=lambda r: r[0]) if rejected.reasons]


_MISSING: Final = (Code.INTERFACE_MISSING, Code.OPERATION_MISSING)


def alternatives(
    question: Question,
    needs: Sequence[Requirement],
    usable: Callable[[Candidate], bool] | None = None,
) -> Iterator[tuple[str, str]]:
    """Other devices whose providers fit by their manifests, the arch left open.

    With `usable` only candidates count that it accepts, and a device of the type that was asked for
    is one of the others where its index was the matter.
    """
    open_needs = [replace(need, arch="") for need in needs]
    for device in question.registry.devices():
        if device == question.device.type and not (usable and question.device.index):
            continue
        there = [c for c in question.registry.on(device) if usable is None or usable(c)]
        found = assign([judge(c, open_needs) for c in there], open_needs)
        if found is not None:
            names = dict.fromkeys(c.name for c in found.choices.values())
            yield device, " + ".join(names)


def _usable(candidate: Candidate, asked: str, absent: bool) -> bool:
    """Whether its libraries are here, and its device where the one that was asked for is absent.

    Otherwise no device is looked for: what manifests refuse is refused without importing anything.
    """
    if any(library_reasons(candidate)) or (candidate.manifest.device == asked and not absent):
        return False
    return not absent or not isinstance(device_presence(candidate, None), Reason)
