"""Slot attention against a loop in float64, and the store of keys and values."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hal.errors import HalError, StepOrderError
from hal.integrations.transformers.attention import (
    CHUNK,
    UNSERVED,
    KvStore,
    SlotAttention,
    attend,
    no_mask,
    slot_attention,
)
from hal.runtime.batch import Batch, Mode


def oracle(
    query: Tensor, keys: Tensor, values: Tensor, start: int, scale: float, window: int | None
) -> Tensor:
    """One query at a time: the positions it may see, their weights, the weighted sum."""
    heads, length, _ = query.shape
    group = heads // keys.shape[0]
    out = torch.zeros(heads, length, values.shape[2], dtype=torch.float64)
    for head in range(heads):
        for i in range(length):
            last = start + i
            first = 0 if window is None else max(0, last - window + 1)
            seen = slice(first, last + 1)
            k, v = keys[head // group, seen].double(), values[head // group, seen].double()
            weights = torch.softmax(k @ query[head, i].double() * scale, dim=0)
            out[head, i] = weights @ v
    return out


shapes = st.tuples(
    st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 2), (3, 3)]),
    st.sampled_from([(4, 4), (8, 4), (4, 6)]),
    st.integers(0, 12),
    st.integers(1, 9),
    st.sampled_from([None, 1, 2, 5, 100]),
)


@settings(max_examples=60, deadline=None)
@given(shapes, st.sampled_from([0.1, 0.5, 1.0]), st.integers(0, 99))
def test_a_row_equals_the_loop(shape: tuple, scale: float, seed: int) -> None:
    (heads, kv_heads), (width, value_width), start, length, window = shape
    generator = torch.Generator().manual_seed(seed)
    query = 3 * torch.randn(heads, length, width, generator=generator)
    keys = torch.randn(kv_heads, start + length, width, generator=generator)
    values = torch.randn(kv_heads, start + length, value_width, generator=generator)
    got = attend(query, keys, values, start, scale, window)
    wanted = oracle(query, keys, values, start, scale, window)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


def test_the_softmax_is_float32_for_half_inputs() -> None:
    """300 equal scores: a softmax in bfloat16 could not add them up."""
    query = torch.zeros(1, 1, 4, dtype=torch.bfloat16)
    keys = torch.zeros(1, 300, 4, dtype=torch.bfloat16)
    values = torch.ones(1, 300, 4, dtype=torch.bfloat16)
    got = attend(query, keys, values, 299, 1.0, None)
    assert got.dtype is torch.bfloat16
    assert torch.equal(got, torch.ones(1, 1, 4, dtype=torch.bfloat16))


def random_rows(lengths: list[int], kv_heads: int = 2, heads: int = 4) -> tuple[Tensor, ...]:
    total = sum(lengths)
    return tuple(torch.randn(h, total, 8) for h in (heads, kv_heads, kv_heads))


def run(attention: SlotAttention, batch: Batch, *qkv: Tensor, calls: int = 1) -> Tensor:
    with attention.running(batch):
        for _ in range(calls):
            out = attention.forward(*qkv, 0.3, None)
    return out


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=6))
def test_packed_rows_grow_each_in_its_own_slot(steps: list[list[int]]) -> None:
    """Three sequences, fed in any pieces, see each their own past alone."""
    attention = SlotAttention(KvStore(max_len=64))
    past: list[list[tuple[Tensor, Tensor]]] = [[], [], []]
    slots = [5, 1, 3]
    for lengths in steps:
        start = [sum(k.shape[1] for k, _ in past[row]) for row in range(3)]
        q, k, v = random_rows(lengths)
        src = [slot if s else -1 for slot, s in zip(slots, start, strict=True)]
        out = run(attention, Batch(Mode.MIXED, lengths, start, src, slots), q, k, v)
        begin = 0
        for row, length in enumerate(lengths):
            cut = slice(begin, begin + length)
            past[row].append((k[:, cut], v[:, cut]))
            keys, values = (torch.cat(held, dim=1) for held in zip(*past[row], strict=True))
            wanted = oracle(q[:, cut], keys, values, start[row], 0.3, None)
            torch.testing.assert_close(out[:, cut].double(), wanted, rtol=1e-5, atol=1e-5)
            begin += length


def test_calls_of_one_step_are_told_apart_by_their_order() -> None:
    attention = SlotAttention(KvStore(max_len=64))
    first, second = random_rows([2]), random_rows([2])
    one = Batch(Mode.EXTEND, [2], [0], [-1], [1])
    with attention.running(one):
        attention.forward(*first, 0.3, None)
        attention.forward(*second, 0.3, None)
    more = random_rows([1])
    with attention.running(Batch(Mode.DECODE, [1], [2], [1], [1])):
        outs = [attention.forward(*more, 0.3, None) for _ in range(2)]
    for out, (_, keys, values) in zip(outs, (first, second), strict=True):
        wanted = oracle(
            more[0],
            torch.cat([keys, more[1]], dim=1),
            torch.cat([values, more[2]], dim=1),
            2,
            0.3,
            None,
        )
        torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)


def test_tokens_behind_the_last_row_get_zeros() -> None:
    attention = SlotAttention(KvStore(max_len=64))
    out = run(attention, Batch(Mode.EXTEND, [2], [0], [-1], [1]), *random_rows([2, 3]))
    assert not out[:, 2:].any() and out[:, :2].all()


def test_growth_keeps_what_is_held() -> None:
    store = KvStore(max_len=1000)
    whole = torch.randn(2, 300, 4)
    for start in range(0, 300, 7):
        piece = whole[:, start : start + 7]
        keys, values = store.extend(0, 1, start, piece, -piece)
        assert torch.equal(keys, whole[:, : start + 7])
        assert torch.equal(values, -whole[:, : start + 7])


def test_growth_doubles_up_to_the_bound() -> None:
    store = KvStore(max_len=150)
    token = torch.zeros(1, 1, 1)
    sizes = []
    for start in range(150):
        store.extend(0, 1, start, token, token)
        sizes.append(store.bytes // 8)
    assert sorted(set(sizes)) == [CHUNK, 2 * CHUNK, 150]


def test_a_sequence_beyond_the_bound_is_refused_with_both_numbers() -> None:
    store = KvStore(max_len=3)
    with pytest.raises(HalError, match="slot 4 would hold 5 tokens, at most 3 fit"):
        store.extend(0, 4, 0, torch.zeros(1, 5, 1), torch.zeros(1, 5, 1))
    assert store.bytes == 0


def test_release_drops_the_slots_named_and_no_other() -> None:
    store = KvStore(max_len=8)
    token = torch.ones(1, 1, 1)
    for call in range(2):
        for slot in (1, 2, 3):
            store.extend(call, slot, 0, token, token)
    full = store.bytes
    store.release([1, 3, 9])
    assert store.bytes == full // 3
    keys, _ = store.extend(0, 2, 1, 2 * token, token)
    assert keys.flatten().tolist() == [1, 2]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 3),
            st.integers(0, 9),
            st.sampled_from([0, 0, 1, 2, 3]),
            st.integers(1, 9),
        ),
        min_size=3,
        max_size=15,
    )
)
@example([(1, 0, 0, 9), (2, 0, 1, 4), (1, 2, 0, 3)])
@example([(1, 0, 0, 9), (2, 0, 1, 6), (3, 0, 1, 2), (1, 4, 0, 3)])
@example([(1, 0, 0, 9), (2, 0, 1, 6), (2, 3, 0, 1)])
def test_what_a_slot_shares_is_seen_as_it_was_whoever_starts_anew(
    calls: list[tuple[int, int, int, int]],
) -> None:
    """Slots 1 to 3 go on, start anew at any position, and share, as plain lists do."""
    store, held, token = KvStore(max_len=200), {slot: [] for slot in range(1, 4)}, 0.0
    for slot, begin, source, length in calls:
        if source:
            shared = held[source][:length]
            if source != slot and shared:
                store.share(source, slot, len(shared))
                held[slot] = shared
            continue
        start = min(begin, len(held[slot]))
        new = torch.arange(token, token + length + 1)
        token += length + 1
        held[slot] = held[slot][:start] + new.tolist()
        keys, values = store.extend(0, slot, start, new.reshape(1, -1, 1), -new.reshape(1, -1, 1))
        assert keys.flatten().tolist() == held[slot]
        assert (-values).flatten().tolist() == held[slot]
    for slot, wanted in held.items():
        if wanted:
            entry = store._entries[0, slot]
            assert entry.keys[0, : len(wanted), 0].tolist() == wanted


def test_a_call_outside_a_step_is_an_error() -> None:
    q = torch.zeros(1, 1, 1, 4)
    with pytest.raises(StepOrderError, match="inside Runner"):
        slot_attention(torch.nn.Identity(), q, q, q, None)
    with pytest.raises(StepOrderError, match="outside a step"):
        SlotAttention(KvStore(8)).forward(q[0], q[0], q[0], None, None)


def test_a_step_that_failed_leaves_no_attention_behind() -> None:
    attention = SlotAttention(KvStore(8))
    with pytest.raises(RuntimeError, match="boom"), attention.running(Batch(Mode.IDLE)):
        raise RuntimeError("boom")
    test_a_call_outside_a_step_is_an_error()


def test_nested_steps_of_two_models_each_find_their_own() -> None:
    outer, inner = SlotAttention(KvStore(8)), SlotAttention(KvStore(8))
    q = torch.zeros(1, 1, 1, 4)
    batch = Batch(Mode.EXTEND, [1], [0], [-1], [1])
    with outer.running(batch):
        with inner.running(batch):
            slot_attention(torch.nn.Identity(), q, q, q, None)
        slot_attention(torch.nn.Identity(), q, q, q, None)
        slot_attention(torch.nn.Identity(), q, q, q, None)
    assert (outer.calls, inner.calls) == (2, 1)


@pytest.mark.parametrize("name", UNSERVED)
def test_what_the_result_would_miss_is_refused_by_name(name: str) -> None:
    q = torch.zeros(1, 1, 1, 4)
    attention = SlotAttention(KvStore(8))
    with attention.running(Batch(Mode.EXTEND, [1], [0], [-1], [1])):
        with pytest.raises(HalError, match=f"Identity passes {name}, which slot attention"):
            slot_attention(torch.nn.Identity(), q, q, q, None, **{name: q})
        with pytest.raises(HalError, match="passes attention_mask"):
            slot_attention(torch.nn.Identity(), q, q, q, q)
        slot_attention(torch.nn.Identity(), q, q, q, None, **{name: None}, output_attentions=False)


def test_packed_rows_have_no_mask() -> None:
    assert no_mask(batch_size=1, q_length=3) is None
