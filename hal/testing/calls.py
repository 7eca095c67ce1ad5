"""What a call may be given and has to do with it: empties, views, results, tracks, far slots."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hal.testing import edits
from hal.testing.compare import agree, same_bits, same_pools
from hal.testing.drafts import call_of
from hal.testing.far import Far
from hal.testing.metric import name_of, worst
from hal.testing.rows import NAN, clone_view, i32

if TYPE_CHECKING:
    from hal.testing.case import Case
    from hal.testing.plan import Trial
    from hal.testing.subject import Subject

LONG = 140


class Calls:
    """Tests of single operations at their plain trial."""

    def test_rows_without_tokens_change_nothing(
        self, hal_subject: Subject, packed_trial: Trial
    ) -> None:
        """Empty rows with live slots: leading, between, trailing, and nothing else at all."""
        call = call_of(hal_subject, packed_trial)
        kinds = [(0, "fork"), (3, "fork"), (0, "continue"), (0, "fork"), (4, "fork"), (0, "fork")]
        case = edits.with_free(packed_trial.case(kinds, pads=2))
        case.check(call, packed_trial.kind)
        for pads in (3, 0):
            empty = edits.with_free(packed_trial.case([(0, "continue"), (0, "fork")], pads=pads))
            got, pools = empty.run_all(call)
            assert not got.any(), "pads are not zero"
            assert same_pools(pools, {name: empty.args[name] for name in empty.pools}), (
                "a state changed"
            )

    def test_no_rows_give_an_empty_result(self, hal_subject: Subject, trial: Trial) -> None:
        """B = 0 and T = 0 are legal."""
        call, full = call_of(hal_subject, trial), trial.case()
        case = edits.without_rows(full)
        got, pools = case.run_all(call)
        assert got.shape == (0, *full.run(call)[0].shape[1:])
        assert same_pools(pools, {name: case.args[name] for name in case.pools}), "a state changed"

    def test_views_equal_copies(self, hal_subject: Subject, strided_trial: Trial) -> None:
        """Column slices, padded pools and strided ids are held to the oracle as dense ones are.

        Not to the bits of the dense call: where a compiler may not assume alignment it reads in
        smaller pieces, and partial sums are then others. NaN lies beside every slice, and memory
        between slots keeps its bits.
        """
        call = call_of(hal_subject, strided_trial)
        for gap in (1, 8):
            strided_trial.case(gap=gap, strided=True).check(call, strided_trial.kind)
        edits.spread(strided_trial.case()).check(call, strided_trial.kind)

    def test_a_given_result_is_filled_and_returned(
        self, hal_subject: Subject, trial: Trial
    ) -> None:
        """`out` of any strides gets all of the result, and nothing beside it."""
        call, case = call_of(hal_subject, trial), trial.case()
        want, _ = case.run(call)
        wide = torch.full((*want.shape[:-1], 2 * want.shape[-1]), NAN, dtype=want.dtype)
        for out in (torch.full_like(want, NAN), wide[..., ::2]):
            got, _ = case.run(call, out=out)
            assert got is out, "the result is not the given tensor"
            assert same_bits(out, want), "out does not hold the result"
        assert wide[..., 1::2].isnan().all(), "memory between the elements of out was written"

    def test_a_tracked_state_is_that_of_the_prefix_alone(
        self, hal_subject: Subject, track_trial: Trial
    ) -> None:
        """Every track point equals a run that ends there."""
        call, grid = hal_subject.call(track_trial), min(track_trial.offer.track)
        case = track_trial.case([(2 * grid + LONG, "fork")], track=grid, pads=0)
        _, pools = case.run_all(call)
        plain = replace(case, options={n: v for n, v in case.options.items() if n != "track"})
        assert case.track is not None
        for row, count, slot in case.track.tolist():
            if slot < 0:
                continue
            alone = edits.piece(plain, 0, count)
            _, ends = alone.run_all(call)
            for name in case.pools:
                there = replace(alone, rows=replace(alone.rows, dst=(slot,)))
                tracked, right = there.held(name, pools[name]), alone.held(name, ends[name])
                limit = 2 * case.limits(track_trial.kind)[1]
                assert worst(tracked, right.double(), 1) <= limit, f"row {row}, count {count}"

    def test_two_runs_give_the_same_bits(self, hal_subject: Subject, trial: Trial) -> None:
        """No result depends on the order in which a device happens to work."""
        call, case = call_of(hal_subject, trial), trial.case()
        (one, ends), (two, again) = case.run_all(call), case.run_all(call)
        assert same_bits(one, two)
        assert same_pools(ends, again)

    def test_sixty_four_decodes_in_place_stay_within_the_limits(
        self, hal_subject: Subject, decode_trial: Trial
    ) -> None:
        """Errors of decode steps do not add up beyond their rounding."""
        call = hal_subject.call(decode_trial)
        steps = [decode_trial.case([(1, "continue")], seed=step) for step in range(64)]
        rows = [replace(s.rows, start=(3 + i,), src=steps[0].rows.src, dst=steps[0].rows.src)
                for i, s in enumerate(steps)]  # fmt: skip
        pools = {name: steps[0].args[name] for name in steps[0].pools}
        exact = {name: pool.double() for name, pool in pools.items()}
        layer = {n: v for n, v in steps[0].args.items() if n not in steps[0].tokens}
        for number, (step, row) in enumerate(zip(steps, rows, strict=True), 1):
            ids = {"src": i32(*row.src), "dst": i32(*row.dst)}
            ids |= {"start": i32(*row.start)} if "start" in step.args else {}
            same = replace(step, rows=row, args={**step.args, **layer, **ids})
            want, exact = same.replace(**exact).expect_all()
            got, pools = same.replace(**pools).run_all(call)
            limits = steps[0].limits(decode_trial.kind, number)
            agree(same, got, pools, want, exact, limits)

    def test_slots_beyond_32_bits_are_addressed(
        self, hal_subject: Subject, plain_trial: Trial
    ) -> None:
        """Slots whose first element lies past 2^32 are read and written, and no wrapped one."""
        case = plain_trial.case([(1 if plain_trial.decode else 3, "continue")], pads=0)
        far = Far(hal_subject.place, case, plain_trial.kind)
        far.check(call_of(hal_subject, plain_trial))

    def test_track_points_beyond_32_bits_are_addressed(
        self, hal_subject: Subject, track_trial: Trial
    ) -> None:
        """So are the slots of track points."""
        grid = min(track_trial.offer.track)
        case = track_trial.case([(grid + 2, "continue")], pads=0, track=grid)
        Far(hal_subject.place, case, track_trial.kind).check(hal_subject.call(track_trial))

    def test_bad_arguments_are_refused_before_anything_is_written(
        self, hal_subject: Subject, plain_trial: Trial
    ) -> None:
        """ValueError or TypeError with the operation's name and both sizes; no state changes."""
        call, case = call_of(hal_subject, plain_trial), plain_trial.case()
        for label, args, words in _mistakes(case):
            wrong = case.replace(**args)
            pools = {name: clone_view(wrong.args[name]) for name in wrong.pools}
            try:
                call(**{**wrong.args, **pools}, **wrong.options)
            except (ValueError, TypeError) as error:
                text = str(error)
            else:
                text = "it was taken"
            assert all(word in text for word in (plain_trial.operation, *words)), f"{label}: {text}"
            assert same_pools(pools, {n: wrong.args[n] for n in wrong.pools}), (
                f"{label}: state written"
            )


