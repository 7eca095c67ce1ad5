"""A config object, its dict, its JSON and its folder give equal specs."""

import json
from pathlib import Path
from typing import Any

import pytest

from hal.model import Kind, ModelSpec, read
from hal.model.families import FAMILIES
from hal.model.source import WRAPPERS
from support.model_configs import EXPECTED, TINY, real, tiny, without

transformers = pytest.importorskip("transformers")

FOUR_LAYERS: dict[str, dict[str, Any]] = {  # for the families whose class has no default pattern
    "kimi_linear": {"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "nemotron_h": {"hybrid_override_pattern": "M*-E"},
    "zamba": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
}
NULL_MEANS_ALL = [
    *("bailing_hybrid", "bamba", "falcon_h1", "granitemoehybrid"),
    *("kimi_linear", "olmo_hybrid", "recurrent_gemma", "zamba2"),
]
HIDDEN = {"olmo_hybrid": 3840, "recurrent_gemma": 2560, "inkling2_text": 4608}


def as_object(config: dict[str, Any]) -> Any:
    """Make the transformers config object of a raw config; skip a family that it lacks."""
    raw = json.loads(json.dumps(config))
    if raw["model_type"] not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {raw['model_type']}")
    return transformers.AutoConfig.for_model(**raw)


def forms(config: dict[str, Any], folder: Path) -> dict[str, ModelSpec]:
    """Read every form that a raw config takes on its way through transformers."""
    made = as_object(config)
    raw_file = folder / "raw.json"
    raw_file.write_text(json.dumps(config))
    made.save_pretrained(folder / "saved")
    return {
        "dict": read(config),
        "raw file": read(raw_file),
        "object": read(made),
        "dict of the object": read(made.to_dict()),
        "diff of the object": read(made.to_diff_dict()),
        "JSON of the object": read(json.loads(made.to_json_string())),
        "saved folder": read(folder / "saved"),
        "saved folder as text": read(str(folder / "saved")),
        "saved file": read(folder / "saved" / "config.json"),
    }


def assert_all_equal(specs: dict[str, ModelSpec]) -> None:
    """Compare every form with the raw dict."""
    differing = {name for name, spec in specs.items() if spec != specs["dict"]}
    assert not differing


@pytest.mark.parametrize("name", TINY)
def test_every_form_of_a_tiny_model_reads_alike(name: str, tmp_path: Path) -> None:
    assert_all_equal(forms(tiny(name), tmp_path))


@pytest.mark.parametrize("name", [name for name in EXPECTED if "refuse" not in EXPECTED[name]])
def test_every_form_of_a_public_model_reads_alike(name: str, tmp_path: Path) -> None:
    assert_all_equal(forms(real(name), tmp_path))


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_entries_left_out_take_the_value_that_the_config_class_has(
    model_type: str, tmp_path: Path
) -> None:
    given = FOUR_LAYERS.get(model_type, {})
    config = {
        "model_type": model_type,
        "num_hidden_layers": 4 if given else 12,
        "hidden_size": HIDDEN.get(model_type, 4096),
        **given,
    }
    assert_all_equal(forms(config, tmp_path))


@pytest.mark.parametrize("name", NULL_MEANS_ALL)
def test_a_null_for_key_value_heads_means_as_many_as_query_heads(name: str, tmp_path: Path) -> None:
    specs = forms(tiny(name, num_key_value_heads=None), tmp_path)
    assert_all_equal(specs)
    attention = [layer.attention for layer in specs["dict"].layers if layer.attention]
    assert all(spec.kv_heads == spec.heads == 4 for spec in attention)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("bamba", {"num_hidden_layers": 7, "attn_layer_indices": [0, 6]}),
        ("jamba", {"num_hidden_layers": 9, "attn_layer_period": 3, "attn_layer_offset": 1}),
        ("recurrent_gemma", {"num_hidden_layers": 8}),
        ("recurrent_gemma", {"num_hidden_layers": 5, "block_types": ["attention", "recurrent"]}),
        ("lfm3", {"num_hidden_layers": 11, "layer_types": None}),
        ("minimax", {"num_hidden_layers": 5, "layer_types": None}),
        ("minimax", {"attn_type_list": [0, 0, 0, 1], "layer_types": None}),
        ("inkling_text", {"num_hidden_layers": 13, "layer_types": None, "mlp_layer_types": None}),
        ("inkling_text", {"layer_types": None, "local_layer_ids": [1]}),
        ("inkling2_text", {"num_hidden_layers": 13, "layer_types": None}),
        ("bailing_hybrid", {"layer_group_size": 3, "num_hidden_layers": 6}),
        ("bailing_hybrid", {"kda_safe_gate": False}),
        ("bailing_hybrid", {"kda_lower_bound": -2.5}),
        ("bailing_hybrid", {"use_kda": False}),
        ("kimi_linear", {"num_key_value_heads": None}),
        ("olmo_hybrid", {"num_hidden_layers": 3, "linear_allow_neg_eigval": False}),
        ("falcon_h1", {"mamba_d_ssm": None}),
        ("falcon_h1", {"mamba_rms_norm": True, "time_step_limit": [0.5, 2.0]}),
        ("granitemoehybrid", {"time_step_limit": [0.0, 0.1]}),
        ("granitemoehybrid", {"mamba_conv_bias": False, "mamba_d_head": "auto"}),
        ("mamba", {"time_step_rank": 7, "use_conv_bias": False}),
        ("jamba", {"mamba_dt_rank": 5, "head_dim": 32}),
        ("nemotron_h", {"time_step_min": 0.25, "time_step_limit": [0.0, 0.1]}),
        ("nemotron_h", {"mamba_n_groups": 3, "mamba_d_conv": 2, "mamba_dt_min": 0.5}),
        ("nemotron_h", {"mamba_num_groups": 3, "mamba_state_dim": 40, "n_groups": None}),
        ("nemotron_h", {"mamba_ssm_cache_dtype": "bfloat16"}),
        ("zamba2", {"time_step_min": 0.5, "n_mamba_heads": 4}),
        ("zamba", {"n_mamba_heads": 4, "mamba_dt_rank": 3}),
        ("zaya", {"layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "sliding_window": 8}),
        ("qwen3_next", {"layer_types": None, "full_attention_interval": 2}),
        ("qwen4_exp_text", {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}),
        ("qwen3_5_text", {"mamba_ssm_dtype": "float32", "dtype": "bfloat16"}),
        ("qwen3_5", {"dtype": "bfloat16"}),
        ("lfm2", {"layer_types": None, "full_attn_idxs": [0, 3]}),
        ("lfm2", {"layer_types": None, "num_key_value_heads": 4, "head_dim": 32}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_variant_of_a_family_reads_alike_in_every_form(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    config = tiny(name, **changes)
    if changes.get("n_groups", ...) is None:
        del config["n_groups"]
    assert_all_equal(forms(config, tmp_path))


@pytest.mark.parametrize("given", ["dtype", "torch_dtype"])
def test_a_wrapper_gives_its_dtype_to_a_text_config_without_one(given: str, tmp_path: Path) -> None:
    specs = forms({**tiny("lfm2_vl"), given: "bfloat16"}, tmp_path)
    assert_all_equal(specs)
    assert specs["dict"].dtype == "bfloat16"


def test_the_dtype_of_the_text_config_comes_before_its_wrappers(tmp_path: Path) -> None:
    config = {**tiny("lfm2_vl", torch_dtype="float16"), "dtype": "bfloat16"}
    assert read(config).dtype == "float16"
    assert_all_equal(forms(config, tmp_path))


def test_an_object_holds_its_dtype_as_a_torch_dtype() -> None:
    torch = pytest.importorskip("torch")
    made = as_object(tiny("qwen3_next"))
    made.dtype = torch.float16
    assert read(made).dtype == "float16"
    assert read({**tiny("qwen3_next"), "torch_dtype": torch.bfloat16}).dtype == "bfloat16"
    assert read({**tiny("qwen3_next"), "torch_dtype": "torch.bfloat16"}).dtype == "bfloat16"


def test_the_class_overlooks_a_pattern_and_hal_does_not(tmp_path: Path) -> None:
    config = without(tiny("nemotron_h"), "hybrid_override_pattern")
    config["hybrid_layer_pattern"] = "M-M*M-EM"
    specs = forms(config, tmp_path)
    assert_all_equal(specs)
    assert len(specs["object"].layers) == 8


def test_an_infinite_limit_survives_the_way_transformers_saves_it(tmp_path: Path) -> None:
    config = {**tiny("mamba2"), "time_step_limit": [0.25, float("inf")]}
    specs = forms(config, tmp_path)
    assert "__float__" in (tmp_path / "saved" / "config.json").read_text()
    assert_all_equal(specs)
    [dims] = {layer.dims for layer in specs["saved folder"].layers}
    assert getattr(dims, "dt_limit", None) == (0.25, float("inf"))


@pytest.mark.parametrize("wrapper", sorted(WRAPPERS))
def test_a_text_config_without_a_model_type_is_of_its_wrappers_kind(wrapper: str) -> None:
    family = WRAPPERS[wrapper]
    source = {"glm5_next_text": "glm5_next"}.get(family, family)
    text = tiny(source).get("text_config", tiny(source))
    spec = read({"model_type": wrapper, "text_config": without(text, "model_type")})
    assert spec == read({"model_type": wrapper, "text_config": text})
    assert spec.model_type == family


@pytest.mark.parametrize("wrapper", sorted(WRAPPERS))
def test_transformers_means_the_same_text_model_in_a_wrapper(wrapper: str) -> None:
    if wrapper not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {wrapper}")
    config_class = transformers.CONFIG_MAPPING[wrapper]
    meant = config_class.sub_configs_defaults["text_config"]
    assert (meant.model_type or meant.config_class.model_type) == WRAPPERS[wrapper]


def test_reading_changes_no_config() -> None:
    for name in TINY:
        config, copy = tiny(name), tiny(name)
        read(config)
        assert config == copy


def test_specs_of_different_models_differ() -> None:
    specs = [read(tiny(name)) for name in TINY if name not in {"lfm2_vl", "qwen3_5", "qwen3_5_moe"}]
    assert len(set(specs)) == len(specs)


def test_layers_of_one_word_share_one_set_of_dims() -> None:
    spec = read(real("qwen3-next-80b-a3b.json"))
    assert len({id(layer.dims) for layer in spec.stateful_layers()}) == 1
    assert spec.count(Kind.GATED_DELTA_NET) == 36
