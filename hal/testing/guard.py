"""What keeps the kit whole: which parts a subclass changed, and how many tests are planned."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from hal.testing.examined import Examined

Tests = Mapping[str, Callable[..., None]]

SAME: Final = (
    "the kit's tests are the same for every provider; give expected_failures with an issue instead"
)
"""Why nothing of the kit may be replaced."""


def changes(suite: type, tests: Tests) -> list[str]:
    """The tests, `hal_` fixtures and look-ups of attributes that a suite replaces."""
    found = [name for name, test in tests.items() if getattr(suite, name, None) is not test]
    found += [name for name in dir(suite) if name.startswith("hal_")]
    if any("__getattribute__" in vars(base) for base in suite.__mro__[:-1]):
        found.append("__getattribute__")
    return found


def foreign(suite: type, test: str, tests: Tests, called: Any, given: Mapping[str, Any]) -> str:
    """What a call of a kit's test was given that is not the kit's, or nothing.

    Values are compared, not fixtures: a module or a conftest may replace a fixture as well.
    """
    from hal.testing.examined import examine

    if getattr(called, "__func__", None) is not tests[test]:
        return test
    examined = examine(suite)
    own = {
        "hal_examined": examined,
        "hal_candidate": examined.candidate,
        "hal_subject": examined.subject,
    }
    return next((name for name in own if name in given and given[name] is not own[name]), "")


def total(examined: Examined, tests: Tests) -> int:
    """How many tests the plan of a provider has."""
    from hal.testing.examined import PARAMETERS

    sizes = {name: len(values(examined)) for name, values in PARAMETERS.items()}
    names = [inspect.signature(test).parameters for test in tests.values()]
    return sum(prod(sizes[name] for name in taken if name in sizes) for taken in names)
