"""A request's state moves between parallel sizes, layouts and pools bit by bit, or not at all."""

import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.model import DeltaDims, ModelSpec, ScanDims, read
from hal.options import Shard
from hal.runtime.pool import Pool, Slot
from hal.runtime.transfer import FORMAT, SlotState, cut, merge
from hal.sharding import shard_reasons
from hal.states import StateFormat, StateSpec
from support.model_configs import tiny
from support.slots import FORM, Whole, fill, pools, slot_bits, whole_state

START = 9


def wide(groups: int) -> Callable[[], ModelSpec]:
    """Bamba with eight heads, and groups that four ranks share, own or cut."""

    def config() -> ModelSpec:
        model = read(tiny("bamba"))
        layers = tuple(
            replace(layer, dims=ScanDims(H=8, P=6, N=5, G=groups, W=4))
            if isinstance(layer.dims, ScanDims)
            else layer
            for layer in model.layers
        )
        return replace(model, layers=layers)

    return config


MODELS: dict[str, Callable[[], ModelSpec]] = {
    "cca": lambda: read(tiny("zaya", num_attention_heads=16, num_key_value_heads=4, head_dim=4)),
    "delta": lambda: read(
        tiny(
            "qwen3_next",
            linear_num_key_heads=4,
            linear_num_value_heads=8,
            linear_key_head_dim=6,
            linear_value_head_dim=10,
        )
    ),
    "kimi": lambda: read(tiny("kimi_linear")),
    "lightning": lambda: read(tiny("minimax")),
    "mamba1": lambda: read(tiny("mamba")),
    "one_group": wide(1),
    "short_conv": lambda: read(tiny("lfm2")),
    "two_groups": wide(2),
    "eight_groups": wide(8),
    "zamba": lambda: read(tiny("zamba")),
}
LAYOUTS = [(conv, rule) for conv in ("CW", "WC", "ring") for rule in ("VK", "KV")]
CONV = st.sampled_from(["CW", "WC", "ring"])
RULE = st.sampled_from(["VK", "KV"])
SIZES = [1, 2, 4]


def form(conv: str = "CW", rule: str = "VK", dtype: str = "float32") -> StateFormat:
    return replace(FORM, layouts={"conv": conv, "recurrent": rule, "scan": "PN"}, dtype=dtype)


def model_of(name: str) -> ModelSpec:
    return MODELS[name]()


def sizes_of(name: str) -> list[int]:
    return [size for size in SIZES if not shard_reasons(model_of(name), size)]


def load(held: list[Pool], parts: list[SlotState]) -> list[Slot]:
    """Import one part a rank into a new slot of each pool."""
    slots = [pool.alloc(2)[1] for pool in held]
    for pool, slot, part in zip(held, slots, parts, strict=True):
        pool.import_state(slot, part)
    return slots


def take(held: list[Pool], slots: list[Slot], start: int = START) -> list[SlotState]:
    return [pool.export_state(slot, start) for pool, slot in zip(held, slots, strict=True)]


def filled(
    name: str, size: int, like: StateFormat = FORM, start: int = START
) -> tuple[list[Pool], Whole]:
    """Pools of all ranks with one request in slot 1, beside the whole state."""
    model = model_of(name)
    whole = whole_state(model, getattr(torch, like.dtype))
    held = pools(model, size, like)
    for pool in held:
        (slot,) = pool.alloc(1)
        fill(pool, model, whole, slot, start)
    return held, whole


def test_every_model_here_is_cut_in_four_but_those_whose_heads_are_fewer() -> None:
    assert {name for name in MODELS if sizes_of(name) == SIZES} >= {
        "cca", "delta", "eight_groups", "lightning", "mamba1", "one_group", "short_conv",
        "two_groups",
    }  # fmt: skip


