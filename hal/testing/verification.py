"""Acceptance: verify and commit leave what plain decodes of the accepted path leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from hal.testing.compare import agree
from hal.testing.rows import changed_outside, clone_view, i32
from hal.testing.verify_cases import VerifyCase, accept, check_together, tree

if TYPE_CHECKING:
    from hal.interfaces import Provider
    from hal.testing.plan import Trial
    from hal.testing.subject import Subject

STEPS = (4, 1, 3, 1, 1, 4, 2)
"""Drafts of the rows in a run of steps, some without any beside the newest token."""


@dataclass(frozen=True, slots=True)
class Served:
    """Verify and commit of a provider, on CPU tensors."""

    verify: Callable[..., Tensor]
    commit: Callable[..., None]


class Verification:
    """Tests of the operations of speculation."""

    def test_verify_and_commit_equal_the_accepted_path(
        self, hal_subject: Subject, verify_trial: Trial
    ) -> None:
        """Parity over random acceptances, two verifies in flight; verify only reads the state."""
        served, provider = _served(hal_subject, verify_trial)
        cases = [_case(verify_trial, seed) for seed in (0, 1)]
        check_together(cases, served, provider.scratch_spec, verify_trial.kind)

    def test_a_verify_is_committed_to_several_slots(
        self, hal_subject: Subject, plain_verify_trial: Trial
    ) -> None:
        """Points on the path first, then the rows' own slots, all from the scratch of one step."""
        served, provider = _served(hal_subject, plain_verify_trial)
        own, kind = _case(plain_verify_trial, 0), plain_verify_trial.kind
        flight = own.start(served, provider.scratch_spec)
        for target in (_elsewhere(own, 5), _elsewhere(own, 6), own):
            before = clone_view(flight.state)
            target.land(served, flight)
            held = replace(target, case=target.case.replace(state=before))
            errors, _ = held.judge(replace(flight, between=before))
            assert errors.within(target.case.limits(kind)), f"a commit from used scratch: {errors}"

    def test_a_commit_that_does_not_fit_is_refused_before_anything_is_written(
        self, hal_subject: Subject, plain_verify_trial: Trial
    ) -> None:
        """ValueError or TypeError with the operation's name and both sizes; no state changes."""
        served, provider = _served(hal_subject, plain_verify_trial)
        case = _case(plain_verify_trial, 0)
        flight = case.start(served, provider.scratch_spec)
        right, rows = case.commit_args(flight.state), len(case.last)
        mistakes: list[tuple[dict[str, Any], list[str]]] = [
            ({"dst": right["dst"][:-1]}, [str(rows), str(rows - 1)]),
            ({"last": right["last"][:-1]}, [str(rows), str(rows - 1)]),
            ({"dst": right["dst"].long()}, ["int64", "int32"]),
        ]
        for change, words in mistakes:
            try:
                served.commit(**{**right, **change}, scratch=flight.scratch)
            except (ValueError, TypeError) as error:
                text = str(error)
            else:
                text = "it was taken"
            name = f"{case.interface}.commit"
            assert all(word in text for word in (name, *words)), f"{[*change]}: {text}"
            assert changed_outside(flight.between, flight.state, set()) == 0, (
                f"{[*change]}: written"
            )

    def test_every_acceptance_equals_so_many_decodes(
        self, hal_subject: Subject, plain_verify_trial: Trial
    ) -> None:
        """commit of 0 writes nothing, of all tokens the state after the last."""
        served, provider = _served(hal_subject, plain_verify_trial)
        width = plain_verify_trial.settings["verify_width"]
        case = _case(plain_verify_trial, 0)
        for last in range(-1, width):
            ends = [min(last, n - 1) if n else -1 for n in case.case.rows.lengths]
            one = replace(case, last=i32(*ends))
            one.check(served, provider.scratch_spec, plain_verify_trial.kind)

    def test_steps_of_any_acceptance_and_without_drafts_do_not_drift(
        self, hal_subject: Subject, plain_verify_trial: Trial
    ) -> None:
        """A run of steps carries no memory of what was accepted before."""
        served, provider = _served(hal_subject, plain_verify_trial)
        top = max(plain_verify_trial.offer.verify_widths)
        first = plain_verify_trial.case([(1, "continue")], pads=0)
        layer = {n: v for n, v in first.args.items() if n not in first.tokens}
        state, exact = first.args["state"], first.args["state"].double()
        (position,) = first.rows.start
        for number, drafts in enumerate(STEPS, 1):
            count = min(drafts, top)
            own = plain_verify_trial.case([(count, "continue")], pads=0, seed=number)
            rows = replace(first.rows, lengths=(count,), start=(position,))
            bounds = {"query_start_loc": i32(0, count), "max_len": count}
            if "start" in layer:
                layer["start"] = i32(position)
            case = replace(own, rows=rows, args={**own.args, **layer, **bounds})
            step = VerifyCase.of(case, None, accept(rows, seed=number))
            want, exact = replace(step, case=case.replace(state=exact)).expect()
            mine = replace(step, case=case.replace(state=state))
            got, _, state = mine.run(served, provider.scratch_spec)
            limits = case.limits(plain_verify_trial.kind, number)
            agree(replace(case, pools=()), got, {}, want, {}, limits)
            done = replace(case, rows=step.committed())
            agree(done, got, {"state": state}, want, {"state": exact}, limits)
            position += done.rows.lengths[0]

    def test_zero_rows_verify_and_commit(
        self, hal_subject: Subject, plain_verify_trial: Trial
    ) -> None:
        """A rank may verify with rows of no tokens, and nothing happens."""
        served, provider = _served(hal_subject, plain_verify_trial)
        case = plain_verify_trial.case([(0, "continue"), (0, "fork")], pads=2)
        empty = VerifyCase.of(case, None, i32(-1, -1))
        got, _, state = empty.run(served, provider.scratch_spec)
        assert not got.any(), "pads are not zero"
        assert torch.equal(state.nan_to_num(), case.args["state"].nan_to_num())


def _served(subject: Subject, trial: Trial) -> tuple[Served, Provider]:
    provider = subject.provider(trial.layouts)
    commit = cast("Callable[..., None]", subject.call(trial, "commit"))
    return Served(subject.call(trial), commit), provider


def _case(trial: Trial, seed: int) -> VerifyCase:
    """Drafts with random acceptances; their parents where trees are declared."""
    case = trial.case(seed=seed)
    parents = tree(case.rows, seed=seed) if trial.settings["verify"] == "tree" else None
    return VerifyCase.of(case, parents, accept(case.rows, seed=seed), trial.room)


def _elsewhere(own: VerifyCase, seed: int) -> VerifyCase:
    """The same verify with other acceptances, committed to slots that no row has."""
    rows = own.case.rows
    used = {0, *rows.src, *rows.dst}
    free = [slot for slot in range(rows.slots) if slot not in used]
    dst = tuple(free[: len(rows.dst)][:: 1 if seed % 2 else -1])
    case = replace(own.case, rows=replace(rows, dst=dst)).replace(dst=i32(*dst))
    return replace(own, case=case, last=accept(rows, seed=seed))
