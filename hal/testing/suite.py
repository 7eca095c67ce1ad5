"""`ProviderSuite`: the conformance kit as a test class that a vendor subclasses."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from hal.binding import Examination
from hal.cli.matrix import example
from hal.device import Device
from hal.runtime.pool import RESERVED, Pool
from hal.testing import refusals
from hal.testing.between import Between
from hal.testing.calls import Calls
from hal.testing.guard import SAME, changes
from hal.testing.limits import Bounds
from hal.testing.properties import Invariances
from hal.testing.replays import Graphs
from hal.testing.sidecar import Sidecar, layouts_of
from hal.testing.verification import Verification
from hal_registry import Assignment, Candidate, Code, Registry, interface_of, judge

if TYPE_CHECKING:
    from hal.testing.examined import Examined
    from hal.testing.plan import Trial
    from hal.testing.refusals import Beyond
    from hal.testing.subject import Subject

REFERENCE: Final = re.compile(r"https?://\S+|[\w.-]*/?[\w.-]*#\d+")
"""What an expected failure has to name: the address or the number of an issue."""

UNKNOWN: Final = "sideways"
"""A layout that no state has."""

_LIGHT: Final = """
import importlib, sys
importlib.import_module({module!r})
heavy = sorted({{"torch", "triton", "numpy"}} & set(sys.modules))
sys.exit(f"importing {module} imports {{', '.join(heavy)}}" if heavy else 0)
"""


class Declaration:
    """Tests of the manifest and of how the provider is built; operations are not run."""

    def test_the_provider_is_registered(self, hal_examined: Examined) -> None:
        """Discovery finds the provider, or shows what is wrong with its plugin."""
        assert hal_examined.candidate is not None, hal_examined.problem

    def test_its_plugin_imports_no_torch(self, hal_candidate: Candidate) -> None:
        """Judging works everywhere, so that the module with the manifest is light."""
        module = hal_candidate.module or "hal_registry"  # one that was given has no plugin
        code = _LIGHT.format(module=module)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True, text=True, check=False, env=environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    def test_it_builds_and_keeps_the_protocols(self, hal_subject: Subject) -> None:
        """Every offered operation has the Protocol's signature, in every declared layout."""
        manifest = hal_subject.candidate.manifest
        here = replace(hal_subject.candidate, manifest=replace(manifest, needs=(), probe=""))
        judged = judge(here, [_bare(op) for op in manifest.offers])
        examine = Examination(Device(manifest.device))
        for layouts in layouts_of(hal_subject.candidate):
            choices = dict.fromkeys(manifest.offers, here)
            found = examine(judged, (), Assignment(choices, layouts, {}))
            assert not any(found.values()), "; ".join(str(r) for rs in found.values() for r in rs)
            hal_subject.provider(layouts).warmup()

    def test_an_unknown_layout_is_refused(self, hal_subject: Subject) -> None:
        """A provider that ignores the layouts it is built for would read states transposed."""
        first = layouts_of(hal_subject.candidate)[0]
        for state in first:
            try:
                hal_subject.provider({**first, state: UNKNOWN})
            except (ValueError, TypeError) as error:
                assert UNKNOWN in str(error), (
                    f"{error}: does not say that it was asked for {UNKNOWN}"
                )
            else:
                raise AssertionError(f"it was built with layout {UNKNOWN} of {state}")

    def test_every_offer_can_be_tested_and_used(self, hal_examined: Examined, offered: str) -> None:
        """No field that models name is left out, and the manifest's check does not refuse all."""
        lacks = hal_examined.plan.lacks.get(offered)
        assert not lacks, f"{offered} leaves out {', '.join(lacks or ())}: it refuses every model"
        assert hal_examined.tests(offered), f"no case of {offered} fits the manifest's own check"

    def test_what_its_check_refuses_has_a_reason(
        self, hal_candidate: Candidate, joint: Trial
    ) -> None:
        """Declared values that do not go together are refused with needed and offered."""
        reasons = judge(hal_candidate, [joint.need]).reasons[joint.operation]
        assert all(reason.needed and reason.offered for reason in reasons)
        assert all(reason.code is not Code.PLUGIN_BROKEN for reason in reasons), reasons

    def test_one_beyond_is_refused(self, hal_candidate: Candidate, beyond: Beyond) -> None:
        """A need outside the declared sets gets the code of its field, on its operation."""
        reasons = judge(hal_candidate, [beyond.need]).reasons[beyond.operation]
        mine = [r for r in reasons if r.subject == beyond.operation and r.needed and r.offered]
        codes = [reason.code for reason in mine]
        assert beyond.code in codes, f"{beyond}: expected {beyond.code}, got {codes or 'a fit'}"

    def test_what_is_not_offered_is_refused(
        self, hal_candidate: Candidate, not_offered: Beyond
    ) -> None:
        """An operation without an offer is missing, or its interface is."""
        reasons = judge(hal_candidate, [not_offered.need]).reasons[not_offered.operation]
        codes = [reason.code for reason in reasons]
        assert codes == [not_offered.code]

    def test_every_family_is_served_or_refused_with_its_reasons(
        self, hal_candidate: Candidate, family: str
    ) -> None:
        """Under every option a family fits, or every missing operation is named."""
        for label, options in refusals.OPTIONS.items():
            answer = refusals.asked(hal_candidate, family, options)
            lacks = refusals.lacking(hal_candidate, family, options)
            if answer.refusal is None:
                assert not lacks, f"{label}: it fits without {', '.join(sorted(lacks))}"
                continue
            reasons = answer.refusal.all_reasons()
            subjects = {reason.subject for reason in reasons}
            unnamed = {op for op in lacks if not {op, interface_of(op)} & subjects}
            assert not unnamed, f"{label}: {', '.join(sorted(unnamed))} missing without a word"
            assert all(r.needed and r.offered and r.fix for r in reasons), label

    def test_planned_bytes_are_allocated(self, hal_candidate: Candidate, served: str) -> None:
        """Plan truth: the pool of a plan has its bytes, and no offset passes 64 bits."""
        selection = refusals.asked(hal_candidate, served, refusals.OPTIONS["plain"]).selection
        assert selection is not None
        pool = Pool(selection.states, 7, torch.device("meta"))
        assert pool.bytes == selection.slot_bytes * (7 + RESERVED)
        assert selection.slot_bytes * 2**20 < 2**63

    def test_a_failure_stays_with_the_provider_and_keeps_its_cause(
        self, hal_candidate: Candidate, served: str
    ) -> None:
        """Without its libraries or its module it is refused by name, with the cause."""
        import hal

        manifest = hal_candidate.manifest
        absent = "hal-no-such-library"
        broken: tuple[tuple[Code, str, dict[str, Any]], ...] = (
            (Code.LIBRARY_MISSING, absent, {"needs": (f"{absent}>=1",)}),
            (Code.PLUGIN_BROKEN, "hal_no_such_module", {"load": "hal_no_such_module:P",
             "probe": "", "needs": ()}),
        )  # fmt: skip
        for code, cause, change in broken:
            registry = Registry.of(replace(manifest, **change))
            try:
                hal.select(manifest.device, example(served), registry=registry)
            except hal.Unsupported as error:
                found = [reason for reason in error.reasons if reason.code is code]
                assert any(cause in str(reason) for reason in found), str(error)
            else:
                raise AssertionError(f"it was selected without {cause}")


