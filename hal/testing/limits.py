"""What the arguments of a call bound without saying it: `max_len`, and the result's own form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal.testing.drafts import call_of

if TYPE_CHECKING:
    from hal.testing.plan import Trial
    from hal.testing.subject import Subject

FAR = 1000
"""A bound far above the rows' lengths."""


class Bounds:
    """Tests of single operations at their plain trial, and once in every dtype."""

    def test_max_len_is_an_upper_bound(self, hal_subject: Subject, packed_trial: Trial) -> None:
        """A grid may be larger than the rows; of verify, as large as its scratch is wide."""
        call, case = call_of(hal_subject, packed_trial), packed_trial.case()
        exact = case.args["max_len"]
        bounds = [exact + 1, FAR]
        if "verify_width" in packed_trial.settings:
            width = packed_trial.settings["verify_width"]
            case = packed_trial.case([(max(1, width - 1), "fork"), (1, "continue")])
            bounds = [width, packed_trial.room]
        for bound in bounds:
            case.replace(max_len=bound).check(call, packed_trial.kind)

    def test_a_result_of_its_own_has_the_inputs_dtype_and_the_rows_shape(
        self, hal_subject: Subject, dtype_trial: Trial
    ) -> None:
        """Without `out` an operation gives what it would have filled."""
        call, case = call_of(hal_subject, dtype_trial), dtype_trial.case()
        got, _ = case.run(call)
        want, _ = case.expect()
        assert got.dtype == case.dtype, f"the result is {got.dtype}, the inputs are {case.dtype}"
        assert got.shape == want.shape, f"the result is {[*got.shape]}, not {[*want.shape]}"
        case.check(call, dtype_trial.kind, poison=False)
