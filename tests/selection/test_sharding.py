"""Tensor parallelism cuts by the families' rules or refuses with both numbers."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hal
from hal.model import (
    CcaDims,
    DeltaDims,
    Dims,
    Kind,
    LayerSpec,
    ModelSpec,
    ScanDims,
    ShortConvDims,
    read,
)
from hal.sharding import shard, shard_reasons
from hal.states import StateFormat, plan_states
from hal_registry import Code
from support.model_configs import CONFIGS, TINY, real, tiny

REAL = sorted(p.name for p in (CONFIGS / "real").glob("*.json") if "expected" not in p.name)
LAYOUTS = {"conv": "CW", "recurrent": "VK", "scan": "PN"}
FORM = StateFormat(LAYOUTS, "bfloat16", "float32")


def models() -> Iterator[ModelSpec]:
    yield from (read(tiny(name)) for name in TINY)
    yield from (read(real(name)) for name in REAL if "rwkv" not in name)


MODELS = {f"{index}-{model.model_type}": model for index, model in enumerate(models())}


def cuts(kind: Kind | None, dims: Dims | None, tp: int) -> bool:
    """The rule of each kind, as engines have it."""
    match dims:
        case DeltaDims():
            return dims.H % tp == 0 and dims.HV % tp == 0
        case CcaDims():
            return dims.HQ % tp == 0 and dims.HKV % tp == 0
        case ScanDims() if kind is Kind.MAMBA1:
            heads = dims.H % tp == 0 or tp % dims.H == 0
            return dims.I % tp == 0 and heads
        case ScanDims() if kind is Kind.MAMBA2:
            return dims.H % tp == 0 and (dims.G % tp == 0 or tp % dims.G == 0)
        case ScanDims():
            return dims.H % tp == 0
        case _:
            return not isinstance(dims, ShortConvDims) or dims.hidden % tp == 0


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_size_is_accepted_exactly_when_every_layer_cuts(name: str) -> None:
    """P059, P061: one validator, over every parallel size up to 32."""
    model = MODELS[name]
    for tp in range(1, 33):
        fits = all(cuts(layer.stateful, layer.dims, tp) for layer in model.stateful_layers())
        reasons = shard_reasons(model, tp)
        assert (not reasons) == fits
        for reason in reasons:
            assert reason.code is Code.SHARD_UNSUPPORTED
            assert str(tp) in reason.needed
            assert reason.offered.split()[0].isdigit()
            suggested = [int(n) for n in reason.fix.removeprefix("use a size of ").split(", ")]
            assert suggested
            assert not any(shard_reasons(model, size) for size in suggested)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_local_bytes_are_the_whole_divided_by_the_size(name: str) -> None:
    """P060: except what is declared replicated, by its segments without a sharded axis."""
    model = MODELS[name]
    whole = plan_states(model, 1, FORM)
    for tp in (2, 4, 8):
        groups = [
            layer.dims.G if isinstance(layer.dims, ScanDims) else tp
            for layer in model.stateful_layers()
        ]
        if shard_reasons(model, tp) or any(1 < group < tp for group in groups):
            continue
        for full, part in zip(whole, plan_states(model, tp, FORM), strict=True):
            for (title, size, axis), (same, local, cut) in zip(
                full.segments, part.segments, strict=True
            ):
                assert title == same
                assert axis == cut
                assert local == (size if axis is None else size // tp)
            replicated = sum(size for _, size, axis in full.segments if axis is None)
            total = sum(size for _, size, _ in full.segments)
            assert part.bytes * tp * total == full.bytes * (total + replicated * (tp - 1))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_segments_fill_the_axis_that_they_cut(name: str) -> None:
    for layouts in (
        LAYOUTS,
        {"conv": "WC", "recurrent": "KV", "scan": "PN"},
        {**LAYOUTS, "conv": "ring"},
    ):
        for state in plan_states(MODELS[name], 1, replace(FORM, layouts=layouts)):
            axes = {axis for _, _, axis in state.segments if axis is not None}
            assert len(axes) <= 1
            for axis in axes:
                assert sum(size for _, size, _ in state.segments) == state.shape[axis]


@pytest.mark.parametrize(
    ("groups", "heads", "tp", "fits"),
    [
        (3, 15, 5, False),
        (1, 16, 2, True),
        (8, 128, 16, True),
        (8, 128, 4, True),
        (6, 12, 4, False),
        (2, 12, 8, False),
    ],
)
def test_groups_may_span_ranks_only_as_a_multiple(
    groups: int, heads: int, tp: int, fits: bool
) -> None:
    """P059: the cases of the field, with 3 groups of 15 heads on 5 ranks among them."""
    layer = next(read(tiny("mamba2")).stateful_layers())
    dims = ScanDims(H=heads, P=8, N=16, G=groups, W=4)
    model = replace(read(tiny("mamba2")), layers=(replace(layer, dims=dims),))
    assert (not shard_reasons(model, tp)) == fits


@given(heads=st.integers(1, 8), width=st.integers(1, 32), tp=st.integers(1, 64))
def test_mamba1_channels_are_kept_when_heads_are_fewer_than_ranks(
    heads: int, width: int, tp: int
) -> None:
    dims = ScanDims(H=heads, P=width, N=16, G=1, W=4)
    layer = LayerSpec(0, (Kind.MAMBA1,), dims)
    model = ModelSpec("made", (layer,), "float32", 10, 10)
    assert (not shard_reasons(model, tp)) == cuts(Kind.MAMBA1, dims, tp)
    if cuts(Kind.MAMBA1, dims, tp):
        local = shard(dims, tp)
        assert isinstance(local, ScanDims)
        assert local.I * tp == dims.I


def test_a_refusal_for_its_size_shows_all_counts() -> None:
    refusal = hal.explain("cpu", real("qwen3-next-80b-a3b.json"), tp=hal.Shard(0, 5)).refusal
    assert refusal is not None
    assert [reason.offered for reason in refusal.all_reasons()] == [
        "16 key heads",
        "32 value heads",
    ]
    assert refusal.fix() == "use a size of 1, 2, 4, 8, 16"


def test_the_planned_bytes_of_known_models() -> None:
    """The bytes a slot that the families' tables give for TP 1."""
    for name, expected in (
        ("qwen3-next-80b-a3b.json", 77_266_944),
        ("kimi-linear-48b-a3b.json", 43_417_600),
        ("nemotron-nano-9b-v2.json", 143_548_416),
        ("falcon-h1-1.5b.json", 76_013_568),
        ("lfm2-350m.json", 40_960),
    ):
        assert sum(state.bytes for state in plan_states(read(real(name)), 1, FORM)) == expected


def test_a_previous_hidden_state_is_on_every_rank() -> None:
    model = read(tiny("zaya"))
    for tp in (1, 2):
        hidden = [s for s in plan_states(model, tp, FORM) if s.name == "hidden"]
        assert {s.shape for s in hidden} == {(model.hidden_size,)}
        assert {s.segments for s in hidden} == {(("hidden", model.hidden_size, None),)}


@pytest.mark.parametrize(("layout", "shape"), [("CW", (96, 3)), ("WC", (3, 96)), ("ring", (4, 96))])
def test_a_ring_holds_width_rows_and_the_others_width_less_one(
    layout: str, shape: tuple[int, int]
) -> None:
    layer = replace(
        next(read(tiny("qwen3_next")).stateful_layers()), dims=DeltaDims(1, 2, 16, 32, 4)
    )
    model = replace(read(tiny("qwen3_next")), layers=(layer,))
    conv, recurrent = plan_states(model, 1, replace(FORM, layouts={**LAYOUTS, "conv": layout}))
    assert conv.shape == shape
    assert conv.dtype == "bfloat16"
    assert recurrent.shape == (2, 32, 16)
    assert recurrent.dtype == "float32"
    assert recurrent.to_dict()["bytes"] == 2 * 32 * 16 * 4
