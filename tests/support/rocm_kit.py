"""Which tests of the kit the AMD provider runs in the interpreter with every change.

A program costs the interpreter what a launch costs a GPU, so that the whole kit is a matter of
hours there. Every property of the kit is kept for every operation, at the first trial that the kit
has of it; the trials at declared points are kept once for each kernel that they reach. Of slow
operations a few properties are kept: the others are those of the sources that all devices share,
and `tests/interpreted` holds them with the default table.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import pytest

from hal.testing.plan import Trial
from hal.testing.suite import ProviderSuite

POINTS = frozenset({"any_trial", "verify_trial"})
"""Arguments of the tests that compare every declared point with the oracle."""

SLOW = frozenset(
    {
        "delta_rule.prefill",
        "delta_rule.decode_fused",
        "delta_rule.verify",
        "delta_rule.commit",
        "scan.prefill",
        "scan.verify",
        "scan.commit",
    }
)
"""Operations whose tests take the interpreter minutes."""

KEPT = frozenset(
    {
        "test_any_cut_of_a_row_gives_the_same",
        "test_every_acceptance_equals_so_many_decodes",
        "test_nan_of_a_row_reaches_no_other",
        "test_only_addressed_slots_change",
    }
)
"""The properties of those that block sizes can break."""

CHOICES = ("dtype", "gate", "kind")
"""Settings by which the provider chooses a kernel."""

SAME_KERNEL = {"safe": "channel", "ready_scalar": "scalar", "ready_channel": "channel"}
"""Gates that are made ready in front of the kernel of another one."""


def chosen(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """The tests to run, in their order; those that run no operation are all kept."""
    seen: set[Hashable] = set()
    for item in items:
        key = _key(item)
        if key is None or (key not in seen and not _takes_minutes(item)):
            seen.add(key)
            yield item


def _takes_minutes(item: pytest.Item) -> bool:
    """Whether a test of a slow operation is left to the whole kit."""
    given = _given(item)
    slow = any(isinstance(value, Trial) and value.operation in SLOW for value in given.values())
    return slow and getattr(item, "originalname", "") not in KEPT and not POINTS & given.keys()


def _given(item: pytest.Item) -> dict[str, Any]:
    return getattr(getattr(item, "callspec", None), "params", {})


def _key(item: pytest.Item) -> Hashable:
    """What a test stands for, None where it stands for itself."""
    owner: Any = getattr(item, "cls", None)
    given = _given(item)
    trials = [value for name, value in given.items() if isinstance(value, Trial)]
    if owner is None or not issubclass(owner, ProviderSuite) or "joint" in given or not trials:
        return None
    (trial,) = trials
    test = owner, getattr(item, "originalname", ""), trial.operation
    return (*test, *_kernel(trial)) if POINTS & given.keys() else test


def _kernel(trial: Trial) -> Iterator[object]:
    """The settings that choose a kernel, gates of one kernel told apart in one dtype alone."""
    for name in CHOICES:
        value = trial.settings.get(name)
        apart = trial.settings["dtype"] == "float32"
        yield value if apart else SAME_KERNEL.get(value, value)
