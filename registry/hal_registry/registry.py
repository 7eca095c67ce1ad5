"""What discovery found: the usable providers, the faults of the others, and their hooks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import pluggy

from hal_registry.guard import Failure, attempt
from hal_registry.manifest import Manifest
from hal_registry.reasons import Code, Reason


@dataclass(frozen=True, slots=True)
class Candidate:
    """A manifest, the distribution that it came from, and the module of its plugin or ""."""

    manifest: Manifest
    distribution: str
    version: str
    module: str = ""

    @property
    def name(self) -> str:
        """The provider's name, `<device>.<flavour>`."""
        return self.manifest.name

    def __str__(self) -> str:
        """Name, distribution and version, as refusals show them."""
        return f"{self.name}  ({self.distribution} {self.version})"


@dataclass(frozen=True, slots=True)
class Fault:
    """A plugin that cannot be used, with the cause; its device is read off its name."""

    name: str
    distribution: str
    version: str
    code: Code
    error: str
    traceback: str = field(default="", compare=False)

    @property
    def device(self) -> str:
        """The device that the plugin would have served."""
        return self.name.partition(".")[0]

    def reason(self) -> Reason:
        """The fault as a finding of a refusal."""
        needed, fix = _FAULTS[self.code]
        return Reason(self.code, self.name, needed, self.error, fix=fix)


_FAULTS: Final = {
    Code.PLUGIN_BROKEN: (
        "a plugin that loads",
        "repair or remove the distribution (`hal doctor` shows the traceback)",
    ),
    Code.PLUGIN_BLOCKED: ("a plugin that may be loaded", "change HAL_PLUGINS or HAL_BLOCK"),
    Code.NAME_CONFLICT: (
        "a name of its own",
        "uninstall one of the two distributions, or block one with HAL_BLOCK",
    ),
    Code.API_MISMATCH: (
        "a plugin of the same API",
        "install versions of hybrid-hal and the plugin that share the API",
    ),
}


def broken(subject: str, needed: str, found: str) -> Reason:
    """A part of a plugin that failed when it was asked."""
    fix = "repair or remove the distribution"
    return Reason(Code.PLUGIN_BROKEN, subject, needed, found, fix=fix)


@dataclass(frozen=True, slots=True)
class Registry:
    """The usable providers, by name, and the faults of the others."""

    candidates: tuple[Candidate, ...] = ()
    faults: tuple[Fault, ...] = ()
    plugins: pluggy.PluginManager | None = field(default=None, compare=False)

    def __reduce__(self) -> tuple[type["Registry"], tuple[object, ...]]:
        """Pickle and copy what was found; the hooks stay in the process that loaded them."""
        return type(self), (self.candidates, self.faults)

    @classmethod
    def of(cls, *manifests: Manifest, faults: Sequence[Fault] = ()) -> "Registry":
        """A registry of given manifests, as tests and embedders build it."""
        found = (Candidate(m, "given", "0") for m in sorted(manifests, key=lambda m: m.name))
        return cls(tuple(found), tuple(faults))

    def on(self, device: str) -> tuple[Candidate, ...]:
        """The candidates for a device type, by name."""
        return tuple(c for c in self.candidates if c.manifest.device == device)

    def faults_on(self, device: str) -> tuple[Fault, ...]:
        """The faults of plugins that would have served a device type."""
        return tuple(fault for fault in self.faults if fault.device == device)

    def devices(self) -> tuple[str, ...]:
        """Device types that an installed plugin names, broken ones included."""
        found = {c.manifest.device for c in self.candidates} | {f.device for f in self.faults}
        return tuple(sorted(found))

    def ask(self, hook: str, argument: object) -> Iterator[tuple[str, object]]:
        """Each plugin's answer to a hook of one argument, with the plugin's name.

        In pluggy's order, last registered first. The answer of a raising hook is a `Failure`, so
        that it silences no other plugin.
        """
        caller = getattr(self.plugins.hook, hook) if self.plugins else None
        for impl in reversed(caller.get_hookimpls() if caller else ()):
            arguments = [argument for _ in impl.argnames]
            yield impl.plugin_name, attempt(partial(impl.function, *arguments))

    def vetoes(self, selection: object) -> tuple[Reason, ...]:
        """What the plugins' `hal_veto` say against a selection; a failing veto is a reason too."""
        found: list[Reason] = []
        for plugin, answer in self.ask("hal_veto", selection):
            if isinstance(answer, (list, tuple)) and all(isinstance(r, Reason) for r in answer):
                found += answer
            elif answer is not None:
                text = answer.text if isinstance(answer, Failure) else repr(answer)
                found.append(broken(plugin, "a list of Reason from hal_veto", text))
        return tuple(found)