class ProviderSuite(
    Declaration, Sidecar, Invariances, Calls, Bounds, Between, Graphs, Verification
):
    """Subclass it and name a provider; the manifest says what is tested.

    `stand_in` is a torch device whose tensors take the place of the provider's device, for an
    interpreter or a device that uses the host's memory. `expected_failures` maps the name of a test
    to the issue about it; such a test has to fail. `registry` is looked in instead of what is
    installed. No test and no `hal_` fixture may be redefined, before or after the class is made.
    """

    provider: ClassVar[str] = ""
    stand_in: ClassVar[str] = ""
    expected_failures: ClassVar[Mapping[str, str]] = {}
    registry: ClassVar[Registry | None] = None

    def __init_subclass__(cls) -> None:
        """Refuse a subclass that changes the kit or expects a failure without an issue."""
        if changed := changes(cls, TESTS):
            raise TypeError(f"{cls.__name__} redefines {', '.join(changed)}: {SAME}")
        for test, issue in cls.expected_failures.items():
            if not REFERENCE.fullmatch(issue):
                raise TypeError(
                    f"{cls.__name__}: expected failure of {test}: got {issue!r}, expected the "
                    f"address or the number of an issue"
                )


TESTS: Final = {name: test for name, test in inspect.getmembers(ProviderSuite, inspect.isfunction)
                if name.startswith("test_")}  # fmt: skip
"""The tests by name, as they were before anything subclassed the suite."""


def _bare(operation: str) -> Any:
    from hal_registry import Requirement

    return Requirement(operation, refusals.WHY)
