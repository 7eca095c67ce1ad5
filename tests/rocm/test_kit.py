"""What is chosen from the kit for the interpreter keeps every property, operation and dtype."""

from types import SimpleNamespace
from typing import Any

import pytest

from hal.testing import ProviderSuite
from hal.testing.plan import Plan, Trial
from hal_rocm.arches import ARCHES
from hal_rocm.plugin import MANIFEST
from support.rocm_kit import KEPT, SLOW, chosen


class Suite(ProviderSuite):
    __test__ = False
    provider = "rocm.triton"


def item(test: str, **given: object) -> Any:
    return SimpleNamespace(
        cls=Suite, originalname=test, callspec=SimpleNamespace(params=given), given=given
    )


@pytest.fixture(params=ARCHES)
def plan(request: pytest.FixtureRequest) -> Plan:
    return Plan.of(MANIFEST, request.param)


def points(plan: Plan) -> list[Any]:
    compared = [item("compare", any_trial=trial) for trial in plan.trials]
    return compared + [item("verify", verify_trial=trial) for trial in plan.verify]


def settings(trial: Trial, *names: str) -> tuple[object, ...]:
    return (trial.operation, *(trial.settings.get(name) for name in names))


def trials(items: list[Any]) -> list[Trial]:
    return [trial for one in items for trial in one.given.values()]


def test_every_dtype_and_kind_and_gate_of_an_operation_is_compared(plan: Plan) -> None:
    every = points(plan)
    kept = [*chosen(every)]
    assert len(kept) < len(every) / 3
    for names in (("dtype", "kind"), ("gate",)):
        told, all_told = ({settings(t, *names) for t in trials(x)} for x in (kept, every))
        assert told == all_told


def test_every_property_of_an_operation_is_kept_once_and_few_of_a_slow_one(plan: Plan) -> None:
    tests = ("pads", *KEPT)
    every = [item(test, trial=t) for test in tests for t in plan.trials]
    quick = [trial for trial in plan.base.values() if trial.operation not in SLOW]
    assert trials([*chosen(every)]) == quick + len(KEPT) * [*plan.base.values()]


def test_what_is_kept_of_a_slow_operation_is_in_the_kit() -> None:
    assert set(MANIFEST.offers) > SLOW
    assert all(callable(getattr(ProviderSuite, name)) for name in KEPT)


def test_tests_that_run_no_operation_are_all_kept(plan: Plan) -> None:
    every = [item("declared"), item("declared", offered="conv.prefill")]
    every += [item("declared", joint=trial) for trial in plan.refused]
    assert [*chosen(every)] == every
