"""The decision comes before the weights, and weights that do not fit are an error."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import hal
from hal.errors import ConfigError, WeightsError
from hal.integrations.transformers import load, load_weights, loading, open_folder
from support.models import CONFIGS, DRIVEN, folder_of, make_model, save_model
from support.serving import serve

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(root: Path, tmp_path: Path) -> Path:
    """A folder of its own, to be spoiled."""
    return Path(shutil.copytree(folder_of("lfm2", root), tmp_path / "model"))


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


@pytest.mark.parametrize("name", DRIVEN)
def test_every_weight_arrives_as_it_was_saved(root: Path, name: str) -> None:
    saved = make_model(name).state_dict()
    loaded = load_weights(open_folder(folder_of(name, root), "cpu")).state_dict()
    assert saved.keys() == loaded.keys()
    for key, tensor in saved.items():
        assert torch.equal(tensor, loaded[key])


@pytest.mark.parametrize("name", DRIVEN)
def test_the_class_is_the_one_that_the_config_names(root: Path, name: str) -> None:
    model = load_weights(open_folder(folder_of(name, root), "cpu"))
    wanted = json.loads((CONFIGS / f"{name}.json").read_text())["architectures"][0]
    assert type(model) is getattr(transformers, wanted)


@pytest.mark.parametrize(
    "named", [None, [], ["NoSuchModel"], ["Lfm2Config"], ["Lfm2MoeForCausalLM"]]
)
def test_other_names_fall_back_on_the_causal_model_of_the_family(
    folder: Path, named: list[str] | None
) -> None:
    config(folder, architectures=named)
    assert type(load_weights(open_folder(folder, "cpu"))).__name__ == "Lfm2ForCausalLM"


def test_a_missing_tensor_is_an_error_not_a_fresh_one(folder: Path) -> None:
    rewrite(folder, without("model.layers.0.conv.conv.weight"))
    with pytest.raises(WeightsError, match=r"lacks 1 tensor: model\.layers\.0\.conv\.conv\.weight"):
        load_weights(open_folder(folder, "cpu"))


def test_a_tensor_without_a_place_is_an_error(folder: Path) -> None:
    rewrite(folder, lambda tensors: {**tensors, "model.extra": torch.zeros(2)})
    with pytest.raises(WeightsError, match=r"no place for, 1 tensor: model\.extra"):
        load_weights(open_folder(folder, "cpu"))


def test_a_wrong_shape_is_an_error_with_both_shapes(folder: Path) -> None:
    name = "model.embedding_norm.weight"
    rewrite(folder, lambda tensors: {**tensors, name: torch.zeros(65)})
    with pytest.raises(WeightsError, match=rf"{name} \(\[65\], needed \[64\]\)"):
        load_weights(open_folder(folder, "cpu"))


def test_weights_of_another_size_than_the_config_are_an_error(folder: Path) -> None:
    config(folder, hidden_size=32)
    with pytest.raises(
        WeightsError, match=r"other shapes than its config says for .* tensors: "
    ) as info:
        load_weights(open_folder(folder, "cpu"))
    assert "\n" not in str(info.value)
    assert str(info.value).count("needed") == loading.SHOWN


def test_tied_weights_need_no_tensor_of_their_own(folder: Path) -> None:
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    model = load_weights(open_folder(folder, "cpu"))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_header_that_lies_about_its_tensors_is_a_weights_error(folder: Path) -> None:
    """Whole by its size, but a shape and its bytes disagree: the loader finds it."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"shape":[64]', b'"shape":[65]', 1))
    with pytest.raises(WeightsError, match="cannot be loaded: ") as info:
        load_weights(open_folder(folder, "cpu"))
    assert "\n" not in str(info.value)


