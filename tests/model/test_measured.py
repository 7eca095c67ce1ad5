"""Every config reads as what was measured of it or reported about it."""

from collections import Counter
from typing import Any

import pytest

from hal.model import (
    ATTENTION_KINDS,
    STATEFUL_KINDS,
    CcaDims,
    Kind,
    LayerSpec,
    UnknownFamily,
    read,
)
from support.model_configs import (
    CONFIGS,
    EXPECTED,
    MEASURED,
    TINY,
    conv_state,
    kinds_of,
    real,
    recurrent_state,
    tiny,
)

READABLE = sorted(name for name, facts in EXPECTED.items() if "refuse" not in facts)
UNSERVED = {Kind.RG_LRU, Kind.MULTI_SHORT_CONV}
ATTENDING = {  # the cache class that transformers keeps -> the attention in such a layer
    "LinearAttentionLayer": None,
    "DummyLayer": None,
    "DynamicLayer": Kind.FULL_ATTENTION,
    "DynamicSlidingWindowLayer": Kind.SLIDING_ATTENTION,
    "DynamicIndexedLayer": Kind.INDEXED_ATTENTION,
    "LinearAttentionAndFullAttentionLayer": Kind.FULL_ATTENTION,
    "LinearAttentionAndSlidingWindowAttentionLayer": Kind.SLIDING_ATTENTION,
}


def measured_layers(name: str) -> list[tuple[LayerSpec, dict[str, Any]]]:
    """Pair the layers of a tiny config with what transformers kept for each."""
    return list(zip(read(tiny(name)).layers, MEASURED[name]["layers"], strict=True))


def test_every_tiny_config_was_measured_and_every_real_one_is_expected() -> None:
    assert {name for name in MEASURED if not name.startswith("_")} == set(TINY)
    files = {path.name for path in (CONFIGS / "real").glob("*.json")} - {"expected.json"}
    assert files == set(EXPECTED)


@pytest.mark.parametrize("name", TINY)
def test_a_layer_is_stateful_where_transformers_keeps_a_state(name: str) -> None:
    for layer, kept in measured_layers(name):
        assert (layer.stateful is not None) == ("conv" in kept or "rec" in kept)


@pytest.mark.parametrize("name", TINY)
def test_conv_channels_and_carry_are_those_that_transformers_keeps(name: str) -> None:
    for layer, kept in measured_layers(name):
        if layer.dims is None:
            continue
        [(channels, columns)] = kept.get("conv", [(0, 0)])
        # The cache keeps the whole width, one more than the carry; that of CCA is the true carry.
        carry = columns if isinstance(layer.dims, CcaDims) else columns - 1
        assert (conv_state(layer.dims) or (0, -1)) == (channels, carry)


@pytest.mark.parametrize("name", TINY)
def test_recurrent_shapes_are_those_that_transformers_keeps(name: str) -> None:
    for layer, kept in measured_layers(name):
        if layer.dims is None:
            continue
        kept_shapes = [tuple(shape) for shape in kept.get("rec", [])]
        shape = recurrent_state(layer.dims)
        if isinstance(layer.dims, CcaDims):  # transformers keeps the delayed values instead
            shape = (layer.dims.HKV * layer.dims.D // 2,)
        assert kept_shapes == ([shape] if shape else [])


@pytest.mark.parametrize("name", TINY)
def test_only_kinds_that_nobody_serves_have_no_dims(name: str) -> None:
    for layer in read(tiny(name)).layers:
        assert (layer.dims is None) == (layer.stateful is None or layer.stateful in UNSERVED)


@pytest.mark.parametrize("name", TINY)
def test_attention_is_of_the_kind_and_shape_that_transformers_caches(name: str) -> None:
    for layer, kept in measured_layers(name):
        if name == "minimax" and "kv" not in kept:  # its own cache has one class for both kinds
            continue
        attention = layer.attention
        assert (attention and attention.kind) == ATTENDING[kept["layer"]]
        if attention and attention.latent is None:
            assert [attention.kv_heads, attention.head_dim] == kept["kv"]
        elif attention:
            rope = tiny(name).get("qk_rope_head_dim", 0)
            assert [1, attention.latent - rope] == kept["kv"]


@pytest.mark.parametrize("name", TINY)
def test_a_layer_has_an_attention_exactly_where_it_holds_an_attention_kind(name: str) -> None:
    for layer in read(tiny(name)).layers:
        held = [kind for kind in layer.kinds if kind in ATTENTION_KINDS]
        assert held == ([layer.attention.kind] if layer.attention else [])
        assert len([kind for kind in layer.kinds if kind in STATEFUL_KINDS]) <= 1


@pytest.mark.parametrize("name", TINY)
def test_only_a_sliding_layer_has_a_window(name: str) -> None:
    for layer in read(tiny(name)).layers:
        if layer.attention:
            sliding = layer.attention.kind is Kind.SLIDING_ATTENTION
            assert (layer.attention.window is not None) == sliding


@pytest.mark.parametrize("name", READABLE)
def test_a_public_model_has_the_reported_layers(name: str) -> None:
    spec, facts = read(real(name)), EXPECTED[name]
    counts = Counter(kind.value for layer in spec.layers for kind in layer.kinds)
    assert counts == facts["kinds"]
    assert len(spec.layers) == facts["layers"]
    assert [layer.index for layer in spec.layers] == list(range(facts["layers"]))
    full = kinds_of(spec.layers, Kind.FULL_ATTENTION)
    assert full == facts.get("full_attention_layers", full)


@pytest.mark.parametrize("name", READABLE)
def test_a_public_model_has_the_reported_states(name: str) -> None:
    spec, facts = read(real(name)), EXPECTED[name]
    [dims] = {layer.dims for layer in spec.stateful_layers()}
    assert dims is not None
    assert conv_state(dims) == tuple(facts["conv_state"])
    assert conv_state(dims) == (facts["conv_dim"], facts["conv_state"][1])
    recurrent = facts.get("recurrent_state")
    assert recurrent_state(dims) == (tuple(recurrent) if recurrent else None)
    assert spec.state_dtype == facts.get("state_dtype", spec.state_dtype)


@pytest.mark.parametrize("name", [name for name in READABLE if "same_as" in EXPECTED[name]])
def test_a_wrapper_a_bare_export_and_a_quantised_one_read_alike(name: str) -> None:
    assert read(real(name)) == read(real(EXPECTED[name]["same_as"]))


def test_both_exports_of_zaya_hold_the_same_states() -> None:
    original, converted = (
        [(layer.dims, layer.attention) for layer in read(real(name)).stateful_layers()]
        for name in ("zaya1-8b-original.json", "zaya1-8b-converted.json")
    )
    assert original == converted


def test_a_family_that_nobody_knows_is_refused_by_its_model_type() -> None:
    with pytest.raises(UnknownFamily, match="'rwkv6'") as refused:
        read(real("rwkv-6-1b6.json"))
    assert refused.value.model_type == "rwkv6"
    assert refused.value.field == "model_type"


def test_a_pure_ssm_is_never_given_an_attention_layer() -> None:
    spec = read(real("mamba-130m-hf.json"))
    assert all(layer.kinds == (Kind.MAMBA1,) for layer in spec.layers)
    assert all(layer.attention is None for layer in spec.layers)
