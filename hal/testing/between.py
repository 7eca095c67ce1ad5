"""What a call may not keep: results, parameters and contents of tensors belong to the caller."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hal.testing import edits
from hal.testing.compare import same_bits, same_pools
from hal.testing.drafts import call_of
from hal.testing.held import Held, turned

if TYPE_CHECKING:
    from hal.testing.plan import Trial
    from hal.testing.subject import Subject

LOWEST = -(2**31)
TURNS = (2, 1, 0)


class Between:
    """Tests of calls that follow each other, and of the forms of what they are given."""

    def test_two_layers_in_turn_know_nothing_of_each_other(
        self, hal_subject: Subject, trial: Trial
    ) -> None:
        """Of the same shapes, with other weights and tokens; a result stays as it was given."""
        call = call_of(hal_subject, trial)
        one, two = trial.case(), trial.case(seed=1)
        first, _ = one.run_all(call)
        kept = first.clone()
        two.check(call, trial.kind, poison=False)
        assert same_bits(first, kept), "a later call overwrote a result"
        again, _ = one.run_all(call)
        assert same_bits(again, kept), "a result depends on the call before"

    def test_a_repeated_call_reads_what_its_tensors_hold_now(
        self, hal_subject: Subject, trial: Trial
    ) -> None:
        """Tokens, slots and bounds change in place from step to step; a layer's weights stay."""
        first = turned(trial, 0)
        held = Held.of(hal_subject, trial, first)
        held.run()
        for turn in TURNS:
            case = held.write(turned(trial, turn))
            held.check(case, held.run(), trial.kind, f"rows turned by {turn}")

    def test_any_negative_id_means_none(self, hal_subject: Subject, trial: Trial) -> None:
        """Not -1 alone: engines mark what is absent in their own ways."""
        call, case = call_of(hal_subject, trial), trial.case()
        want, ends = case.run_all(call)
        for value in (-2, LOWEST):
            got, pools = edits.with_none(case, value).run_all(call)
            assert same_bits(got, want), f"slot {value} is not none"
            assert same_pools(pools, ends), f"slot {value} is not none for a state"

    def test_pads_alone_give_zeros(self, hal_subject: Subject, trial: Trial) -> None:
        """A rank without requests may run a step of pads: no row, or pad rows of a decode."""
        call = call_of(hal_subject, trial)
        case = trial.case([(1, "pad")] * 3) if trial.decode else edits.pads_alone(trial.case(), 3)
        case = edits.with_free(case)
        for value in (1.0, float("nan")):
            got, pools = edits.with_pads(case, value).run_all(call)
            assert not got.any(), "pads are not zero"
            assert same_pools(pools, {n: case.args[n] for n in case.pools}), "a state changed"

    def test_a_call_in_inference_mode_is_right(self, hal_subject: Subject, trial: Trial) -> None:
        """Engines serve in it, and its tensors have no version counters and no graph."""
        call = call_of(hal_subject, trial)
        with torch.inference_mode():
            trial.case().check(call, trial.kind)
