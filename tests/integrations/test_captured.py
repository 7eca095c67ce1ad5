"""A recorded decode of a whole model gives the tokens of steps that run one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils import import_utils

from hal.errors import HalError
from hal.integrations.transformers import load, open_folder
from hal.integrations.transformers.attention import attend
from hal.integrations.transformers.captured import DecodeInputs, FixedKv
from hal.runtime.batch import Batch, Mode
from support.models import DRIVEN, folder_of
from support.repeating import repeating_folder, serve_with, shared_prompts, sparing_runner
from support.serving import BUDGET, MAX_LEN, SLOTS, prompts_of, serve

if TYPE_CHECKING:
    from pathlib import Path

    from hal.integrations.transformers import Runner

COUNT, DIM, ROOM = 8, 4, 12


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer as a card does while it records, which transformers asks before it reads a value."""
    monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)


def runner_of(folder: Path, graphs: bool) -> Runner:
    opened = open_folder(folder, "cpu", "float32", graphs=graphs)
    return load(opened, slots=SLOTS, max_batch=SLOTS, max_tokens=BUDGET, max_len=MAX_LEN)


def spoil(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every slot's keys and values begin as NaN, as a tenant may have left them."""
    room = FixedKv._room
    monkeypatch.setattr(FixedKv, "_room", lambda self, like: room(self, like).fill_(float("nan")))


@pytest.mark.parametrize("name", DRIVEN)
def test_recorded_decodes_give_the_same_tokens(
    root: Path, name: str, recording: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch)
    folder = folder_of(name, root)
    wanted = serve(runner_of(folder, graphs=False), prompts_of(), COUNT)
    runner = runner_of(folder, graphs=True)
    run = serve(runner, prompts_of(), COUNT)
    assert run.ids == wanted.ids
    assert runner.decodes is not None
    assert runner.decodes.replays == run.modes.count("DECODE") > len(runner.decodes.sizes)
    assert set(runner.decodes.sizes) <= {1, 2, SLOTS}


@pytest.mark.parametrize("name", ["bailing_hybrid", "falcon_h1", "lfm2", "qwen3_next"])
@pytest.mark.parametrize(("drafts", "cached"), [(4, 0), (None, 6), (4, 6)])
def test_drafts_and_cached_prefixes_beside_recorded_decodes_change_no_token(
    root: Path, name: str, drafts: int | None, cached: int, recording: None
) -> None:
    folder, prompts = repeating_folder(name, root), shared_prompts()
    wanted, _ = serve_with(sparing_runner(folder, None, 0), prompts, COUNT)
    runner = sparing_runner(folder, drafts, cached, graphs=True)
    run, engine = serve_with(runner, prompts, COUNT)
    assert run.ids == wanted.ids
    assert runner.decodes is not None
    assert runner.decodes.replays == run.modes.count("DECODE") > 0
    assert engine.prefixes is None or engine.prefixes.hits > 0


def test_a_forward_that_reads_a_value_is_an_error_that_says_so(root: Path) -> None:
    """On the CPU transformers looks into the positions, since nothing tells it of the record."""
    runner = runner_of(folder_of("lfm2", root), graphs=True)
    with pytest.raises(HalError, match=r"cannot be recorded: .*item.*; run it without graphs"):
        serve(runner, prompts_of(), COUNT)


def test_a_batch_that_is_refused_records_and_moves_nothing(root: Path, recording: None) -> None:
    runner = runner_of(folder_of("lfm2", root), graphs=True)
    (slot,) = runner.alloc()
    runner.step(Batch(Mode.EXTEND, [2], [0], [-1], [slot]), [5, 6], [0])
    before = [t.clone() for pair in runner.kv._calls.values() for t in pair]
    with pytest.raises(ValueError, match="slot"):
        runner.step(Batch(Mode.DECODE, [1], [2], [slot], [99]), [7], [0])
    after = [t for pair in runner.kv._calls.values() for t in pair]
    for had, has in zip(before, after, strict=True):
        assert torch.equal(had[1:], has[1:])
    runner.step(Batch(Mode.DECODE, [1], [2], [slot], [slot]), [7], [0])


def test_a_record_has_no_more_rows_than_a_step_may_have_tokens(root: Path, recording: None) -> None:
    opened = open_folder(folder_of("lfm2", root), "cpu", "float32", graphs=True)
    runner = load(opened, slots=4, max_batch=8, max_tokens=3, max_len=MAX_LEN)
    slots = runner.alloc(3)
    for slot in slots:
        runner.step(Batch(Mode.EXTEND, [2], [0], [-1], [slot]), [5, 6], [0])
    runner.step(Batch(Mode.DECODE, [1] * 3, [2] * 3, slots, slots), [7, 8, 9], [0, 1, 2])
    assert runner.decodes is not None and runner.decodes.sizes == (3,)


def test_a_replayed_token_beyond_the_bound_is_refused_before_anything_runs(
    root: Path, recording: None
) -> None:
    opened = open_folder(folder_of("lfm2", root), "cpu", "float32", graphs=True)
    runner = load(opened, slots=2, max_batch=2, max_tokens=8, max_len=4)
    (slot,) = runner.alloc()
    runner.step(Batch(Mode.EXTEND, [3], [0], [-1], [slot]), [5, 6, 7], [0])
    runner.step(Batch(Mode.DECODE, [1], [3], [slot], [slot]), [8], [0])
    pool = runner.backend.pool
    before = [pool.tensors(spec.layer)[spec.name].clone() for spec in pool.states]
    with pytest.raises(HalError, match=f"slot {slot} would hold 5 tokens, at most 4 fit"):
        runner.step(Batch(Mode.DECODE, [1], [4], [slot], [slot]), [9], [0])
    for spec, old in zip(pool.states, before, strict=True):
        assert torch.equal(pool.tensors(spec.layer)[spec.name], old)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, ROOM - 1), min_size=1, max_size=5),
    st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    st.sampled_from([None, 1, 3, 50]),
    st.integers(0, 99),
)
def test_a_decode_equals_attention_row_by_row(
    ends: list[int], heads: tuple[int, int], window: int | None, seed: int
) -> None:
    torch.manual_seed(seed)
    (queries, own), rows = heads, len(ends)
    kv, reference = FixedKv(rows, ROOM), FixedKv(rows, ROOM)
    slots = (torch.randperm(rows) + 1).tolist()
    for slot, end in zip(slots, ends, strict=True):
        past = torch.randn(own, end, DIM), torch.randn(own, end, DIM + 1)
        for store in (kv, reference):
            store.extend(0, slot, 0, *past)
    inputs = DecodeInputs(torch.zeros(3, rows + 2, dtype=torch.long), torch.arange(ROOM))
    inputs.write(Batch(Mode.DECODE, [1] * rows, ends, slots, slots), [7] * rows)
    query = torch.randn(queries, rows + 2, DIM)
    keys, values = torch.randn(own, rows + 2, DIM), torch.randn(own, rows + 2, DIM + 1)
    got = kv.decode(inputs, 0, query, keys, values, 0.5, window)
    assert torch.isfinite(got).all()
    for row, (slot, end) in enumerate(zip(slots, ends, strict=True)):
        at = slice(row, row + 1)
        held = reference.extend(0, slot, end, keys[:, at], values[:, at])
        wanted = attend(query[:, at], *held, end, 0.5, window)
        torch.testing.assert_close(got[:, at], wanted)
        assert torch.equal(kv.extend(0, slot, ROOM, keys[:, :0], values[:, :0])[0][:, : end + 1],
                           held[0])  # fmt: skip


def test_a_sequence_beyond_the_bound_is_refused_and_a_copy_is_its_own() -> None:
    kv, new = FixedKv(2, 3), torch.ones(1, 2, DIM)
    kv.extend(0, 1, 0, new, new)
    kv.share(1, 2, 2)
    kv.extend(0, 1, 0, 5 * new, 5 * new)
    keys, _ = kv.extend(0, 2, 2, new[:, :1], new[:, :1])
    assert torch.equal(keys, torch.ones(1, 3, DIM))
    with pytest.raises(HalError, match="slot 2 would hold 4 tokens, at most 3 fit"):
        kv.extend(0, 2, 3, new[:, :1], new[:, :1])