@settings(max_examples=60)
@given(
    name=st.sampled_from(sorted(MODELS)),
    route=st.lists(st.sampled_from(SIZES), min_size=1, max_size=4),
    layouts=st.lists(st.tuples(CONV, RULE), min_size=5, max_size=5),
    start=st.integers(0, 13),
    bfloat16=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_a_state_comes_back_from_any_route_of_sizes_and_layouts(
    name: str,
    route: list[int],
    layouts: list[tuple[str, str]],
    start: int,
    bfloat16: bool,
    seed: int,
) -> None:
    """P045: 1 to 2 to 4 and back among them, each stop equal to what its ranks should hold."""
    torch.manual_seed(seed)
    model, dtype = model_of(name), "bfloat16" if bfloat16 else "float32"
    like = form(*layouts[0], dtype)
    held, whole = filled(name, 1, like, start)
    # A recurrent state stays float32 beside a window of another dtype.
    for key, segments in whole.items():
        if key[1] not in ("conv", "hidden"):
            segments.update({n: v.float() for n, v in segments.items()})
    slots = [Slot(1)]
    for size, layout in zip([s for s in route if s in sizes_of(name)], layouts[1:], strict=False):
        merged = merge(take(held, slots, start))
        held = pools(model, size, form(*layout, dtype))
        parts = [cut(merged, pool.states, pool.shard) for pool in held]
        slots = load(held, parts)
        for pool, slot in zip(held, slots, strict=True):
            (twin,) = pools(model, size, form(*layout, dtype))[
                pool.shard.rank : pool.shard.rank + 1
            ]
            fill(twin, model, whole, slot, start)
            for got, wanted in zip(slot_bits(pool, slot), slot_bits(twin, slot), strict=True):
                assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_one_to_two_to_four_to_one_is_the_state_that_left(name: str) -> None:
    held, _ = filled(name, 1)
    before, slots = slot_bits(held[0], 1), [Slot(1)]
    for size in [s for s in (2, 4, 1) if s in sizes_of(name)]:
        merged = merge(take(held, slots))
        held = pools(model_of(name), size)
        slots = load(held, [cut(merged, pool.states, pool.shard) for pool in held])
    for got, wanted in zip(slot_bits(held[0], slots[0]), before, strict=True):
        assert torch.equal(got, wanted)


def test_conv_segments_merge_one_by_one() -> None:
    """P045: q, k and v of two ranks, every channel labelled with its number in the whole model."""
    model = model_of("delta")
    held, (layer, *_) = pools(model, 2), model.stateful_layers()
    assert isinstance(layer.dims, DeltaDims)
    q, k, v = (size for _, size in layer.dims.segments)
    channels = torch.arange(q + k + v, dtype=torch.float32)
    for pool in held:
        rank = pool.shard.rank
        (slot,) = pool.alloc(1)
        own = [part.chunk(2)[rank] for part in channels.split([q, k, v])]
        pool.tensors(layer.index)["conv"][slot] = torch.cat(own).unsqueeze(-1)
    merged = merge(take(held, [Slot(1)] * 2))
    conv = [s for s in merged.segments if (s.layer, s.state) == (layer.index, "conv")]
    assert [s.name for s in conv] == ["q", "k", "v"]
    assert torch.equal(torch.cat([s.values for s in conv])[:, 0], channels)


def test_ranks_that_share_a_group_hold_it_twice_and_merge_it_once() -> None:
    held, whole = filled("two_groups", 4)
    merged = merge(take(held, [Slot(1)] * 4))
    (layer, _), conv = next(iter(whole.items()))
    found = {s.name: s.values for s in merged.segments if (s.layer, s.state) == (layer, "conv")}
    for name in ("x", "B", "C"):
        assert torch.equal(found[name], conv[name])
    parts = [cut(merged, pool.states, pool.shard) for pool in held]
    groups = [next(s.values for s in part.segments if s.name == "B") for part in parts]
    assert torch.equal(groups[0], groups[1]) and torch.equal(groups[2], groups[3])
    assert not torch.equal(groups[1], groups[2])


@pytest.mark.parametrize("start", range(10))
def test_a_ring_is_read_by_the_position_and_its_free_row_is_not_touched(start: int) -> None:
    held, whole = filled("short_conv", 1, form("ring"), start)
    (state,) = take(held, [Slot(1)], start)
    (layer, _), conv = next(iter(whole.items()))
    assert torch.equal(state.segments[0].values, conv["x"])
    (slot,) = load(held, [state])
    ring = held[0].tensors(layer)["conv"][slot]
    free = start % ring.shape[0]
    assert ring[free].isnan().all()
    assert not ring[[row for row in range(ring.shape[0]) if row != free]].isnan().any()


def test_an_exported_state_is_a_copy_that_pickles() -> None:
    held, _ = filled("delta", 1)
    (state,) = take(held, [Slot(1)])
    before = slot_bits(held[0], 1)
    sent = pickle.dumps(state)
    for segment in state.segments:
        segment.values.fill_(float("nan"))
    for got, wanted in zip(slot_bits(held[0], 1), before, strict=True):
        assert torch.equal(got, wanted)
    (slot,) = load(held, [pickle.loads(sent)])
    for got, wanted in zip(slot_bits(held[0], slot), before, strict=True):
        assert torch.equal(got, wanted)


def test_a_state_on_another_device_keeps_all_but_its_place() -> None:
    held, _ = filled("delta", 1)
    (state,) = take(held, [Slot(1)])
    away = state.to("meta")
    assert (away.start, away.shard, away.format) == (state.start, state.shard, state.format)
    for there, here in zip(away.segments, state.segments, strict=True):
        assert (there.key, there.whole, there.layout) == (here.key, here.whole, here.layout)
        assert there.values.is_meta and there.values.shape == here.values.shape


def test_an_import_writes_its_slot_alone() -> None:
    held, _ = filled("delta", 1)
    (state,) = take(held, [Slot(1)])
    others = [slot_bits(held[0], slot) for slot in (0, 1, 2)]
    (slot,) = load(held, [state])
    assert slot == 3
    for other, before in zip((0, 1, 2), others, strict=True):
        for got, wanted in zip(slot_bits(held[0], other), before, strict=True):
            assert torch.equal(got, wanted)


def with_segment(state: SlotState, **changes: object) -> SlotState:
    """The state with its last segment changed, so that all others would have been written first."""
    *rest, last = state.segments
    return replace(state, segments=(*rest, replace(last, **changes)))


def _values(state: SlotState) -> torch.Tensor:
    return state.segments[-1].values


MISFITS: dict[str, tuple[Callable[[SlotState], SlotState], type[Exception], str]] = {
    "format": (
        lambda s: replace(s, format=FORMAT + 1),
        ValueError,
        "import_state: the state is in format 2, expected 1",
    ),
    "rank": (
        lambda s: replace(s, shard=Shard(1, 4)),
        ValueError,
        "import_state: the state is of rank 1 of 4, expected rank 0 of 1; "
        "merge the parts of all ranks, then cut the whole",
    ),
    "start": (
        lambda s: replace(s, start=-1),
        ValueError,
        "import_state: start -1, expected at least 0",
    ),
    "late": (
        lambda s: replace(s, start=2**31),
        ValueError,
        "import_state: start 2147483648, expected at most 2147483647",
    ),
    "twice": (
        lambda s: replace(s, segments=(*s.segments, s.segments[0])),
        ValueError,
        "import_state: the state holds layer 0 conv q twice, expected once",
    ),
    "missing": (
        lambda s: replace(s, segments=s.segments[1:]),
        ValueError,
        "import_state: the state holds 11 segments, the plan 12; "
        "missing layer 0 conv q, not in the plan none",
    ),
    "extra": (
        lambda s: replace(s, segments=(*s.segments, replace(s.segments[0], layer=77))),
        ValueError,
        "import_state: the state holds 13 segments, the plan 12; "
        "missing none, not in the plan layer 77 conv q",
    ),
    "layout": (
        lambda s: with_segment(s, layout="KV"),
        ValueError,
        "import_state: layer 2 recurrent v_heads is in layout 'KV', expected 'VK'",
    ),
    "shape": (
        lambda s: with_segment(s, values=_values(s)[:, :, :5]),
        ValueError,
        "import_state: layer 2 recurrent v_heads is [8, 10, 5] of 8, "
        "the pool holds [8, 10, 6] of 8",
    ),
    "part": (
        lambda s: with_segment(s, values=_values(s)[:4]),
        ValueError,
        "import_state: layer 2 recurrent v_heads is [4, 10, 6] of 8, "
        "the pool holds [8, 10, 6] of 8",
    ),
    "whole": (
        lambda s: with_segment(s, whole=16),
        ValueError,
        "import_state: layer 2 recurrent v_heads is [8, 10, 6] of 16, "
        "the pool holds [8, 10, 6] of 8",
    ),
    "dtype": (
        lambda s: with_segment(s, values=_values(s).bfloat16()),
        TypeError,
        "import_state: layer 2 recurrent v_heads is torch.bfloat16, the pool holds torch.float32",
    ),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_state_that_misfits_is_refused_with_both_sides_and_writes_nothing(misfit: str) -> None:
    """P103: the form, its version and every size are checked before the first byte."""
    change, error, text = MISFITS[misfit]
    held, _ = filled("delta", 1)
    (state,) = take(held, [Slot(1)])
    slot = held[0].alloc(1)[0]
    before = slot_bits(held[0], slot)
    with pytest.raises(error) as caught:
        held[0].import_state(slot, change(state))
    assert str(caught.value) == text
    for got, wanted in zip(slot_bits(held[0], slot), before, strict=True):
        assert torch.equal(got, wanted)


def test_slots_that_are_not_in_use_neither_leave_nor_arrive() -> None:
    held, _ = filled("delta", 1)
    (state,) = take(held, [Slot(1)])
    for call in (
        lambda: held[0].export_state(Slot(2), START),
        lambda: held[0].import_state(Slot(2), state),
        lambda: held[0].export_state(Slot(0), START),
        lambda: held[0].import_state(Slot(9), state),
    ):
        with pytest.raises(ValueError, match=r"slot \d is not in use"):
            call()
    with pytest.raises(ValueError, match="start -2, expected at least 0"):
        held[0].export_state(Slot(1), -2)
    with pytest.raises(ValueError, match="start 2147483648, expected at most 2147483647"):
        held[0].export_state(Slot(1), 2**31)
    with pytest.raises(TypeError):
        held[0].export_state(Slot(1), 2.0)


class Five:
    """An integer of another library."""

    def __index__(self) -> int:
        return 5


def test_a_start_of_any_integer_type_leaves_as_a_plain_one() -> None:
    held, _ = filled("short_conv", 1, form("ring"), 5)
    state = held[0].export_state(Slot(1), Five())
    assert type(state.start) is int
    assert state.start == 5
    (slot,) = load(held, [replace(state, start=Five())])
    assert torch.equal(held[0].export_state(slot, 5).segments[0].values, state.segments[0].values)


@pytest.mark.parametrize("conv", ["CW", "WC", "ring"])
def test_an_import_of_segments_that_need_gradients_leaves_the_pool_without(conv: str) -> None:
    held, _ = filled("delta", 1, form(conv))
    (state,) = take(held, [Slot(1)])
    before = slot_bits(held[0], 1)
    learnt = [replace(s, values=s.values.clone().requires_grad_()) for s in state.segments]
    (slot,) = load(held, [replace(state, segments=tuple(learnt))])
    for got, wanted in zip(slot_bits(held[0], slot), before, strict=True):
        assert torch.equal(got.nan_to_num(7), wanted.nan_to_num(7))
    tensors = [t for s in held[0].states for t in held[0].tensors(s.layer).values()]
    assert not any(tensor.requires_grad for tensor in tensors)


def test_a_layout_without_a_form_is_refused_by_name() -> None:
    spec = StateSpec(4, "recurrent", (2, 3, 3), "float32", "tiled", (("v_heads", 2, 0),))
    pool = Pool((spec,), 1, torch.device("cpu"))
    (slot,) = pool.alloc(1)
    with pytest.raises(ValueError, match="layer 4 recurrent is in layout 'tiled', which cannot"):
        pool.export_state(slot, 0)


def test_parts_that_are_no_whole_group_are_not_merged() -> None:
    held, _ = filled("delta", 2)
    first, second = take(held, [Slot(1)] * 2)
    for parts, text in (
        ([], "merge: got none"),
        ([first], "merge: got rank 0 of 2, expected every rank of one size once"),
        ([first, first], "merge: got rank 0 of 2, rank 0 of 2, expected"),
        ([first, replace(second, shard=Shard(1, 4))], "merge: got rank 0 of 2, rank 1 of 4"),
        ([first, replace(second, start=4)], "rank 1 of 2 is at token 4 in format 1, expected"),
        ([first, replace(second, segments=second.segments[1:])], "rank 1 of 2 holds other"),
        (
            [replace(p, segments=(*p.segments, p.segments[3])) for p in (first, second)],
            "merge: the state holds layer 0 recurrent v_heads twice, expected once",
        ),
        (
            [first, with_segment(second, values=_values(second).half())],
            r"layer 2 recurrent v_heads is \[4, 10, 6\] torch.float16 of 8 on one rank, "
            r"\[4, 10, 6\] torch.float32 of 8 on another",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            merge(parts)
    with pytest.raises(ValueError, match="2 ranks of 3 do not make up a segment of 8"):
        merge([with_segment(part, values=_values(part)[:3]) for part in (first, second)])
    merged, ordered = merge([second, first]), merge([first, second])
    for one, other in zip(merged.segments, ordered.segments, strict=True):
        assert torch.equal(one.values, other.values)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_plan_of_another_size_neither_cuts_nor_merges(name: str) -> None:
    """Any segment could be one that ranks share; a plan in which all are is none of theirs."""
    held, _ = filled(name, 1)
    (whole,) = take(held, [Slot(1)])
    for size in [s for s in (2, 4) if s in sizes_of(name)]:
        for made in (1, size // 2):
            plan = pools(model_of(name), made)[0].states
            text = f"cut: the segments are cut for {made} ranks, the states are of {size}; take"
            with pytest.raises(ValueError, match=text):
                cut(whole, plan, Shard(size - 1, size))
    pair = [replace(whole, shard=Shard(rank, 2)) for rank in range(2)]
    with pytest.raises(ValueError, match="merge: the segments are cut for 1 ranks, the states are"):
        merge(pair)


def test_only_a_whole_state_of_the_same_model_is_cut() -> None:
    held, _ = filled("delta", 2)
    parts = take(held, [Slot(1)] * 2)
    with pytest.raises(ValueError, match="cut: the state is of rank 0 of 2, expected rank 0 of 1"):
        cut(parts[0], held[0].states, Shard(0, 2))
    merged = merge(parts)
    with pytest.raises(ValueError, match="cut: the state holds 12 segments, the plan"):
        cut(merged, pools(model_of("mamba1"), 1)[0].states, Shard())
    with pytest.raises(ValueError, match="cut: the state holds layer 0 conv q twice"):
        cut(
            replace(merged, segments=(*merged.segments, merged.segments[0])),
            held[0].states,
            Shard(0, 2),
        )
    other = [replace(s, whole=tuple(2 * w for w in s.whole)) for s in held[0].states]
    with pytest.raises(ValueError, match="cut: layer 0 conv q is 24, the plan has 48"):
        cut(merged, other, Shard(0, 2))
    with pytest.raises(ValueError, match="3 ranks of 12 do not make up a segment of 24"):
        cut(merged, held[0].states, Shard(0, 3))
