"""The invariances of an operation: split, batch, pad, slot, write set and freshness."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from hal.testing import edits
from hal.testing.compare import agree, same_bits, same_pools, twice, unwritten
from hal.testing.drafts import call_of
from hal.testing.rows import NAN, changed_outside

if TYPE_CHECKING:
    from hal.testing.case import Case
    from hal.testing.plan import Trial
    from hal.testing.subject import Subject

CUTS = ((1, 2, 3), (63, 64, 65), (2, 5), (1, 16, 17, 69), (64,))
MANY_PADS = 150
LONG = 70
KINDS = ("continue", "fork", "fork", "continue", "fork")


class Invariances:
    """Tests of single operations; `trial` is the plain one of each, `any_trial` every one."""

    def test_every_declared_point_equals_the_oracle(
        self, hal_subject: Subject, any_trial: Trial
    ) -> None:
        """Parity in the limits of dtype and class, zero pads and an exact write set, on poison."""
        any_trial.case().check(hal_subject.call(any_trial), any_trial.kind)

    def test_any_cut_of_a_row_gives_the_same(
        self, hal_subject: Subject, prefill_trial: Trial
    ) -> None:
        """Split invariance: pieces that carry the state equal the whole."""
        call = hal_subject.call(prefill_trial)
        for kind, cuts in zip(KINDS, CUTS, strict=True):
            case = prefill_trial.case([(LONG, kind)], pads=0)
            want, ends = case.expect_all()
            pools, parts = {n: case.args[n] for n in case.pools}, []
            for begin, stop in pairwise((0, *cuts, LONG)):
                part, pools = edits.piece(case, begin, stop).replace(**pools).run_all(call)
                parts.append(part)
            limits = case.limits(prefill_trial.kind, len(parts))
            agree(case, torch.cat(parts), pools, want, ends, limits)

    def test_prefill_of_all_but_one_then_decode_gives_the_same(
        self, hal_subject: Subject, pair: tuple[Trial, Trial]
    ) -> None:
        """Decode continues what prefill left, also from a state shorter than the window."""
        prefill, decode = (call_of(hal_subject, trial) for trial in pair)
        for length in (2, 3, 65):
            case = pair[0].case([(length, "fork")], pads=0)
            want, ends = case.expect_all()
            _, pools = edits.piece(case, 0, length - 1).run_all(prefill)
            last = edits.as_decode(edits.piece(case, length - 1, length).replace(**pools))
            got, pools = last.run_all(decode)
            agree(last, got, pools, want[-1:], ends, case.limits(pair[0].kind, 2))

    def test_a_row_is_the_same_alone_and_in_any_order(
        self, hal_subject: Subject, trial: Trial
    ) -> None:
        """Batch invariance: alone, reversed, and without the rows that have no tokens."""
        call, case = call_of(hal_subject, trial), trial.case()
        together, ends = case.run_all(call)
        count = len(case.rows.src)
        for rows in (*([row] for row in range(count)), range(count)[::-1], edits.filled(case)):
            other = edits.pick(case, list(rows))
            got, pools = other.run_all(call)
            spans = [case.rows.spans()[row] for row in rows]
            want = torch.cat([together[span] for span in spans])
            agree(other, got, pools, want, ends, twice(case.limits(trial.kind)))

    def test_what_pads_hold_changes_no_bit(self, hal_subject: Subject, trial: Trial) -> None:
        """Pad invariance: NaN, infinity and zeros in the pads give the same bits, pads zero.

        They follow a row without tokens or one that has some, and are more than a launch for the
        rows alone would reach.
        """
        call, ends_full = call_of(hal_subject, trial), [(1, "fork"), (3, "continue")]
        for batch in ((), () if trial.decode else ends_full):
            case = trial.case(batch, pads=MANY_PADS)
            case.check(call, trial.kind)
            want, ends = edits.with_pads(case, 0.0).run_all(call)
            pads = [t for t in range(len(want)) if t not in case.rows.live(decode=case.decode)]
            for value in (NAN, float("inf")):
                got, pools = edits.with_pads(case, value).run_all(call)
                assert same_bits(got, want), f"pads of {value} reach a result"
                assert not got[pads].any(), "pads are not zero"
                assert same_pools(pools, ends), f"pads of {value} reach a state"

    def test_which_slots_rows_hold_changes_no_bit(self, hal_subject: Subject, trial: Trial) -> None:
        """Slot invariance: rows are found by their slot ids, whatever these are."""
        call, case = call_of(hal_subject, trial), edits.with_free(trial.case())
        order = [0, *range(2, case.rows.slots), 1]
        moved = edits.with_slots(case, order)
        want, ends = case.run_all(call)
        got, pools = moved.run_all(call)
        assert same_bits(got, want), "a result depends on slot ids"
        for name in case.pools:
            back = moved.held(name, pools[name])[_by_slot(moved, case, order)]
            assert same_bits(back, case.held(name, ends[name])), "states depend on slot ids"

    def test_only_addressed_slots_change(self, hal_subject: Subject, trial: Trial) -> None:
        """Write set: finite sentinels in free slots, sources and between slots keep their bits.

        So do all inputs: tokens, weights, gates, slots and bounds, and memory beside them.
        """
        call, strided = call_of(hal_subject, trial), "strided" in trial.offer.features
        for gap in (0, 2 * strided):
            case = edits.with_free(trial.case(gap=gap, strided=gap > 0))
            with unwritten(case.args | case.options, case.pools):
                _, pools = case.run_all(call)
            for name in case.pools:
                stray = changed_outside(case.args[name], pools[name], case.rows.written(case.track))
                assert stray == 0, f"{stray} elements outside the write set of {name} changed"

    def test_a_fresh_row_reads_nothing_of_its_slot(
        self, hal_subject: Subject, trial: Trial
    ) -> None:
        """What the previous tenant left, NaN or finite, changes no bit of a fresh row."""
        call, case = call_of(hal_subject, trial), trial.case()
        want, ends = case.run_all(call)
        got, pools = edits.with_free(case).run_all(call)
        assert same_bits(got, want), "a result depends on what a slot held before"
        for name in case.pools:
            mine, right = (case.held(name, p[name]) for p in (pools, ends))
            assert same_bits(mine, right), "a state depends on what a slot held before"

    def test_nan_of_a_row_reaches_no_other(self, hal_subject: Subject, trial: Trial) -> None:
        """A row full of NaN, or started from it, leaves the bits and states of every other."""
        call, case = call_of(hal_subject, trial), trial.case()
        want, ends = case.run_all(call)
        full, started = edits.filled(case), edits.own_sources(case)
        broken = [(row, edits.with_row(case, row, NAN)) for row in (full[0], full[-1])]
        broken += [(row, edits.with_start(case, row, NAN)) for row in (started[0], started[-1])]
        for row, other in broken:
            got, pools = other.run_all(call)
            span = case.rows.spans()[row]
            others = [t for t in range(len(want)) if not span.start <= t < span.stop]
            assert same_bits(got[others], want[others]), "NaN of a row reaches another"
            hit = {0, case.rows.dst[row], case.rows.src[row]}
            for name in case.pools:
                stray = changed_outside(ends[name], pools[name], hit)
                assert stray == 0, "NaN of a row reaches another state"


def _by_slot(moved: Case, case: Case, order: list[int]) -> list[int]:
    """Where the written slots of `case`, in their order, are among those of `moved`."""
    theirs = sorted(slot for slot in moved.rows.ends(moved.track) if slot > 0)
    mine = sorted(slot for slot in case.rows.ends(case.track) if slot > 0)
    return [theirs.index(order[slot]) for slot in mine]
