"""Find the plugins: every entry point loaded by itself, every failure kept as a record.

pluggy carries the hooks. Its own loader is not used: it stops at the first ImportError and drops a
duplicate name without a word.
"""

import os
import re
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import Distribution, distributions
from typing import Final

import pluggy

from hal_registry import hooks
from hal_registry.guard import Failure, attempt
from hal_registry.manifest import Manifest
from hal_registry.reasons import Code
from hal_registry.registry import Candidate, Fault, Registry
from hal_registry.vocabulary import API, speaks

GROUP: Final = "hal.providers"
_LOCK: Final = threading.RLock()


class PluginFault(Exception):
    """A plugin that loaded but cannot be accepted."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(code, message)  # all arguments, so that it can be pickled
        self.code = code

    def __str__(self) -> str:
        """The message alone."""
        return str(self.args[1])


@dataclass(frozen=True, slots=True)
class _Point:
    """An entry point with the distribution that it came from."""

    name: str
    distribution: str
    value: str
    version: str
    load: Callable[[], object]

    @property
    def key(self) -> str:
        """What pluggy knows the plugin by."""
        return f"{self.name} of {self.distribution}"

    def candidate(self, manifest: Manifest) -> Candidate:
        """One of the plugin's manifests, with where it came from."""
        module = self.value.partition(":")[0].strip()
        return Candidate(manifest, self.distribution, self.version, module)


def default_registry() -> Registry:
    """The registry of the installed plugins, discovered once for the process."""
    with _LOCK:
        return _discovered()


@cache
def _discovered() -> Registry:
    return discover()


def discover(
    *,
    allow: Collection[str] | None = None,
    block: Collection[str] | None = None,
    strict: bool | None = None,
) -> Registry:
    """Load every entry point of the group.

    Allow and block lists (default: HAL_PLUGINS, HAL_BLOCK) hold plugin or distribution names and
    act before anything is imported. With `strict` (default: HAL_STRICT=1) the first fault is
    raised instead of recorded.
    """
    allow = _canonical(_listed("HAL_PLUGINS") if allow is None else allow)
    block = _canonical(_listed("HAL_BLOCK") if block is None else block) or ()
    scan = _Scan(os.environ.get("HAL_STRICT") == "1" if strict is None else strict)
    for point in sorted(scan.points(), key=lambda p: (p.name, p.distribution, p.value)):
        names = _canonical((point.name, point.distribution)) or set()
        if (allow is not None and not names & set(allow)) or names & set(block):
            scan.record(point, Code.PLUGIN_BLOCKED, "left out by HAL_PLUGINS or HAL_BLOCK")
        else:
            scan.visit(point)
    found = sorted(scan.candidates.values(), key=lambda c: c.name)
    return Registry(tuple(found), tuple(scan.faults), scan.plugins)


def _listed(variable: str) -> list[str] | None:
    """The comma-separated names of an environment variable, None where it is not set."""
    text = os.environ.get(variable)
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _canonical(names: Collection[str] | None) -> set[str] | None:
    """Names as PyPI compares them, so that hybrid_hal_cuda is hybrid-hal-cuda."""
    return None if names is None else {re.sub(r"[-_.]+", "-", name).lower() for name in names}


