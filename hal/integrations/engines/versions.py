"""Engine versions that a plugin was tested with; others are refused by name."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from hal.integrations.engines.refusals import library, refuse


@dataclass(frozen=True, slots=True)
class Pin:
    """The releases of an engine whose class names and seams a distribution knows.

    With the environment variable `any_version` set to 1, another version may run, if every seam is
    found in it.
    """

    engine: str
    distribution: str
    tested: tuple[str, ...]
    any_version: str
    brought_by: tuple[str, ...]
    """Distributions that bring the engine, whichever is installed."""

    def knows(self, installed: str) -> bool:
        """Whether that version was tested; a local part says how it was built, and is left out."""
        return _release(installed) in self.tested

    def check(self, installed: str, environ: Mapping[str, str] = os.environ) -> None:
        """Refuse an untested engine: names and seams move, and stop applying without a word."""
        if self.knows(installed) or environ.get(self.any_version) == "1":
            return
        tested = ", ".join(self.tested)
        fix = f"install {self.engine} {tested}, or set {self.any_version}=1 to try this one"
        reason = library(self.distribution, tested, installed, fix)
        raise refuse(self.engine, self.distribution, reason)


def _release(text: str) -> str:
    try:
        return Version(text).public
    except InvalidVersion:
        return text