def _mistakes(case: Case) -> list[tuple[str, dict[str, Any], list[str]]]:
    """Arguments that do not fit the others: label, arguments, what the message has to say."""
    rows, state = len(case.rows.src), case.args[case.pools[0]]
    name = next(n for n in ("x", "q", "mixed_qkv") if n in case.args)
    tokens = case.args[name]
    other = torch.float32 if case.dtype != torch.float32 else torch.bfloat16
    shape = _result_of(case)
    found: list[tuple[str, dict[str, Any], list[str]]] = [
        (
            "a result of another dtype",
            {"out": torch.zeros(shape, dtype=other)},
            [name_of(other), name_of(case.dtype)],
        ),
        (
            "a result of another shape",
            {"out": torch.zeros((shape[0] + 1, *shape[1:]), dtype=case.dtype)},
            [str(shape[0] + 1), str(shape[0])],
        ),
        ("a row too few", {"src": case.args["src"][:-1]}, [str(rows), str(rows - 1)]),
        ("int64 slots", {"src": case.args["src"].long()}, ["int64", "int32"]),
        ("another axis", {case.pools[0]: state[..., 0]}, []),
        ("an integer input", {name: tokens.int()}, ["int32"]),
    ]
    if not case.operation.endswith(".verify"):  # which takes no dst
        short = {"dst": case.args["dst"][:-1]}
        found.append(("a target too few", short, [str(rows), str(rows - 1)]))
    if "start" in case.args:
        short = {"start": case.args["start"][:-1]}
        found.append(("a start too few", short, [str(rows), str(rows - 1)]))
    if case.decode:
        count = tokens.shape[0]
        fewer = {n: t[:-1] for n, t in case.tokens.items()}
        found.append(("a token too few", fewer, [str(count - 1), str(rows)]))
    weight = next((n for n in ("weight", "conv_weight") if n in case.args), None)
    if weight is not None:
        more = torch.cat((case.args[weight], case.args[weight][:1]))
        sizes = [str(more.shape[0]), str(more.shape[0] - 1)]
        found.append(("a channel too many", {weight: more}, sizes))
    return found


def _result_of(case: Case) -> tuple[int, ...]:
    """The shape of the call's result."""
    return tuple(case.expect()[0].shape)
