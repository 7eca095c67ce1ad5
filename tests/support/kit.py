"""Run a test of the conformance kit by its name, against any provider class."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from typing import Any

from torch import Tensor

from hal.testing import ProviderSuite
from hal.testing.examined import PARAMETERS, Examined, examine, operation_of
from hal.testing.subject import Subject
from hal_cpu.plugin import MANIFEST
from hal_cpu.provider import TorchProvider
from hal_registry import Manifest, Presence, Registry
from ops.mutations import Mutation

FIXTURES = ("self", "hal_examined", "hal_candidate", "hal_subject")


def suite_of(manifest: Manifest, stand_in: str = "cpu") -> type[ProviderSuite]:
    """A suite for a manifest that is not installed."""
    fields = {"provider": manifest.name, "registry": Registry.of(manifest), "stand_in": stand_in}
    return type("TestGiven", (ProviderSuite,), fields)


def parameter(test: str) -> str:
    """The one argument of a kit's test that the manifest gives values for, or nothing."""
    names = inspect.signature(getattr(ProviderSuite, test)).parameters
    return next((name for name in names if name not in FIXTURES), "")


def outcomes(suite: type[ProviderSuite], test: str, operation: str = "") -> Iterator[str]:
    """What each case of a test says: nothing where it passes, else its message."""
    examined = examine(suite)
    assert isinstance(examined.subject, Subject), examined.subject
    name = parameter(test)
    values = PARAMETERS[name](examined) if name else [None]
    for value in values:
        if not operation or operation in _operations(name, value):
            yield _outcome(suite, test, examined, {name: value} if name else {})


def _operations(name: str, value: Any) -> set[str]:
    trials = value if isinstance(value, tuple) else (value,)
    return {operation_of({name: value}), *(getattr(trial, "operation", "") for trial in trials)}


def _outcome(
    suite: type[ProviderSuite], test: str, examined: Examined, values: dict[str, Any]
) -> str:
    method: Callable[..., None] = getattr(suite(), test)
    have = {
        "hal_examined": examined,
        "hal_candidate": examined.candidate,
        "hal_subject": examined.subject,
    }
    wanted = {n: have[n] for n in inspect.signature(method).parameters if n in have}
    try:
        method(**wanted, **values)
    except Exception as error:
        return f"{value_name(values)}: {type(error).__name__}: {error}"
    return ""


def value_name(values: dict[str, Any]) -> str:
    """What a case is called."""
    return ", ".join(str(value) for value in values.values())


def lying(operation: str, mutation: Mutation) -> type[TorchProvider]:
    """The CPU provider with one operation made wrong."""
    interface, _, verb = operation.partition(".")

    class Lying(TorchProvider):
        def __init__(self, device: str, options: Any) -> None:
            super().__init__(device, options)
            served = getattr(self, interface)
            setattr(served, verb, mutation(getattr(served, verb)))

    return Lying


def catches(operation: str, mutation: Mutation, test: str) -> bool:
    """Whether a test of the kit fails on a wrong operation; a commit is judged with its verify."""
    suite = suite_of(manifest_of(lying(operation, mutation)))
    return any(outcomes(suite, test, operation.replace("commit", "verify")))


def manifest_of(provider: type, **changes: Any) -> Manifest:
    """The CPU's manifest for another provider class, which becomes importable by its name."""
    globals()[provider.__name__] = provider
    fields = {name: getattr(MANIFEST, name) for name in ("name", "device", "api", "offers")}
    return Manifest(**{**fields, "load": f"{__name__}:{provider.__name__}", **changes})


def small(*, lie: bool = False, widths: Any = (3, 4), **changes: Any) -> Manifest:
    """A manifest that offers one convolution of the CPU; with a lie, wider than it can."""
    offer = replace(MANIFEST.offers["conv.decode"], widths=widths, dtypes=("float32",))
    provider = _Narrow if lie else TorchProvider
    fields = {"name": "cpu.small", "offers": {"conv.decode": offer}, **changes}
    return manifest_of(provider, **fields)


class _Narrow(TorchProvider):
    """A provider that stops at width 8, whatever is declared."""

    def __init__(self, device: str, options: Any) -> None:
        super().__init__(device, options)
        self.conv.decode = _at_most_8(self.conv.decode)  # type: ignore[method-assign]


def _at_most_8(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(call)
    def decode(**args: Any) -> Tensor:
        if args["weight"].shape[1] > 8:
            raise ValueError("conv.decode: width 9, expected 2..8")
        return call(**args)

    return decode


def absent(index: int | None) -> Presence:
    """Find no device."""
    return Presence(0, detail="no such board")