class _Scan:
    """One pass over the entry points."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.candidates: dict[str, Candidate] = {}
        self.faults: list[Fault] = []
        self.plugins = pluggy.PluginManager(hooks.PROJECT)
        self.plugins.add_hookspecs(hooks)

    def points(self) -> Iterator[_Point]:
        """The group's entry points, distribution by distribution; the first of a name counts."""
        seen: set[str] = set()
        for found in distributions():
            points = attempt(partial(_points, found))
            if isinstance(points, Failure):
                self._unreadable(found, points)
            elif points and points[0].distribution not in seen:
                seen.add(points[0].distribution)
                yield from points

    def _unreadable(self, found: Distribution, failure: Failure) -> None:
        """Record a distribution whose metadata cannot be read, if it seems to hold a plugin."""
        text = attempt(lambda: found.read_text("entry_points.txt") or "")
        if isinstance(text, str) and GROUP in text:
            name = attempt(lambda: found.name)
            name = name if isinstance(name, str) else "unknown"
            point = _Point(name, name, "", "0", object)
            self.fail(point, failure)

    def visit(self, point: _Point) -> None:
        """Load one plugin; whatever it raises stays with it."""
        if (failure := attempt(partial(self._load, point))) is not None:
            self.fail(point, failure)

    def fail(self, point: _Point, failure: Failure) -> None:
        """Record what a plugin raised, or raise it where faults are not to pass.

        What is no Exception, as SystemExit, is raised as a fault: it would end the host in silence.
        """
        error = failure.error
        if self.strict:
            if not isinstance(error, Exception):
                error = PluginFault(Code.PLUGIN_BROKEN, failure.text)
                error.__cause__ = failure.error
            error.add_note(f"while loading the plugin {point.key}")
            raise error
        if isinstance(error, PluginFault):
            self.record(point, error.code, str(error), failure.traceback)
        else:
            self.record(point, Code.PLUGIN_BROKEN, failure.text, failure.traceback)

    def record(self, point: _Point, code: Code, error: str, trace: str = "") -> None:
        """Keep what is wrong with a plugin."""
        fault = Fault(point.name, point.distribution, point.version, code, error, trace)
        self.faults.append(fault)

    def _load(self, point: _Point) -> None:
        """Import and register a plugin and take its manifests, all of them or none."""
        plugin = point.load()
        taken = self.plugins.get_name(plugin)
        if taken is not None:
            raise PluginFault(Code.NAME_CONFLICT, f"{point.value} is loaded already as {taken}")
        try:
            self.plugins.register(plugin, f"{point.key} ({point.value})")
            _check_hooks(self.plugins, plugin)
            self._accept(point, plugin)
        except BaseException:
            if self.plugins.get_name(plugin) is not None:
                self.plugins.unregister(plugin)
            raise

    def _accept(self, point: _Point, plugin: object) -> None:
        fresh: dict[str, Candidate] = {}
        for manifest in self._manifests(plugin):
            _check_manifest(point, manifest)
            other = (self.candidates | fresh).get(manifest.name)
            if other is not None:
                text = f"{manifest.name} is taken by {other.distribution} {other.version}"
                raise PluginFault(Code.NAME_CONFLICT, text)
            fresh[manifest.name] = point.candidate(manifest)
        _check_name(point, fresh)
        self.candidates |= fresh

    def _manifests(self, plugin: object) -> Iterator[Manifest]:
        for impl in self.plugins.hook.hal_providers.get_hookimpls():
            answer = impl.function() if impl.plugin is plugin else ()
            items = answer if isinstance(answer, (list, tuple)) else [answer]
            for item in items:
                if not isinstance(item, Manifest):
                    text = f"hal_providers gave {item!r}, expected a list of Manifest"
                    raise PluginFault(Code.PLUGIN_BROKEN, text)
                yield item


def _points(found: Distribution) -> list[_Point]:
    points = found.entry_points.select(group=GROUP)
    return [_Point(p.name, found.name, p.value, found.version, p.load) for p in points]


def _check_hooks(plugins: pluggy.PluginManager, plugin: object) -> None:
    """A plugin has hooks, and only known ones: a misspelt hook would never be called."""
    callers = plugins.get_hookcallers(plugin) or []
    known = ", ".join(name for name in vars(hooks) if name.startswith("hal_"))
    unknown = [caller.name for caller in callers if not caller.has_spec()]
    if unknown or not callers:
        text = f"unknown hook {unknown[0]}" if unknown else "no hook"
        raise PluginFault(Code.PLUGIN_BROKEN, f"{text}, known are {known}")


def _check_manifest(point: _Point, manifest: Manifest) -> None:
    device = point.name.partition(".")[0]
    if manifest.device != device:
        text = f"entry point {point.name} is for {device}, its manifest {manifest.name} is not"
        raise PluginFault(Code.PLUGIN_BROKEN, text)
    if not speaks(manifest.api):
        text = "{} speaks API {}.{}, hal speaks {}.{}".format(manifest.name, *manifest.api, *API)
        raise PluginFault(Code.API_MISMATCH, text)


def _check_name(point: _Point, found: Collection[str]) -> None:
    """One manifest has the entry point's name: else it may be another distribution's plugin."""
    if found and point.name not in found:
        text = f"entry point {point.name} gives {', '.join(found)} and no manifest of its own name"
        raise PluginFault(Code.PLUGIN_BROKEN, text)
