"""Providers as vendors might write them, good and bad, under one importable module name."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from hal_registry import Code, Presence, Reason, Requirement

MODULE = "synthetic_providers"


class Lacking:
    """A provider without any interface."""

    conv: object = None
    delta_rule: object = None
    scan: object = None
    conv_state: object = None

    def __init__(self, device: str, options: object) -> None:
        self.device = device

    def prepare(self, params: object) -> object:
        """Keep the weights as they are."""
        return params

    def scratch_spec(self, interface: str, shapes: object, max_batch: int, width: int) -> object:
        """Ask for nothing."""
        return ()

    def warmup(self) -> None:
        """Compile nothing."""


class Bare:
    """A provider without the methods of a provider."""

    def __init__(self, device: str, options: object) -> None:
        self.device = device


class Sidecar:
    """A conv-state sidecar that takes the Protocol's calls."""

    def attach(self, tensors: object) -> None:
        """Keep nothing."""

    def begin(
        self, src: object, dst: object, start: object, query_start_loc: object, max_len: int
    ) -> None:
        """Resolve nothing."""

    def step(self, layer_id: int) -> None:
        """Give nothing."""


class Swapped(Sidecar):
    """A sidecar whose `begin` has two arguments the other way round."""

    def begin(  # type: ignore[override]
        self, dst: object, src: object, start: object, query_start_loc: object, max_len: int
    ) -> None:
        """Take the slots in another order."""


class Conv:
    """A conv that takes the Protocol's calls."""

    def prefill(
        self,
        x: object,
        weight: object,
        bias: object,
        state: object,
        src: object,
        dst: object,
        start: object,
        query_start_loc: object,
        max_len: int,
        *,
        activation: object = None,
        out: object = None,
        track: object = None,
    ) -> None:
        """Compute nothing."""

    def decode(
        self,
        x: object,
        weight: object,
        bias: object,
        state: object,
        src: object,
        dst: object,
        start: object,
        *,
        activation: object = None,
        out: object = None,
    ) -> None:
        """Compute nothing."""


class Good(Lacking):
    """A provider that serves conv and conv_state, which is all that CCA layers need."""

    def __init__(self, device: str, options: object) -> None:
        super().__init__(device, options)
        self.conv = Conv()
        self.conv_state = Sidecar()


class Swapping(Good):
    """A provider whose sidecar takes swapped arguments."""

    def __init__(self, device: str, options: object) -> None:
        super().__init__(device, options)
        self.conv_state = Swapped()


class Partial(Good):
    """A provider that leaves out the interfaces that it does not serve."""

    def __getattribute__(self, name: str) -> object:
        """Have no scan at all."""
        if name == "scan":
            raise AttributeError(name)
        return super().__getattribute__(name)


class Flaky(Good):
    """A provider that can be built once in a process."""

    built = False

    def __init__(self, device: str, options: object) -> None:
        super().__init__(device, options)
        if Flaky.built:
            raise SystemExit("the driver is open already")
        Flaky.built = True


class Exits(Lacking):
    """A provider whose vendor library ends the process when it finds no driver."""

    def __init__(self, device: str, options: object) -> None:
        raise SystemExit("driver 1.2 is too old")


def absent(index: int | None) -> Presence:
    """Find no device."""
    return Presence(0, detail="the driver finds no device")


def many(index: int | None) -> Presence:
    """Count in words."""
    return Presence("many")  # type: ignore[arg-type]


def nothing(index: int | None) -> Presence:
    """Count nothing."""
    return Presence(None)  # type: ignore[arg-type]


def sm_90(index: int | None) -> Presence:
    """Find two devices of one arch."""
    return Presence(2, arch="sm_90")


def sm_121(index: int | None) -> Presence:
    """Find one device of an arch that few know."""
    return Presence(1, arch="sm_121")


def without_decode(index: int | None) -> Presence:
    """Find one device whose library lacks what decode calls."""
    return Presence(1, check=_lacks_decode)


def _lacks_decode(need: Requirement) -> Iterator[Reason]:
    if need.operation == "delta_rule.decode":
        yield Reason(Code.OPERATION_MISSING, "vendor_decode", "the function", "absent")


def library_gone(index: int | None) -> Reason:
    """Find no driver, of which no metadata tells."""
    return Reason(Code.LIBRARY_MISSING, "libvendor.so", "the driver", "none")


@contextmanager
def importable() -> Iterator[None]:
    """Make this module importable as `synthetic_providers`."""
    module = ModuleType(MODULE)
    module.__dict__.update({k: v for k, v in globals().items() if not k.startswith("__")})
    sys.modules[MODULE] = module
    try:
        yield
    finally:
        del sys.modules[MODULE]
