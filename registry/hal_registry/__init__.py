"""Discovery and judging of hardware providers; knows neither torch nor `hal`.

A plugin declares a `Manifest` of `Offer`s; a model and the options of a run become `Requirement`s;
`judge` holds one against the other and gives every `Reason`; `assign` chooses jointly.
"""

from hal_registry.assign import Assignment, assign, clashes, wanted
from hal_registry.discovery import GROUP, PluginFault, default_registry, discover
from hal_registry.guard import Failure, attempt
from hal_registry.hooks import hookimpl, hookspec
from hal_registry.judge import Judged, judge, show
from hal_registry.manifest import Manifest, ManifestError, Offer, Proof
from hal_registry.probe import Presence, device_presence, library_reasons, load
from hal_registry.reasons import Code, Reason
from hal_registry.registry import Candidate, Fault, Registry, broken
from hal_registry.requirement import Requirement
from hal_registry.vocabulary import API, DTYPES, LAYOUTS, LEVELS, OPERATIONS, interface_of

__all__ = [
    "API",
    "DTYPES",
    "GROUP",
    "LAYOUTS",
    "LEVELS",
    "OPERATIONS",
    "Assignment",
    "Candidate",
    "Code",
    "Failure",
    "Fault",
    "Judged",
    "Manifest",
    "ManifestError",
    "Offer",
    "PluginFault",
    "Presence",
    "Proof",
    "Reason",
    "Registry",
    "Requirement",
    "assign",
    "attempt",
    "broken",
    "clashes",
    "default_registry",
    "device_presence",
    "discover",
    "hookimpl",
    "hookspec",
    "interface_of",
    "judge",
    "library_reasons",
    "load",
    "show",
    "wanted",
]
