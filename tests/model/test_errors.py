"""A config that cannot be read is a ConfigError that names the entry, the need and the find."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal.errors import ConfigError, HalError
from hal.model import Kind, LayerSpec, ModelSpec, UnknownFamily, read
from hal.model.families import FAMILIES
from hal.model.fields import MAX_DIM, MAX_LAYERS
from hal.model.source import MAX_BYTES, MAX_DEPTH
from support.model_configs import TINY, tiny, without


def refused(config: Any) -> ConfigError:
    """Return the error that reading raises."""
    with pytest.raises(ConfigError) as caught:
        read(config)
    return caught.value


@pytest.mark.parametrize(
    ("name", "changes", "field", "text"),
    [
        ("qwen3_next", {"hidden_size": "64"}, "hidden_size", "an integer from 1 to"),
        ("qwen3_next", {"hidden_size": "64"}, "hidden_size", "found '64'"),
        ("qwen3_next", {"hidden_size": 64.0}, "hidden_size", "found 64.0"),
        ("qwen3_next", {"hidden_size": True}, "hidden_size", "found True"),
        ("qwen3_next", {"hidden_size": None}, "hidden_size", "found nothing"),
        ("qwen3_next", {"vocab_size": [160]}, "vocab_size", "found a list of 1"),
        ("qwen3_next", {"vocab_size": {}}, "vocab_size", "found a mapping"),
        ("qwen3_next", {"vocab_size": 10**400}, "vocab_size", "found an integer beyond 64 bits"),
        ("qwen3_next", {"vocab_size": MAX_DIM + 1}, "vocab_size", f"found {MAX_DIM + 1}"),
        ("qwen3_next", {"num_hidden_layers": 10**9}, "num_hidden_layers", f"to {MAX_LAYERS}"),
        ("qwen3_next", {"num_hidden_layers": 0}, "num_hidden_layers", "found 0"),
        ("qwen3_next", {"num_hidden_layers": 5}, "layer_types", "each of 5 layers"),
        ("qwen3_next", {"num_hidden_layers": 5}, "layer_types", "found 4 entries"),
        ("qwen3_next", {"layer_types": []}, "layer_types", "found 0 entries"),
        ("qwen3_next", {"layer_types": "full"}, "layer_types", "a list of at most"),
        ("qwen3_next", {"layer_types": ["x"] * 10_001}, "layer_types", "found a list of 10001"),
        ("qwen3_next", {"layer_types": [1, 2, 3, 4]}, "layer_types", "found 1 in it"),
        ("qwen3_next", {"layer_types": ["conv"] * 4}, "layer_types", "found 'conv'"),
        ("qwen3_next", {"layer_types": ["conv"] * 4}, "layer_types", "full_attention"),
        ("qwen3_next", {"linear_num_key_heads": 0}, "linear_num_key_heads", "found 0"),
        ("qwen3_next", {"linear_key_head_dim": -16}, "linear_key_head_dim", "found -16"),
        ("qwen3_next", {"linear_num_value_heads": 3}, "linear_num_value_heads", "multiple of 2"),
        ("qwen3_next", {"linear_conv_kernel_dim": 10**6}, "linear_conv_kernel_dim", "to 256"),
        ("qwen3_next", {"num_key_value_heads": 3}, "num_key_value_heads", "divisor of the query"),
        ("qwen3_next", {"dtype": "int8"}, "dtype", "one of float32, bfloat16, float16"),
        ("qwen3_next", {"dtype": 16}, "dtype", "found 16"),
        ("qwen3_next", {"mamba_ssm_dtype": "fp8"}, "mamba_ssm_dtype", "found 'fp8'"),
        ("lfm2", {"num_attention_heads": 5}, "num_attention_heads", "divisor of the attention"),
        ("lfm2", {"conv_bias": "no"}, "conv_bias", "true or false"),
        ("lfm2", {"layer_types": None, "full_attn_idxs": [4]}, "full_attn_idxs", "from 0 to 3"),
        ("lfm2", {"layer_types": None, "full_attn_idxs": [-1]}, "full_attn_idxs", "-1 in it"),
        ("bamba", {"attn_layer_indices": [2, 2.0]}, "attn_layer_indices", "2.0 in it"),
        ("bamba", {"mamba_d_head": 15}, "mamba_d_head", "16: 8 heads make up"),
        ("bamba", {"mamba_n_heads": 7}, "mamba_n_heads", "a divisor of the inner width = 128"),
        ("bamba", {"mamba_n_groups": 3}, "mamba_n_groups", "a divisor of the heads = 8"),
        ("bamba", {"time_step_limit": [1]}, "time_step_limit", "a pair of numbers"),
        ("bamba", {"time_step_limit": [0, 1, 2]}, "time_step_limit", "a pair of numbers"),
        ("bamba", {"time_step_limit": [2, 1]}, "time_step_limit", "low <= high"),
        ("bamba", {"time_step_limit": [-1, 1]}, "time_step_limit", "0 <= low"),
        ("bamba", {"time_step_limit": [0, math.nan]}, "time_step_limit", "found nan"),
        ("bamba", {"time_step_limit": [0, "inf"]}, "time_step_limit", "made of numbers"),
        ("bamba", {"time_step_limit": {"0": 1}}, "time_step_limit", "a list of at most"),
        ("falcon_h1", {"mamba_d_ssm": 127}, "mamba_n_heads", "a divisor of the inner width = 127"),
        ("falcon_h1", {"mamba_rms_norm": 1}, "mamba_rms_norm", "true or false"),
        ("mamba2", {"head_dim": 8}, "head_dim", "16: 8 heads make up"),
        ("zamba2", {"mamba_headdim": 8}, "mamba_headdim", "16: 8 heads make up"),
        ("zamba2", {"time_step_min": -1}, "time_step_min", "a number from 0"),
        ("zamba", {"n_mamba_heads": 3}, "n_mamba_heads", "a divisor of the inner width"),
        ("nemotron_h", {"n_groups": 4}, "n_groups", "a divisor of the heads = 6"),
        ("nemotron_h", {"time_step_min": math.inf}, "time_step_min", "a number from 0"),
        ("nemotron_h", {"num_hidden_layers": 5}, "hybrid_override_pattern", "found 4 entries"),
        ("jamba", {"attn_layer_period": 0}, "attn_layer_period", "found 0"),
        ("jamba", {"attn_layer_offset": 4}, "attn_layer_offset", "from 0 to 3"),
        ("jamba", {"mamba_dt_rank": "full"}, "mamba_dt_rank", "found 'full'"),
        ("recurrent_gemma", {"block_types": []}, "block_types", "at least one word"),
        ("recurrent_gemma", {"block_types": ["conv"]}, "block_types", "found 'conv'"),
        ("olmo_hybrid", {"linear_key_head_dim": None, "linear_num_key_heads": 64}, None, "64"),
        ("bailing_hybrid", {"kda_lower_bound": 5.0}, "kda_lower_bound", "a negative number"),
        ("bailing_hybrid", {"kda_lower_bound": "x"}, "kda_lower_bound", "found 'x'"),
        ("bailing_hybrid", {"layer_group_size": 0}, "layer_group_size", "found 0"),
        ("kimi_linear", {"linear_attn_config": [1]}, "linear_attn_config", "a mapping"),
        ("glm5_next", {"linear_attn_config": {"num_heads": "4"}}, None, "found '4'"),
        ("minimax", {"attn_type_list": [0, 0, 2, 1]}, "attn_type_list", "from 0 to 1, found 2"),
        ("minimax", {"attn_type_list": [0, 1]}, "attn_type_list", "found 2 entries"),
        ("inkling_text", {"sliding_window_size": "16"}, "sliding_window_size", "found '16'"),
        ("zaya", {"cca_time0": 0}, "cca_time0", "found 0"),
    ],
)
def test_an_error_names_the_entry_the_need_and_the_find(
    name: str, changes: dict[str, Any], field: str | None, text: str
) -> None:
    error = refused(tiny(name, **changes))
    assert text in str(error)
    assert error.field is not None and error.field in str(error)
    assert field in {None, error.field}


def test_an_entry_of_a_section_is_named_with_its_section() -> None:
    error = refused(tiny("glm5_next", linear_attn_config={"num_heads": 0}))
    assert error.field == "linear_attn_config.num_heads"
    assert str(error).startswith("glm5_next_text: linear_attn_config.num_heads must be")


def test_a_config_error_is_a_value_error_and_an_error_of_hal() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, HalError)
    assert issubclass(UnknownFamily, ConfigError)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("entry", ["hidden_size", "num_hidden_layers", "vocab_size"])
@pytest.mark.parametrize("value", [0, -1, 10**9, "8", 8.0, True, [8], {"a": 8}])
def test_no_family_takes_an_absurd_size(name: str, entry: str, value: object) -> None:
    assert refused(tiny(name, **{entry: value})).field == entry


@pytest.mark.parametrize("name", TINY)
def test_no_family_invents_a_hidden_size(name: str) -> None:
    assert refused(tiny(name, hidden_size=None)).field == "hidden_size"


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_no_family_expands_a_billion_layers(model_type: str) -> None:
    config = {"model_type": model_type, "hidden_size": 64, "num_hidden_layers": 10**9}
    error = refused(config)
    assert error.field in {"num_hidden_layers", "layer_types", "layers_block_type"}


@pytest.mark.parametrize("name", TINY)
def test_a_word_that_no_family_has_is_refused_with_the_known_ones(name: str) -> None:
    config = tiny(name)
    layers = len(read(config).layers)
    error = refused(tiny(name, layer_types=["warp_drive"] * layers, layers_block_type=None))
    assert error.field == "layer_types"
    assert "'warp_drive'" in str(error)
    assert "attention" in str(error) or "hybrid" in str(error)


@given(config=st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=8)))
def test_a_mapping_without_a_model_type_is_refused(config: dict[str, Any]) -> None:
    assert refused(without(config, "model_type")).field == "model_type"


@pytest.mark.parametrize("config", [None, 7, b"config.json", ["a"], {1, 2}, object(), ModelSpec])
def test_what_is_no_config_is_refused(config: Any) -> None:
    assert "a config object, a mapping or the path" in str(refused(config))


@pytest.mark.parametrize("model_type", [None, 7, [], {}, True, ["lfm2"]])
def test_a_model_type_is_a_string(model_type: object) -> None:
    assert refused({**tiny("lfm2"), "model_type": model_type}).field == "model_type"


def test_a_config_object_has_to_give_a_mapping() -> None:
    class Broken:
        def to_dict(self) -> list[int]:
            return [1]

    assert "found a list of 1" in str(refused(Broken()))
    assert "found a type" in str(refused(Broken))


# Families that nobody knows.


@pytest.mark.parametrize(
    "model_type", ["rwkv", "rwkv6", "xlstm", "MiniMax-M2", "jet_nemotron", "llama", "", "x" * 999]
)
def test_an_unknown_family_keeps_its_model_type(model_type: str) -> None:
    with pytest.raises(UnknownFamily) as caught:
        read({"model_type": model_type, "hidden_size": 64})
    assert caught.value.model_type == model_type
    assert "qwen3_next" in str(caught.value)
    assert len(str(caught.value)) < 700


def test_the_family_of_an_unknown_text_config_is_the_inner_one() -> None:
    with pytest.raises(UnknownFamily) as caught:
        read({"model_type": "qwen3_5", "text_config": {"model_type": "qwen9"}})
    assert caught.value.model_type == "qwen9"


def test_an_extension_is_asked_only_for_what_no_family_file_knows() -> None:
    asked = []
    mine = ModelSpec("mine", (LayerSpec(0, (Kind.MLP,)),), "float32", 8, 8)

    def extend(config: Any) -> ModelSpec | None:
        asked.append(config)
        return mine if config["model_type"] == "mine" else None

    assert read(tiny("lfm2"), extend) == read(tiny("lfm2"))
    assert asked == []
    assert read({"model_type": "mine", "a": 1}, extend=extend) is mine
    assert asked == [{"model_type": "mine", "a": 1}]
    with pytest.raises(UnknownFamily, match="'theirs'"):
        read({"model_type": "theirs"}, extend)


def test_an_extension_is_given_the_text_config() -> None:
    asked: list[Any] = []
    wrapper = {"model_type": "vlm", "text_config": {"model_type": "mine"}, "dtype": "bfloat16"}
    with pytest.raises(UnknownFamily):
        read(wrapper, extend=asked.append)
    assert asked[0]["model_type"] == "mine"
    assert asked[0]["dtype"] == "bfloat16"


# Nesting.


@pytest.mark.parametrize("value", [7, "lfm2", ["a"], False, 0, ""])
def test_a_text_config_is_a_mapping(value: object) -> None:
    error = refused({"model_type": "lfm2_vl", "text_config": value})
    assert error.field == "text_config"


@pytest.mark.parametrize("missing", [{}, {"text_config": None}])
def test_a_wrapper_needs_its_text_config(missing: dict[str, Any]) -> None:
    error = refused({"model_type": "qwen3_5", "num_hidden_layers": 4, **missing})
    assert error.field == "text_config"
    assert "qwen3_5" in str(error)


def test_a_text_config_without_end_is_refused() -> None:
    config: dict[str, Any] = {"model_type": "lfm2_vl"}
    config["text_config"] = config
    assert str(MAX_DEPTH) in str(refused(config))
    for _ in range(100_000):
        config = {"model_type": "lfm2_vl", "text_config": config}
    assert refused(config).field == "text_config"


def test_values_nested_without_end_are_described_in_a_word() -> None:
    endless: list[Any] = []
    endless.append(endless)
    for entry in ("hidden_size", "layer_types", "dtype", "num_hidden_layers", "conv_bias"):
        assert len(str(refused(tiny("lfm2", **{entry: endless})))) < 200


# Files.


def write(folder: Path, content: bytes | str) -> Path:
    """Write a config.json and return its folder."""
    data = content if isinstance(content, bytes) else content.encode()
    (folder / "config.json").write_bytes(data)
    return folder


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "cannot be read as JSON"),
        ("{", "cannot be read as JSON"),
        ('{"model_type": "lfm2",}', "cannot be read as JSON"),
        ("[1]", "must hold a JSON object, found a list of 1"),
        ('"lfm2"', "must hold a JSON object, found 'lfm2'"),
        ("null", "must hold a JSON object, found nothing"),
        (b"\xff\xfe\x00", "cannot be read as JSON"),
        (b'{"model_type": "\xe9"}', "cannot be read as JSON"),
        ("[" * 200_000, "cannot be read as JSON"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "cannot be read as JSON"),
    ],
    ids=range(10),
)
def test_a_file_that_is_no_json_object_is_refused(
    content: bytes | str, text: str, tmp_path: Path
) -> None:
    assert text in str(refused(write(tmp_path, content)))


def test_a_file_or_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "nowhere" / "config.json"):
        assert "found no such file" in str(refused(path))
        assert "found no such file" in str(refused(str(path)))
    (tmp_path / "config.json").mkdir()
    assert "found no such file" in str(refused(tmp_path))


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "{}"])
def test_a_string_that_is_no_path_is_refused(path: str) -> None:
    refused(path)


def test_a_device_is_no_config() -> None:
    assert "found no such file" in str(refused(os.devnull))


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    assert f"at most {MAX_BYTES} bytes" in str(refused(tmp_path))


def test_a_file_without_permission_is_refused(tmp_path: Path) -> None:
    write(tmp_path, json.dumps(tiny("lfm2")))
    (tmp_path / "config.json").chmod(0)
    if os.access(tmp_path / "config.json", os.R_OK):
        pytest.skip("this user may read every file")
    assert "cannot be read" in str(refused(tmp_path))


def test_a_config_may_be_named_otherwise(tmp_path: Path) -> None:
    (tmp_path / "lfm.json").write_text(json.dumps(tiny("lfm2")))
    assert read(tmp_path / "lfm.json") == read(tiny("lfm2"))
