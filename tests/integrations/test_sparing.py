"""Drafts and cached prefixes give the tokens of transformers alone, family by family."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch

from hal.errors import HalError
from hal.integrations.transformers import Engine, Runner, Undriven, load_weights, open_folder
from hal.integrations.transformers.attention import Entry, KvStore
from hal.runtime.batch import Batch, Mode
from hal.runtime.request import FinishReason
from support.models import folder_of, solo
from support.repeating import repeating_folder, serve_with, shared_prompts, sparing_runner

if TYPE_CHECKING:
    from pathlib import Path

    from support.serving import Run

COUNT, WIDTH = 20, 4
FAMILIES = (
    "bailing_hybrid",
    "bamba",
    "falcon_h1",
    "falcon_mamba",
    "kimi_linear",
    "lfm2",
    "minimax",
    "olmo_hybrid",
    "qwen3_next",
    "zaya",
)
"""Every kind of stateful layer; of zamba see below."""

BOTH = ("qwen3_5_text", "lfm2")


@dataclass(frozen=True)
class Wanted:
    """The folder of a family, and what transformers gives for each prompt alone."""

    folder: Path
    ids: list[list[int]]
    stop: list[int]

    def check(self, run: Run) -> None:
        assert [run.ids[i] for i in range(len(self.ids))] == self.ids


@cache
def wanted_of(name: str, root: Path) -> Wanted:
    folder = repeating_folder(name, root)
    opened = open_folder(folder, "cpu")
    model = load_weights(opened)
    alone = [solo(model, prompt, COUNT)[0] for prompt in shared_prompts()]
    return Wanted(folder, alone, sorted(opened.stop_ids()))


@pytest.mark.parametrize("name", FAMILIES)
def test_speculation_gives_the_same_tokens(root: Path, name: str) -> None:
    wanted = wanted_of(name, root)
    run, engine = serve_with(
        sparing_runner(wanted.folder, WIDTH, 0), shared_prompts(), COUNT, wanted.stop
    )
    wanted.check(run)
    drafts = engine.drafts
    assert drafts is not None and engine.prefixes is None
    assert drafts.steps == run.modes.count("VERIFY") > 0
    assert 0 < drafts.accepted <= drafts.drafted


@pytest.mark.parametrize("name", [*FAMILIES, "zamba"])
def test_cached_prefixes_give_the_same_tokens_from_fewer_fed(root: Path, name: str) -> None:
    wanted = wanted_of(name, root)
    runner = sparing_runner(wanted.folder, None, 6)
    run, engine = serve_with(runner, shared_prompts(), COUNT, wanted.stop)
    wanted.check(run)
    stats, prompts = engine.prefixes, shared_prompts()
    assert stats is not None and engine.drafts is None
    assert stats.admitted == len(prompts)
    assert stats.hits >= 3 and stats.saved >= 3 * 9
    assert stats.stored > 0 and stats.evicted > 0
    fed = sum(len(plan.tokens) for plan in run.plans)
    assert fed == sum(map(len, prompts)) - stats.saved + sum(len(ids) - 1 for ids in wanted.ids)
    runner.drop_prefixes()
    assert (runner.free_slots, runner.kv.bytes) == (9, 0)


@pytest.mark.parametrize("name", FAMILIES)
def test_both_together_over_a_cache_that_is_too_small_and_then_a_warm_one(
    root: Path, name: str
) -> None:
    wanted = wanted_of(name, root)
    small = sparing_runner(wanted.folder, WIDTH, 1)
    run, engine = serve_with(small, shared_prompts(), COUNT, wanted.stop)
    wanted.check(run)
    assert engine.prefixes.hits > 0 and engine.prefixes.evicted > 0
    assert engine.drafts.accepted > 0
    warm = sparing_runner(wanted.folder, WIDTH, 30)
    for _ in range(2):
        run, engine = serve_with(warm, shared_prompts(), COUNT, wanted.stop)
        wanted.check(run)
    assert engine.prefixes.hits == len(shared_prompts())
    assert engine.prefixes.saved == sum(len(prompt) - 1 for prompt in shared_prompts())


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("grid", [4, 7])
def test_the_cache_keeps_states_on_the_grid_that_the_backend_has_now(
    root: Path, name: str, grid: int
) -> None:
    wanted = wanted_of(name, root)
    runner = sparing_runner(wanted.folder, None, 6)
    runner.backend.limits = replace(runner.backend.limits, track=grid)
    run, engine = serve_with(runner, shared_prompts(), COUNT, wanted.stop)
    wanted.check(run)
    points = [position for plan in run.plans for _, position, _ in plan.batch.track]
    assert points and all(position % grid == 0 for position in points)
    assert engine.prefixes.hits > 0


@pytest.mark.parametrize("name", BOTH)
def test_some_drafts_hold_and_some_do_not(root: Path, name: str) -> None:
    wanted = wanted_of(name, root)
    _, engine = serve_with(
        sparing_runner(wanted.folder, WIDTH, 0), shared_prompts(), COUNT, wanted.stop
    )
    assert 0 < engine.drafts.accepted < engine.drafts.drafted


@pytest.mark.parametrize("name", BOTH)
def test_each_draft_that_holds_saves_a_step(root: Path, name: str) -> None:
    wanted, held = wanted_of(name, root), 0
    runner = sparing_runner(wanted.folder, WIDTH, 0)
    for number, prompt in enumerate(shared_prompts()):
        run, engine = serve_with(runner, [prompt], COUNT, wanted.stop)
        assert run.ids[0] == wanted.ids[number]
        chunks = -(-len(prompt) // 12)
        assert len(run.plans) == chunks + len(run.ids[0]) - 1 - engine.drafts.accepted
        held += engine.drafts.accepted
    assert held > 0


@pytest.mark.parametrize("width", [2, 3, 8])
def test_any_width_gives_the_same_tokens(root: Path, width: int) -> None:
    wanted = wanted_of("qwen3_5_text", root)
    run, engine = serve_with(
        sparing_runner(wanted.folder, width, 0), shared_prompts(), COUNT, wanted.stop
    )
    wanted.check(run)
    assert engine.drafts.accepted > 0
    assert max(max(p.batch.lengths) for p in run.plans if p.batch.mode is Mode.VERIFY) == width


@pytest.mark.parametrize("name", BOTH)
def test_keys_that_nobody_may_see_change_nothing(
    root: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN wherever no token was accepted yet: in grown memory, and in place of lost drafts."""
    wanted = wanted_of(name, root)
    runner = sparing_runner(wanted.folder, WIDTH, 4)
    grow, commit = KvStore._grow, runner.commit

    def dirty(store: KvStore, old: Entry | None, end: int, *kv: torch.Tensor) -> Entry:
        entry = grow(store, old, end, *kv)
        held = 0 if old is None else old.keys.shape[1]
        entry.keys[:, held:], entry.values[:, held:] = float("nan"), float("nan")
        return entry

    def forgetful(accepted: list[int]) -> None:
        batch = runner._verifying
        assert batch is not None
        commit(accepted)
        with torch.inference_mode():
            for (_, slot), entry in runner.kv._entries.items():
                if slot in batch.dst:
                    row = batch.dst.index(slot)
                    entry.keys[:, batch.start[row] + accepted[row] :] = float("nan")
                    entry.values[:, batch.start[row] + accepted[row] :] = float("nan")

    monkeypatch.setattr(KvStore, "_grow", dirty)
    monkeypatch.setattr(runner, "commit", forgetful)
    run, engine = serve_with(runner, shared_prompts(), COUNT, wanted.stop)
    wanted.check(run)
    assert engine.drafts.accepted < engine.drafts.drafted


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("lost", ["state", "keys"])
def test_a_prefix_that_is_cached_wrongly_is_seen(
    root: Path, name: str, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutation that shows these tests look: a fork starts from half of what it should."""
    wanted = wanted_of(name, root)
    runner = sparing_runner(wanted.folder, None, 6)
    begin, share = runner.backend.begin, KvStore.share

    def forgetful(batch: Batch) -> None:
        for src, dst in zip(batch.src, batch.dst, strict=True):
            if src >= 0 and src != dst:
                for spec in runner.backend.selection.states:
                    runner.backend.pool.tensors(spec.layer)[spec.name][src] = 0
        begin(batch)

    def blind(store: KvStore, source: int, target: int, length: int) -> None:
        share(store, source, target, length)
        for (_, slot), entry in store._entries.items():
            if slot == target:
                entry.values = torch.zeros_like(entry.values)

    if lost == "state":
        monkeypatch.setattr(runner.backend, "begin", forgetful)
    else:
        monkeypatch.setattr(KvStore, "share", blind)
    run, engine = serve_with(runner, shared_prompts(), COUNT, wanted.stop)
    assert engine.prefixes.hits > 0
    with pytest.raises(AssertionError):
        wanted.check(run)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("when", ["forward", "logits", "commit"])
def test_a_verify_step_that_fails_can_be_cancelled_and_the_runner_used_again(
    root: Path, name: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = wanted_of(name, root)
    runner = sparing_runner(wanted.folder, WIDTH, 6)
    engine = engine_of(wanted, runner)
    forward = runner._forward

    def failing(batch: Batch, *given: object) -> torch.Tensor:
        logits = forward(batch, *given)
        if batch.mode is not Mode.VERIFY or when == "commit":
            return logits
        if when == "forward":
            raise RuntimeError("boom")
        return logits * float("nan")

    def no_commit(_: object) -> None:
        raise RuntimeError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_forward", failing)
        if when == "commit":
            patch.setattr(runner.backend, "commit", no_commit)
        with pytest.raises((RuntimeError, HalError), match=r"boom|not finite"):
            list(engine.run())
    cancelled_then_all(wanted, engine)


def engine_of(wanted: Wanted, runner: Runner) -> Engine:
    """An engine that all prompts wait for."""
    engine = Engine(runner, max_batch=3, token_budget=12, stop=wanted.stop)
    for prompt in shared_prompts():
        engine.submit(prompt, COUNT)
    return engine


def cancelled_then_all(wanted: Wanted, engine: Engine) -> None:
    """Cancel; what is cached then has to serve the next engine rightly."""
    runner = engine.runner
    assert {event.reason for event in engine.cancel()} == {FinishReason.CANCELLED}
    assert runner.free_slots + len(runner.prefixes.slots) == 9
    assert not any(runner.prefixes.holders(slot) for slot in runner.prefixes.slots)
    runner.backend.begin(Batch(Mode.IDLE))  # no commit is owed
    run, _ = serve_with(runner, shared_prompts(), COUNT, wanted.stop)
    wanted.check(run)


@pytest.mark.parametrize("steps", [1, 5, 9, 10])
def test_after_a_cancel_what_is_cached_is_true(root: Path, steps: int) -> None:
    wanted = wanted_of("qwen3_5_text", root)
    engine = engine_of(wanted, sparing_runner(wanted.folder, WIDTH, 6))
    for _ in range(steps):
        engine.step()
    cancelled_then_all(wanted, engine)


@pytest.mark.parametrize("name", BOTH)
def test_a_fork_goes_on_from_the_states_and_keys_of_its_source_and_leaves_them(
    root: Path, name: str
) -> None:
    runner = sparing_runner(repeating_folder(name, root), WIDTH, 3)
    prompt, tails = [5, 6, 7, 8, 9], ([10, 11, 12], [13, 14, 15])
    runner.step(Batch(Mode.EXTEND, [5], [0], [-1], [1], [(0, 4, 4)]), prompt, [0])
    alone = [
        runner.step(Batch(Mode.EXTEND, [7], [0], [-1], [6]), [*prompt[:4], *tail], [0])
        for tail in tails
    ]
    forked = runner.step(
        Batch(Mode.EXTEND, [3, 3], [4, 4], [4, 4], [2, 3]), [*tails[0], *tails[1]], [0, 1]
    )
    torch.testing.assert_close(forked, torch.cat(alone), rtol=1e-4, atol=1e-4)
    again = runner.step(Batch(Mode.VERIFY, [3], [4], [4], [5]), tails[1], [0])
    assert again.shape[0] == 3
    torch.testing.assert_close(again[-1:], alone[1], rtol=1e-4, atol=1e-4)
    runner.commit([2])
    last = runner.step(Batch(Mode.DECODE, [1], [6], [5], [5]), tails[1][2:], [0])
    torch.testing.assert_close(last, alone[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_a_track_point_among_drafts_is_kept_where_the_commit_reaches_it(
    root: Path, name: str, accepted: int
) -> None:
    runner = sparing_runner(repeating_folder(name, root), WIDTH, 3)
    tokens = [5, 6, 7, 8, 9, 10, 11]
    alone = runner.step(Batch(Mode.EXTEND, [7], [0], [-1], [6]), tokens, [0])
    runner.step(Batch(Mode.EXTEND, [3], [0], [-1], [1]), tokens[:3], [0])
    held = runner.kv.bytes
    runner.step(Batch(Mode.VERIFY, [3], [3], [1], [1], [(0, 5, 4)]), tokens[3:6], [0])
    runner.commit([accepted])
    assert {slot for _, slot in runner.kv._entries if slot == 4} == ({4} if accepted > 1 else set())
    assert runner.kv.bytes == held
    if accepted > 1:
        got = runner.step(Batch(Mode.EXTEND, [2], [5], [4], [5]), tokens[5:], [0])
        torch.testing.assert_close(got, alone, rtol=1e-4, atol=1e-4)


def test_zamba_is_refused_speculation_before_its_weights_are_read(root: Path) -> None:
    folder = folder_of("zamba", root)
    with pytest.raises(Undriven, match="its mixers scan 2 heads one by one, and such a scan has"):
        open_folder(folder, "cpu", speculative=WIDTH)
    assert open_folder(folder, "cpu", prefix_cache=True).selection.options.prefix_cache


def test_a_runner_without_either_has_neither(root: Path) -> None:
    runner = sparing_runner(folder_of("lfm2", root), None, 0)
    _, engine = serve_with(runner, [[5, 6], [5, 6]], 3)
    assert (engine.drafts, engine.prefixes) == (None, None)
    assert runner.prefixes.slots == ()


def test_slots_share_keys_until_one_of_them_goes_on() -> None:
    store = KvStore(max_len=200)
    keys = torch.randn(2, 10, 4)
    store.extend(0, 1, 0, keys, keys)
    held = store.bytes
    store.share(1, 2, 6)
    store.share(2, 3, 6)
    assert store.bytes == held
    mine = torch.randn(2, 1, 4)
    got, _ = store.extend(0, 3, 6, mine, mine)
    assert torch.equal(got, torch.cat((keys[:, :6], mine), dim=1))
    assert store.bytes > held
    theirs = torch.randn(2, 1, 4)
    assert torch.equal(store.extend(0, 1, 10, theirs, theirs)[0][:, :10], keys)
    assert torch.equal(store.extend(0, 2, 6, theirs, theirs)[0][:, :6], keys[:, :6])
    store.release([1])
    assert torch.equal(store.extend(0, 2, 7, mine, mine)[0][:, :6], keys[:, :6])
    store.release([2, 3])
    assert store.bytes == 0


def test_a_slot_that_is_shared_into_loses_what_it_held() -> None:
    store = KvStore(max_len=200)
    keys = torch.randn(2, 10, 4)
    for call in (0, 1):
        store.extend(call, 2, 0, keys, keys)
    store.extend(0, 1, 0, keys, keys)
    store.share(1, 2, 3)
    assert {key for key in store._entries if key[1] == 2} == {(0, 2)}
