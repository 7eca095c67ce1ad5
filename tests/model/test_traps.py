"""One test for each way in which a published config misleads its reader."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal.errors import ConfigError
from hal.model import (
    CcaDims,
    DeltaDims,
    GateKind,
    Kind,
    ModelSpec,
    ScanDims,
    ShortConvDims,
    read,
)
from support.model_configs import TINY, kinds_of, real, tiny, without

LINEAR, FULL = "linear_attention", "full_attention"


def full(spec: ModelSpec) -> list[int]:
    """Return the layers with full attention."""
    return kinds_of(spec.layers, Kind.FULL_ATTENTION)


def scan(spec: ModelSpec) -> ScanDims:
    """Return the one set of scan dims of a model."""
    [dims] = {layer.dims for layer in spec.stateful_layers()}
    assert isinstance(dims, ScanDims)
    return dims


def delta(spec: ModelSpec) -> DeltaDims:
    """Return the one set of delta-rule dims of a model."""
    [dims] = {layer.dims for layer in spec.stateful_layers()}
    assert isinstance(dims, DeltaDims)
    return dims


# Where the pattern comes from.


@given(layers=st.integers(1, 200), interval=st.integers(1, 12))
def test_an_interval_puts_full_attention_at_each_multiple_counted_from_one(
    layers: int, interval: int
) -> None:
    config = without(tiny("qwen3_next"), "layer_types")
    config |= {"num_hidden_layers": layers, "full_attention_interval": interval}
    assert full(read(config)) == list(range(interval - 1, layers, interval))


@given(words=st.lists(st.sampled_from([LINEAR, FULL]), min_size=1, max_size=40))
def test_a_list_of_layers_wins_over_an_interval(words: list[str]) -> None:
    changes = {"layer_types": words, "num_hidden_layers": len(words)}
    spec = read(tiny("qwen3_5_text", full_attention_interval=2, **changes))
    assert full(spec) == [i for i, word in enumerate(words) if word == FULL]


@given(words=st.lists(st.sampled_from(["mamba", "attention", LINEAR, FULL]), min_size=1))
def test_words_on_disk_and_words_on_an_object_mean_the_same(words: list[str]) -> None:
    modern = {"mamba": LINEAR, "attention": FULL}
    changes = {"layer_types": words, "num_hidden_layers": len(words)}
    renamed = [modern.get(word, word) for word in words]
    assert read(tiny("granitemoehybrid", **changes)) == read(
        tiny("granitemoehybrid", **changes | {"layer_types": renamed})
    )


@pytest.mark.parametrize(
    ("family", "word"),
    [
        ("qwen4_exp_text", "indexed_attention"),
        ("qwen4_exp_text", "full_attention"),
        ("qwen4_exp_text", "qwen_sparse_attention"),
        ("qwen4_exp_text", "attention"),
        ("glm5_next", "deepseek_sparse_attention"),
        ("glm5_next", "full_attention"),
    ],
)
def test_attention_through_an_index_has_many_names(family: str, word: str) -> None:
    spec = read(tiny(family, layer_types=[LINEAR, LINEAR, LINEAR, word]))
    assert spec == read(tiny(family))
    assert spec.count(Kind.INDEXED_ATTENTION) == 1


def test_granite_spells_its_list_in_two_ways() -> None:
    words = tiny("granitemoehybrid")["layer_types"]
    config = without(tiny("granitemoehybrid"), "layer_types")
    assert read({**config, "layers_block_type": words}) == read(tiny("granitemoehybrid"))
    assert read(config).count(Kind.MAMBA2) == 4


def test_two_lists_of_layers_may_stand_side_by_side_only_if_they_agree() -> None:
    words = [LINEAR, LINEAR, FULL, LINEAR]
    assert read(tiny("granitemoehybrid", layers_block_type=words)) == read(tiny("granitemoehybrid"))
    with pytest.raises(ConfigError, match="layer_types and layers_block_type disagree"):
        read(tiny("granitemoehybrid", layers_block_type=words[::-1]))


def test_layers_of_multi_token_prediction_are_not_counted() -> None:
    extra = {
        "num_nextn_predict_layers": 2,
        "mtp_layers_block_type": ["attention", "moe"],
        "mtp_hybrid_override_pattern": "*E",
    }
    assert read(tiny("nemotron_h", **extra)) == read(tiny("nemotron_h"))


def test_the_text_config_decides_and_not_the_wrapper_around_it() -> None:
    config = tiny("qwen3_5")
    config |= {
        "num_hidden_layers": 99,
        "layer_types": ["conv"],
        "architectures": ["MambaForCausalLM"],
    }
    assert read(config) == read(tiny("qwen3_5_text"))
    assert read(config).model_type == "qwen3_5_text"


def test_the_convolutions_of_a_vision_config_are_not_read() -> None:
    vision = {"model_type": "lfm3_vl_vision", "layer_types": ["conv"] * 9, "conv_L_cache": 3}
    config = {"model_type": "lfm3_vl", "vision_config": vision, "text_config": tiny("lfm3")}
    assert read(config) == read(tiny("lfm3"))


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config", "thinker_config"])
def test_the_text_config_is_found_under_every_name_that_engines_use(key: str) -> None:
    assert read({"model_type": "some_vlm", key: tiny("lfm2")}) == read(tiny("lfm2"))


def test_text_configs_may_be_nested() -> None:
    config = {
        "model_type": "omni",
        "thinker_config": {"model_type": "x", "text_config": tiny("lfm2")},
    }
    assert read(config) == read(tiny("lfm2"))


def test_glm_keeps_the_text_entries_at_the_top_in_text_only_exports() -> None:
    flat = {**tiny("glm5_next")["text_config"], "model_type": "glm5_next"}
    assert read(flat) == read(tiny("glm5_next"))


def test_auto_map_is_never_followed() -> None:
    config = tiny("kimi_linear", auto_map={"AutoConfig": "evil.py--Evil"}, trust_remote_code=True)
    assert read(config) == read(tiny("kimi_linear"))


def test_quantisation_changes_no_dims() -> None:
    ignored = {"quant_method": "fp8", "modules_to_not_convert": ["in_proj_ba", "in_proj_b"]}
    assert read(tiny("qwen3_next", quantization_config=ignored)) == read(tiny("qwen3_next"))


# Kimi-Linear, GLM-5-Next, Ling and Ring.


def kimi(layers: int, numbers: dict[str, Any]) -> dict[str, Any]:
    """Make a Kimi config whose pattern is given in layer numbers."""
    section = {"head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4, **numbers}
    return tiny("kimi_linear", num_hidden_layers=layers, linear_attn_config=section)


@given(full_at=st.sets(st.integers(1, 30)), layers=st.just(30))
def test_layer_numbers_of_kimi_start_at_one(full_at: set[int], layers: int) -> None:
    kda = sorted(set(range(1, layers + 1)) - full_at)
    spec = read(kimi(layers, {"kda_layers": kda, "full_attn_layers": sorted(full_at)}))
    assert full(spec) == [number - 1 for number in sorted(full_at)]
    assert kinds_of(spec.layers, Kind.KIMI_DELTA) == [number - 1 for number in kda]
    assert read(kimi(layers, {"kda_layers": kda})) == spec


def test_a_list_wins_over_layer_numbers() -> None:
    spec = read(tiny("kimi_linear", layer_types=[FULL, LINEAR, LINEAR, LINEAR]))
    assert full(spec) == [0]


@pytest.mark.parametrize(
    ("numbers", "field"),
    [
        ({}, "linear_attn_config.kda_layers"),
        ({"kda_layers": None, "full_attn_layers": [4]}, "linear_attn_config.kda_layers"),
        ({"kda_layers": [0, 1, 2]}, "linear_attn_config.kda_layers"),
        ({"kda_layers": [1, 2, 5]}, "linear_attn_config.kda_layers"),
        ({"kda_layers": [1, 2], "full_attn_layers": [4]}, "linear_attn_config.kda_layers"),
        ({"kda_layers": [1, 2, 3, 4], "full_attn_layers": [4]}, "linear_attn_config.kda_layers"),
        ({"kda_layers": [1, 2, 3], "full_attn_layers": [0]}, "linear_attn_config.full_attn_layers"),
        ({"kda_layers": "1,2,3"}, "linear_attn_config.kda_layers"),
        ({"kda_layers": [1, True, 3]}, "linear_attn_config.kda_layers"),
    ],
)
def test_layer_numbers_have_to_share_out_all_layers(numbers: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(kimi(4, numbers))
    assert refused.value.field == field


def test_the_head_dim_of_kimi_at_the_top_is_not_that_of_its_delta_layers() -> None:
    spec = read(real("kimi-linear-48b-a3b.json"))
    assert delta(spec).K == 128
    assert delta(read(tiny("kimi_linear", head_dim=8))).K == 16


def test_the_section_comes_before_the_entries_that_an_object_adds() -> None:
    config = tiny("kimi_linear", linear_head_dim=99, linear_num_heads=2, linear_conv_kernel_dim=7)
    assert read(config) == read(tiny("kimi_linear"))
    bare = {"linear_attn_config": None, "layer_types": [LINEAR] * 3 + [FULL]}
    assert delta(read({**config, **bare})) == DeltaDims(2, 2, 99, 99, 7, gate=GateKind.CHANNEL)


def test_latent_attention_keeps_one_compressed_row() -> None:
    [attention] = {layer.attention for layer in read(tiny("kimi_linear")).layers if layer.attention}
    assert attention.latent == 16 + 8
    assert attention.head_dim == 16 + 8
    assert attention.kv_bytes_per_token("bfloat16", tp=4) == 24 * 2


def test_ling_keeps_its_head_dim_under_another_name_once_it_is_an_object() -> None:
    raw, dumped = tiny("bailing_hybrid"), tiny("bailing_hybrid", linear_head_dim=16, head_dim=8)
    assert read(raw) == read(dumped)


@pytest.mark.parametrize("use_kda", [True, None])
def test_ling_has_delta_layers_unless_they_are_turned_off(use_kda: bool | None) -> None:
    assert read(tiny("bailing_hybrid", use_kda=use_kda)) == read(tiny("bailing_hybrid"))


def test_ling_without_delta_layers_has_lightning_ones() -> None:
    spec = read(tiny("bailing_hybrid", use_kda=False))
    assert spec.count(Kind.LIGHTNING) == 3
    assert scan(spec) == ScanDims(H=4, P=16, N=16, G=4, W=0, conv_bias=False)
    assert full(spec) == [3]


def test_the_gate_of_ling_is_safe_unless_that_is_turned_off() -> None:
    assert delta(read(tiny("bailing_hybrid"))).lower_bound == -5.0
    assert delta(read(tiny("bailing_hybrid", kda_lower_bound=-3))).lower_bound == -3.0
    plain = delta(read(tiny("bailing_hybrid", kda_safe_gate=False)))
    assert (plain.gate, plain.lower_bound) == (GateKind.CHANNEL, None)


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({}, -5.0),
        ({"linear_lower_bound": -2.0}, -2.0),
        ({"linear_lower_bound": None}, None),
        ({"linear_attn_config": {"gate_lower_bound": -3.0}}, -3.0),
        ({"linear_attn_config": {"safe_gate": True}, "linear_lower_bound": None}, -5.0),
        ({"linear_attn_config": {"safe_gate": False}, "linear_lower_bound": None}, None),
        ({"linear_attn_config": {"safe_gate": False}}, -5.0),
        ({"linear_attn_config": {"gate_lower_bound": None, "safe_gate": False}}, None),
    ],
)
def test_the_gate_of_glm_is_safe_where_it_has_a_bound(
    changes: dict[str, Any], bound: float | None
) -> None:
    dims = delta(read(tiny("glm5_next", **changes)))
    assert dims.lower_bound == bound
    assert dims.gate is (GateKind.CHANNEL if bound is None else GateKind.SAFE)


def test_glm_without_rope_keeps_the_latent_row_alone() -> None:
    [attention] = {layer.attention for layer in read(tiny("glm5_next")).layers if layer.attention}
    assert (attention.kind, attention.latent) == (Kind.INDEXED_ATTENTION, 16)


@given(layers=st.integers(1, 60))
def test_glm_without_a_list_indexes_each_fourth_layer(layers: int) -> None:
    spec = read(tiny("glm5_next", layer_types=None, num_hidden_layers=layers))
    assert kinds_of(spec.layers, Kind.INDEXED_ATTENTION) == list(range(3, layers, 4))


# Qwen and OLMo.


def test_the_head_dim_of_the_attention_is_not_that_of_the_linear_layers() -> None:
    spec = read(real("qwen3-next-80b-a3b.json"))
    assert delta(spec).K == 128
    assert {layer.attention.head_dim for layer in spec.layers if layer.attention} == {256}


def test_a_state_dtype_may_be_named_after_mamba_where_no_layer_is_one() -> None:
    assert read(real("qwen3.5-small-dense.json")).state_dtype == "float32"
    assert read(tiny("qwen3_next")).state_dtype is None
    assert read(tiny("nemotron_h", mamba_ssm_cache_dtype="float16")).state_dtype == "float16"


def test_value_heads_need_not_be_a_power_of_two_times_the_key_heads() -> None:
    dims = delta(read(real("qwen3.8-27b.json")))
    assert (dims.H, dims.HV) == (16, 48)


def test_without_linear_layers_no_linear_entry_is_needed() -> None:
    names = [name for name in tiny("qwen3_next") if name.startswith("linear_")]
    config = without(tiny("qwen3_next", layer_types=[FULL] * 4, linear_num_key_heads="x"), *names)
    spec = read({**config, "linear_num_value_heads": 0})
    assert list(spec.stateful_layers()) == []
    assert spec.count(Kind.FULL_ATTENTION) == 4


def test_qwen_with_embeddings_per_layer_is_refused() -> None:
    assert read(tiny("qwen4_exp_text", ple_layer_ids=[])) == read(tiny("qwen4_exp_text"))
    with pytest.raises(ConfigError, match="ple_layer_ids must be empty") as refused:
        read(tiny("qwen4_exp_text", ple_layer_ids=[2]))
    assert refused.value.field == "ple_layer_ids"


def test_null_dims_of_olmo_follow_from_the_attention() -> None:
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim")
    names = (*names, "linear_value_head_dim")
    config = tiny("olmo_hybrid", hidden_size=3840, num_attention_heads=30)
    nulls = {**config, **dict.fromkeys(names)}
    dims = delta(read({**nulls, "num_key_value_heads": 30}))
    assert dims == DeltaDims(30, 30, 96, 192, 4, beta_scale=2.0)
    absent = without({**config, "num_key_value_heads": 30}, *names)
    assert delta(read(absent)) == dims


@given(layers=st.integers(1, 60))
def test_olmo_without_a_list_ends_in_full_attention_if_it_is_short(layers: int) -> None:
    spec = read(tiny("olmo_hybrid", num_hidden_layers=layers))
    assert full(spec) == (list(range(3, layers, 4)) or [layers - 1])


def test_a_given_key_dim_of_olmo_is_not_derived() -> None:
    assert delta(read(tiny("olmo_hybrid", linear_key_head_dim=10))).K == 10


def test_beta_of_olmo_may_reach_two() -> None:
    assert delta(read(tiny("olmo_hybrid"))).beta_scale == 2.0
    assert delta(read(tiny("olmo_hybrid", linear_allow_neg_eigval=False))).beta_scale == 1.0
    assert delta(read(tiny("qwen3_next"))).beta_scale == 1.0


# Mamba-2 families.


@given(full_at=st.sets(st.integers(0, 19)))
def test_bamba_lists_its_attention_layers_alone(full_at: set[int]) -> None:
    spec = read(tiny("bamba", num_hidden_layers=20, attn_layer_indices=sorted(full_at)))
    assert full(spec) == sorted(full_at)
    assert spec.count(Kind.MAMBA2) == 20 - len(full_at)


def test_bamba_without_a_list_has_no_attention() -> None:
    assert read(tiny("bamba", attn_layer_indices=None)).count(Kind.MAMBA2) == 4


@pytest.mark.parametrize("dim", ["auto", 16, None])
def test_a_head_dim_may_be_left_to_the_inner_width(dim: str | int | None) -> None:
    for family in ("bamba", "granitemoehybrid", "falcon_h1"):
        assert read(tiny(family, mamba_d_head=dim)) == read(tiny(family))


def test_nemotron_spells_its_layers_as_letters() -> None:
    spec = read(real("nemotron-nano-9b-v2.json"))
    pattern = real("nemotron-nano-9b-v2.json")["hybrid_override_pattern"]
    kinds = {"M": Kind.MAMBA2, "*": Kind.FULL_ATTENTION, "-": Kind.MLP, "E": Kind.MOE}
    assert [layer.kinds for layer in spec.layers] == [(kinds[letter],) for letter in pattern]


@given(pattern=st.text("M*-E", min_size=1, max_size=60))
def test_either_spelling_of_nemotron_gives_the_same_layers(pattern: str) -> None:
    words = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    config = without(tiny("nemotron_h"), "hybrid_override_pattern")
    specs = [
        read({**config, "hybrid_override_pattern": pattern}),
        read({**config, "hybrid_layer_pattern": pattern}),
        read({**config, "hybrid_override_pattern": pattern, "hybrid_layer_pattern": pattern}),
        read({**config, "layers_block_type": [words[letter] for letter in pattern]}),
        read({**config, "hybrid_override_pattern": pattern, "num_hidden_layers": None}),
        read({**config, "hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}),
    ]
    assert len(set(specs)) == 1


def test_two_patterns_of_nemotron_that_differ_are_refused() -> None:
    both = r"hybrid_override_pattern and hybrid_layer_pattern disagree"
    with pytest.raises(ConfigError, match=both):
        read(tiny("nemotron_h", hybrid_layer_pattern="M-ME"))


def test_nemotron_has_no_pattern_of_its_own() -> None:
    config = without(tiny("nemotron_h"), "hybrid_override_pattern")
    with pytest.raises(ConfigError, match="layers_block_type must be given"):
        read({**config, "num_hidden_layers": 52})


@pytest.mark.parametrize("pattern", ["M-X*", "", "M" * 10_001, 7, ["M", "-"], "m-m*"])
def test_a_pattern_is_a_string_of_known_letters(pattern: object) -> None:
    with pytest.raises(ConfigError) as refused:
        read(tiny("nemotron_h", hybrid_override_pattern=pattern))
    assert refused.value.field == "hybrid_override_pattern"


def test_the_inner_width_of_nemotron_is_heads_times_head_dim() -> None:
    dims = scan(read(real("nemotron-nano-9b-v2.json")))
    assert (dims.I, dims.P) == (10240, 80)
    assert dims.I != 2 * 4480


@pytest.mark.parametrize(
    ("spelling", "usual"),
    [
        ("mamba_n_groups", "n_groups"),
        ("mamba_num_groups", "n_groups"),
        ("mamba_d_conv", "conv_kernel"),
        ("mamba_state_dim", "ssm_state_size"),
    ],
)
def test_nemotron_accepts_the_spellings_of_other_families(spelling: str, usual: str) -> None:
    config = tiny("nemotron_h", **{usual: 3})
    assert read(without({**config, spelling: 3}, usual)) == read(config)


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        *((name, "mamba_conv_bias") for name in ("bamba", "falcon_h1", "granitemoehybrid")),
        *((name, "mamba_conv_bias") for name in ("jamba", "nemotron_h", "zamba")),
        *((name, "use_conv_bias") for name in ("mamba", "falcon_mamba", "mamba2")),
        *((name, "use_conv_bias") for name in ("nemotron_h", "zamba2")),
    ],
)
def test_the_convolution_of_a_scan_has_a_bias_unless_that_is_turned_off(
    name: str, entry: str
) -> None:
    assert scan(read(without(tiny(name), entry))).conv_bias is True
    assert scan(read(tiny(name, **{entry: False}))).conv_bias is False


@pytest.mark.parametrize("name", ["nemotron_h", "zamba2"])
def test_the_time_step_is_limited_from_below_as_the_class_does_it(name: str) -> None:
    assert scan(read(tiny(name, time_step_limit=[0.0, 0.1]))).dt_limit == (0.001, float("inf"))
    assert scan(read(tiny(name, time_step_min=0.5))).dt_limit == (0.5, float("inf"))
    assert scan(read(tiny(name, time_step_min=0))).dt_limit == (0.0, float("inf"))


@pytest.mark.parametrize("name", ["bamba", "granitemoehybrid", "falcon_h1", "mamba2"])
def test_the_time_step_limit_is_read_where_the_class_reads_it(name: str) -> None:
    assert scan(read(tiny(name))).dt_limit == (0.0, float("inf"))
    assert scan(read(tiny(name, time_step_limit=None))).dt_limit == (0.0, float("inf"))
    assert scan(read(tiny(name, time_step_limit=[0.5, 2]))).dt_limit == (0.5, 2.0)
    saved = [0.5, {"__float__": "Infinity"}]
    assert scan(read(tiny(name, time_step_limit=saved))).dt_limit == (0.5, float("inf"))


def test_falcon_runs_attention_and_scan_in_parallel_in_every_layer() -> None:
    spec = read(tiny("falcon_h1", num_hidden_layers=5))
    assert {layer.kinds for layer in spec.layers} == {(Kind.MAMBA2, Kind.FULL_ATTENTION)}
    assert {layer.stateful for layer in spec.layers} == {Kind.MAMBA2}


def test_the_inner_width_of_falcon_depends_on_absent_or_null() -> None:
    config = without(tiny("falcon_h1", mamba_d_head="auto"), "mamba_d_ssm")
    assert scan(read(config)).I == 1024
    assert scan(read({**config, "mamba_d_ssm": None})).I == 2 * 64
    assert scan(read({**config, "mamba_d_ssm": 48})).I == 48


def test_the_gate_of_falcon_is_inside_the_scan_unless_it_has_a_norm() -> None:
    assert scan(read(tiny("falcon_h1"))).norm_groups is None
    assert scan(read(tiny("falcon_h1", mamba_rms_norm=True))).norm_groups == 2


@pytest.mark.parametrize("name", ["bamba", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"])
def test_the_gated_norm_of_mamba2_runs_in_the_groups_of_the_scan(name: str) -> None:
    assert scan(read(tiny(name))).norm_groups == 2


def test_zamba2_without_a_list_is_the_model_of_54_layers() -> None:
    config = without(tiny("zamba2"), "layers_block_type", "num_hidden_layers")
    hybrid = [6, 12, 18, 24, 30, 36, 42, 47, 51]
    assert full(read(config)) == full(read({**config, "num_hidden_layers": 54})) == hybrid
    assert len(read(config).layers) == 54
    with pytest.raises(ConfigError, match="layers_block_type must be given"):
        read({**config, "num_hidden_layers": 53})


@pytest.mark.parametrize("name", ["zamba", "zamba2"])
def test_shared_attention_works_on_twice_the_hidden_size(name: str) -> None:
    spec = read(tiny(name))
    assert {layer.attention.head_dim for layer in spec.layers if layer.attention} == {2 * 64 // 4}
    assert len(list(spec.stateful_layers())) == 4
    narrow = read(tiny(name, attention_head_dim=8))
    assert {layer.attention.head_dim for layer in narrow.layers if layer.attention} == {8}


# Mamba-1 families.


@given(layers=st.integers(1, 60), period=st.integers(1, 9), offset=st.integers(0, 8))
def test_jamba_attends_once_in_a_period(layers: int, period: int, offset: int) -> None:
    changes = {"attn_layer_period": period, "attn_layer_offset": offset % period}
    spec = read(tiny("jamba", num_hidden_layers=layers, **changes))
    assert full(spec) == [i for i in range(layers) if i % period == offset % period]
    assert all(layer.dims is None for layer in spec.layers if layer.attention)


def test_a_scan_of_mamba1_has_one_head_unless_the_family_says_otherwise() -> None:
    assert scan(read(tiny("mamba"))) == ScanDims(H=1, P=128, N=8, G=1, W=4, dt_rank=4)
    assert (
        scan(read(tiny("jamba"))) == scan(read(tiny("falcon_mamba"))) == scan(read(tiny("mamba")))
    )
    assert scan(read(tiny("zamba"))) == ScanDims(H=2, P=64, N=8, G=2, W=4, dt_rank=4)


@pytest.mark.parametrize(
    ("name", "entry"), [("mamba", "time_step_rank"), ("jamba", "mamba_dt_rank")]
)
def test_the_rank_of_the_time_step_is_a_sixteenth_of_the_hidden_size(name: str, entry: str) -> None:
    for given_rank, rank in (("auto", 5), (None, 5), (3, 3)):
        assert scan(read(tiny(name, hidden_size=68, **{entry: given_rank}))).dt_rank == rank


@given(layers=st.integers(14, 60))
def test_zamba_starts_its_period_after_three_layers(layers: int) -> None:
    spec = read(tiny("zamba", layers_block_type=None, num_hidden_layers=layers))
    assert full(spec) == [2, *(i for i in range(3, layers) if (i - 3) % 6 == 4)]


@pytest.mark.parametrize("layers", [1, 2, 3, 7])
def test_zamba_needs_two_hybrid_layers(layers: int) -> None:
    with pytest.raises(ConfigError):
        read(tiny("zamba", layers_block_type=None, num_hidden_layers=layers))
    with pytest.raises(ConfigError, match="layers_block_type must be enough for two hybrid"):
        read(tiny("zamba", layers_block_type=["mamba", "mamba", "mamba", "hybrid"]))


# Short convolutions.


def test_older_configs_of_lfm2_index_their_attention_layers() -> None:
    spec = read(real("lfm2-350m.json"))
    assert full(spec) == [2, 5, 8, 10, 12, 14]
    assert spec.count(Kind.SHORT_CONV) == 10


def test_lfm2_without_a_pattern_is_attention_throughout() -> None:
    spec = read(tiny("lfm2", layer_types=None))
    assert full(spec) == [0, 1, 2, 3]
    assert list(spec.stateful_layers()) == []


def test_lfm2_with_an_empty_index_is_convolution_throughout() -> None:
    assert read(tiny("lfm2", layer_types=None, full_attn_idxs=[])).count(Kind.SHORT_CONV) == 4


def test_a_list_wins_over_an_index() -> None:
    assert read(tiny("lfm2", full_attn_idxs=[0])) == read(tiny("lfm2"))


def test_lfm2_moe_has_no_pattern_of_its_own() -> None:
    with pytest.raises(ConfigError, match="layer_types must be a list") as refused:
        read(without(tiny("lfm2_moe", full_attn_idxs=[2]), "layer_types"))
    assert refused.value.field == "layer_types"


def test_conv_l_cache_is_the_width_and_not_the_carry() -> None:
    [dims] = {layer.dims for layer in read(tiny("lfm2")).stateful_layers()}
    assert dims == ShortConvDims(hidden=64, W=3)
    [dims] = {layer.dims for layer in read(tiny("lfm3", conv_bias=True)).stateful_layers()}
    assert dims == ShortConvDims(hidden=64, W=7, bias=True)


@given(layers=st.integers(1, 60))
def test_lfm3_without_a_list_alternates_three_kinds(layers: int) -> None:
    spec = read(tiny("lfm3", layer_types=None, num_hidden_layers=layers))
    assert full(spec) == list(range(2, layers, 4))
    assert kinds_of(spec.layers, Kind.SLIDING_ATTENTION) == list(range(4, layers, 4))
    assert spec.layers[0].kinds == (Kind.SHORT_CONV,)


# ZAYA, MiniMax and the families that are only named.


def test_only_attention_stages_of_an_original_zaya_carry_state() -> None:
    stages = ["a", 16, "a", 16, 4]
    spec = read(tiny("zaya", zaya_layers=stages, num_hidden_layers=5))
    assert [layer.stateful for layer in spec.layers] == [Kind.CCA, None, Kind.CCA, None, None]
    assert kinds_of(spec.layers, Kind.MOE) == [1, 3, 4]
    assert read(tiny("zaya", zaya_layers=stages, num_hidden_layers=None)) == spec


def test_a_list_that_the_class_filled_in_does_not_hide_the_stages() -> None:
    stages = {"zaya_layers": ["a", 16, "a", 16], "num_hidden_layers": 4}
    assert read(tiny("zaya", layer_types=["hybrid"] * 4, **stages)) == read(tiny("zaya", **stages))


def test_a_converted_zaya_may_keep_its_stages() -> None:
    words = ["hybrid", "hybrid_sliding", "hybrid"]
    config = tiny("zaya", layer_types=words, sliding_window=8)
    assert read({**config, "zaya_layers": ["a", 16] * 3}) == read(config)
    with pytest.raises(ConfigError, match="layer_types and zaya_layers disagree"):
        read({**config, "zaya_layers": ["a", 16] * 2})


@pytest.mark.parametrize("stages", [["a", 0], ["a", True], ["a", "b"], [], "aa", [None, "a"]])
def test_a_stage_is_an_attention_or_a_number_of_experts(stages: object) -> None:
    with pytest.raises(ConfigError) as refused:
        read(tiny("zaya", zaya_layers=stages, num_hidden_layers=None))
    assert refused.value.field == "zaya_layers"


def test_original_exports_of_zaya_spell_key_value_heads_as_groups() -> None:
    config = without(tiny("zaya"), "num_key_value_heads")
    assert read({**config, "num_query_groups": 2}) == read(tiny("zaya"))


def test_zaya_without_its_convolution_is_refused() -> None:
    assert read(tiny("zaya", cca=True)) == read(tiny("zaya"))
    with pytest.raises(ConfigError, match="cca must be true or absent, found False"):
        read(tiny("zaya", cca=False))


def test_a_sliding_layer_needs_a_window() -> None:
    config = tiny("zaya", layer_types=["hybrid", "hybrid_sliding", "hybrid"])
    with pytest.raises(ConfigError, match="sliding_window"):
        read(config)
    spec = read({**config, "sliding_window": 8})
    assert [layer.attention and layer.attention.window for layer in spec.layers] == [None, 8, None]


def test_both_convolutions_of_zaya_add_to_the_carry() -> None:
    [dims] = {layer.dims for layer in read(tiny("zaya", cca_time0=4, cca_time1=3)).layers}
    assert isinstance(dims, CcaDims)
    assert dims.carry == 3 + 2


@given(types=st.lists(st.integers(0, 1), min_size=1, max_size=40))
def test_original_exports_of_minimax_number_the_kinds(types: list[int]) -> None:
    changes = {"layer_types": None, "num_hidden_layers": len(types), "attn_type_list": types}
    spec = read(tiny("minimax", **changes))
    assert full(spec) == [i for i, softmax in enumerate(types) if softmax]
    filled = [LINEAR if i % 2 else FULL for i in range(len(types))]
    assert read(tiny("minimax", **changes | {"layer_types": filled})) == spec


def test_a_list_and_types_of_minimax_that_differ_are_refused() -> None:
    assert read(tiny("minimax", attn_type_list=[0, 0, 0, 1])) == read(tiny("minimax"))
    with pytest.raises(ConfigError, match="layer_types and attn_type_list disagree"):
        read(tiny("minimax", attn_type_list=[0, 0, 1, 1]))


@given(layers=st.integers(1, 60))
def test_minimax_without_a_list_starts_with_full_attention(layers: int) -> None:
    spec = read(tiny("minimax", layer_types=None, num_hidden_layers=layers))
    assert full(spec) == list(range(0, layers, 2))


def test_lightning_has_a_group_for_each_head_and_no_convolution() -> None:
    dims = ScanDims(H=4, P=16, N=16, G=4, W=0, conv_bias=False)
    assert scan(read(tiny("minimax"))) == dims
    assert scan(read(tiny("minimax", head_dim=None))) == dims


def test_minimax_m2_reads_as_a_model_without_state() -> None:
    config = {"model_type": "minimax_m2", "hidden_size": 3072, "num_hidden_layers": 62}
    spec = read({**config, "attn_type_list": [1] * 62})
    assert list(spec.stateful_layers()) == []
    assert read(config) == spec
    with pytest.raises(ConfigError, match="'linear_attention'"):
        read({**config, "attn_type_list": [1] * 61 + [0]})


@given(layers=st.integers(1, 60))
def test_recurrent_gemma_repeats_its_blocks(layers: int) -> None:
    spec = read(tiny("recurrent_gemma", num_hidden_layers=layers))
    assert kinds_of(spec.layers, Kind.SLIDING_ATTENTION) == list(range(2, layers, 3))
    assert spec.count(Kind.RG_LRU) == layers - layers // 3
    assert all(layer.dims is None for layer in spec.layers)


@given(layers=st.integers(1, 60))
def test_inkling_slides_in_five_of_six_layers(layers: int) -> None:
    for name in ("inkling_text", "inkling2_text"):
        spec = read(tiny(name, layer_types=None, num_hidden_layers=layers))
        assert full(spec) == list(range(5, layers, 6))
        assert spec.count(Kind.MULTI_SHORT_CONV) == layers


def test_sliding_layers_of_inkling_have_heads_of_their_own() -> None:
    changes = {"swa_num_attention_heads": 6, "swa_num_key_value_heads": 3, "swa_head_dim": 8}
    spec = read(tiny("inkling_text", **changes))
    sliding, whole = spec.layers[0].attention, spec.layers[1].attention
    assert sliding and (sliding.heads, sliding.kv_heads, sliding.head_dim) == (6, 3, 8)
    assert whole and (whole.heads, whole.kv_heads, whole.head_dim) == (4, 2, 16)


def test_local_layers_of_inkling_may_be_indexed() -> None:
    spec = read(tiny("inkling_text", layer_types=None, local_layer_ids=[1]))
    assert kinds_of(spec.layers, Kind.SLIDING_ATTENTION) == [1]


@pytest.mark.parametrize("name", TINY)
def test_the_model_type_is_that_of_the_text_config(name: str) -> None:
    config = tiny(name)
    assert read(config).model_type == config.get("text_config", config)["model_type"]
    assert read(config).vocab_size == 160
    assert read(config).hidden_size == 64
    assert read(config).dtype == "float32"
