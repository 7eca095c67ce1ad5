"""Bind a provider: probe it, import it, build it, and hold it against the Protocols."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, cast

from hal.device import Device
from hal.errors import ProviderError
from hal.interfaces import Conv, ConvState, DeltaRule, Provider, Scan
from hal.torch_import import torch_failure, torn_torch
from hal_registry import (
    Assignment,
    Candidate,
    Code,
    Failure,
    Judged,
    Presence,
    Reason,
    Requirement,
    attempt,
    broken,
    device_presence,
    judge,
    library_reasons,
    load,
)

_PROTOCOLS: Final[Mapping[str, type]] = {
    "conv": Conv,
    "conv_state": ConvState,
    "delta_rule": DeltaRule,
    "scan": Scan,
}
_OF_PROVIDER: Final = ("prepare", "scratch_spec", "warmup")
_ABSENT: Final = object()
_SIDECAR: Final = ("attach", "begin", "step")

Findings = Mapping[str, tuple[Reason, ...]]
"""What speaks against a candidate, by operation."""


@dataclass(frozen=True, slots=True)
class Examination:
    """The look beyond manifests: libraries, device and arch, import, protocol.

    Each step is taken only if the one before it found nothing, so nothing of a vendor is imported
    where its libraries are missing.
    """

    device: Device

    def __call__(
        self, judged: Judged, needs: Sequence[Requirement], assignment: Assignment
    ) -> Findings:
        """The findings of the first step that has any."""
        candidate = judged.candidate
        if missing := tuple(library_reasons(candidate)):
            return dict.fromkeys(judged.reasons, missing)
        presence = _present(candidate, self.device)
        if isinstance(presence, Reason):
            return dict.fromkeys(judged.reasons, (presence,))
        mine = [op for op, chosen in assignment.choices.items() if chosen.name == candidate.name]
        if found := _machine_findings(candidate, needs, presence, mine):
            return found
        provider = attempt(lambda: construct(candidate, self.device, assignment.layouts))
        if isinstance(provider, Failure):
            return dict.fromkeys(judged.reasons, (_unusable(candidate, provider),))
        return _protocol_findings(judged, provider, mine)


def located(device: Device) -> Device:
    """The device by `hal`'s name: "cuda" is "rocm" where torch was built for ROCm.

    Engines take torch's own name for AMD's devices; an NVIDIA arch says that none of them is meant.
    """
    if device.type != "cuda" or device.arch.startswith("sm_"):
        return device
    if torch_failure():
        return device
    hip = attempt(lambda: load("torch.version:hip"))
    return device if isinstance(hip, Failure) or not hip else replace(device, type="rocm")


def build(candidate: Candidate, device: Device, layouts: Mapping[str, str]) -> Provider:
    """Import and construct a candidate's provider for the layouts that its states will have.

    Whatever the provider raises becomes a `ProviderError`, SystemExit included.
    """
    built = attempt(lambda: construct(candidate, device, layouts))
    if isinstance(built, Failure):
        text = f"{candidate} cannot be built from {candidate.manifest.load}: {built.text}"
        raise ProviderError(f"{text}; repair or remove the distribution") from built.error
    return built


def construct(candidate: Candidate, device: Device, layouts: Mapping[str, str]) -> Provider:
    """`build` that lets through whatever the provider raises."""
    make = cast("Callable[[str, Mapping[str, object]], Provider]", load(candidate.manifest.load))
    name = f"{device.type}:{device.index}" if device.index is not None else device.type
    return make(name, {"layouts": dict(layouts)})


def _machine_findings(
    candidate: Candidate, needs: Sequence[Requirement], presence: Presence, mine: Sequence[str]
) -> Findings:
    """Judge again, now that the machine is known; only operations that it rules out fall away."""
    if presence.check is not None:
        candidate = replace(candidate, manifest=replace(candidate.manifest, check=presence.check))
    there = [
        replace(need, arch=presence.arch or need.arch) for need in needs if need.operation in mine
    ]
    return {op: found for op, found in judge(candidate, there).reasons.items() if found}


def _present(candidate: Candidate, device: Device) -> Presence | Reason:
    """The machine as the candidate's probe sees it, or why it is not the one asked for."""
    presence = torn_torch() or device_presence(candidate, device.index)
    if isinstance(presence, Reason) or not device.arch or presence.arch in ("", device.arch):
        return presence
    return Reason(
        Code.ARCH_UNSUPPORTED,
        device.type,
        f"arch {device.arch}",
        f"arch {presence.arch}",
        "the arch of the device that is here",
        f'name the device "{device.type}"; `hal check` answers for an arch that is not here',
    )


def _unusable(candidate: Candidate, failure: Failure) -> Reason:
    return broken(candidate.name, f"a provider from {candidate.manifest.load}", failure.text)


def _protocol_findings(judged: Judged, provider: Provider, mine: Sequence[str]) -> Findings:
    """What the provider lacks of the Protocols; a lack of its own speaks against everything."""
    own = attempt(lambda: list(_own_lacks(provider)))
    if isinstance(own, Failure):
        return dict.fromkeys(judged.reasons, (_unusable(judged.candidate, own),))
    if own:
        return dict.fromkeys(judged.reasons, tuple(own))
    found = {op: attempt(partial(_violations, provider, op)) for op in mine}
    return {
        op: (_unusable(judged.candidate, lacks),) if isinstance(lacks, Failure) else tuple(lacks)
        for op, lacks in found.items()
        if lacks
    }


def _own_lacks(provider: Provider) -> Iterator[Reason]:
    """What every provider has, whatever it offers."""
    yield from _lacks(Provider, provider, "provider", _OF_PROVIDER)
    for interface in _PROTOCOLS:
        if getattr(provider, interface, _ABSENT) is _ABSENT:
            yield _violation(f"provider.{interface}", "an interface or None", "nothing")


def _violations(provider: Provider, operation: str) -> list[Reason]:
    """What an offered operation lacks of its Protocol."""
    interface, _, verb = operation.partition(".")
    if interface not in _PROTOCOLS:
        return []
    served = getattr(provider, interface, None)
    verbs = _SIDECAR if interface == "conv_state" else (verb,)
    return list(_lacks(_PROTOCOLS[interface], served, interface, verbs))


def _lacks(protocol: type, served: object, name: str, verbs: Sequence[str]) -> Iterator[Reason]:
    """Methods that are not there, or that cannot be called as the Protocol says."""
    for verb in verbs:
        method = getattr(served, verb, None)
        if not callable(method):
            yield _violation(f"{name}.{verb}", "a method", "none")
            continue
        wanted, has = inspect.signature(getattr(protocol, verb)), inspect.signature(method)
        if not _takes(has, wanted):
            needed = f"({', '.join([*wanted.parameters][1:])})"
            yield _violation(f"{name}.{verb}", needed, f"({', '.join(has.parameters)})")


def _takes(has: inspect.Signature, wanted: inspect.Signature) -> bool:
    """Whether a method takes the Protocol's call, its positional names in the same order."""
    parameters = [*wanted.parameters.values()][1:]
    positional = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    named = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
    try:
        has.bind(*positional, **named)
    except TypeError:
        return False
    return [*has.parameters][: len(positional)] == positional


def _violation(subject: str, needed: str, offered: str) -> Reason:
    fix = "repair the provider; hal.interfaces has the Protocols"
    return Reason(Code.PROTOCOL_VIOLATION, subject, needed, offered, fix=fix)