def test_sharded_weights_load_like_one_file(root: Path, tmp_path: Path) -> None:
    sharded = save_model(make_model("lfm2"), tmp_path / "shards", max_shard_size="200KB")
    opened = open_folder(sharded, "cpu")
    assert len(opened.checkpoint.files) > 1
    whole = load_weights(open_folder(folder_of("lfm2", root), "cpu")).state_dict()
    for name, tensor in load_weights(opened).state_dict().items():
        assert torch.equal(tensor, whole[name])


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16", "float16"])
def test_the_dtype_is_the_configs_unless_one_is_given(folder: Path, dtype: str | None) -> None:
    config(folder, dtype="bfloat16")
    opened = open_folder(folder, "cpu", dtype)
    wanted = dtype or "bfloat16"
    assert opened.selection.dtype == wanted
    assert load_weights(opened).dtype is getattr(torch, wanted)


def test_a_pair_that_is_refused_never_reaches_the_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "model.safetensors").write_bytes(b"never looked at")
    monkeypatch.setattr(loading, "inspect_folder", lambda _: pytest.fail("looked at the weights"))
    with pytest.raises(hal.Unsupported, match="lfm2 cannot run on nowhere"):
        open_folder(folder, "nowhere")


def test_opening_loads_no_weight(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        pytest.fail("weights were loaded")

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", never)
    opened = open_folder(folder, "cpu")
    assert (opened.vocab_size, opened.max_positions) == (160, 512)


@pytest.mark.parametrize("what", ["absent", "file"])
def test_a_folder_that_is_none_is_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / what
    if what == "file":
        path.write_text("")
    with pytest.raises(ConfigError, match="is not a folder; give the folder of a Hugging Face"):
        open_folder(path, "cpu")


def test_a_folder_without_a_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no config\.json; give the folder"):
        open_folder(folder, "cpu")


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"model_type": 3}', "{}", "\udcff", '{"a":' * 99999]
)
def test_a_config_that_is_none_is_refused_on_one_line(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=r"^[^\n]*config\.json [^\n]*; download it again$"):
        open_folder(folder, "cpu")


def test_a_config_that_transformers_refuses_is_a_config_error(folder: Path) -> None:
    config(folder, eos_token_id={"no": "id"})
    with pytest.raises(ConfigError, match="transformers refuses it: ") as info:
        open_folder(folder, "cpu")
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("generation", "model", "wanted"),
    [
        ({"eos_token_id": 5}, 2, {5}),
        ({"eos_token_id": [5, 6]}, 2, {5, 6}),
        ({"eos_token_id": None}, 2, {2}),
        ({}, [2, 3], {2, 3}),
        ({}, None, set()),
    ],
)
def test_stop_ids_come_from_the_generation_config_first(
    folder: Path, generation: dict[str, object], model: object, wanted: set[int]
) -> None:
    (folder / "generation_config.json").write_text(json.dumps(generation))
    config(folder, eos_token_id=model)
    assert open_folder(folder, "cpu").stop_ids() == wanted


def test_stop_ids_do_without_a_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert open_folder(folder, "cpu").stop_ids() == {2}


@pytest.mark.parametrize(("text", "what"), [("{", "is not JSON"), ("[1]", "holds no JSON object")])
def test_a_generation_config_that_is_none_is_refused(folder: Path, text: str, what: str) -> None:
    opened = open_folder(folder, "cpu")
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"generation_config\.json {what}.*; download it again"):
        opened.stop_ids()


def test_a_wrapper_without_its_vision_weights_is_refused(root: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folder_of("lfm2_vl", root), tmp_path / "vl"))
    rewrite(folder, lambda tensors: {n: t for n, t in tensors.items() if "vision" not in n})
    with pytest.raises(WeightsError, match=r"lacks \d+ tensors: model\.vision_tower"):
        load_weights(open_folder(folder, "cpu"))


def test_remote_code_of_a_folder_is_never_run(folder: Path) -> None:
    config(folder, auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    (folder / "evil.py").write_text("raise SystemExit('it ran')")
    opened = open_folder(folder, "cpu")
    runner = load(opened, slots=1, max_batch=1, max_tokens=4, max_len=32)
    assert len(serve(runner, [[5, 6]], 2, max_batch=1, budget=4).ids[0]) == 2
