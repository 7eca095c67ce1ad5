"""The plugin takes hold of every seam of vLLM, or refuses; `hal` is asked before a model is."""

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hal
import hal_vllm
from hal.errors import ConfigError, HalError
from hal.integrations.engines.session import Session
from hal.model.spec import Kind
from hal_registry import Code
from hal_vllm import loader, plugin, seams, start
from hal_vllm.question import FEATURES, Place, ask
from hal_vllm.versions import PIN
from support import fake_vllm
from support.bound import GDN_CONFIG
from support.model_configs import tiny

LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 16}
CPU = Place("cpu")


@pytest.fixture
def engine() -> Iterator[fake_vllm.Engine]:
    with fake_vllm.installed() as fake:
        yield fake


class Model:
    """What a loader builds; the page methods are the engine's own."""

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: object) -> object:
        return "stock shape"

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: object) -> object:
        return "stock dtype"


def gdn_model(layers: range = range(3), name: str = "QwenGatedDeltaNetAttention") -> Model:
    """A model whose linear layers are built by their class's name, as vLLM's models do."""
    dims = hal.model.read(GDN_CONFIG).layers[0].dims
    model = type("Model", (Model,), {})()  # a class of its own, whose page methods are replaced
    vars(model)["layers"] = [
        getattr(fake_vllm, name)(SimpleNamespace(dims=dims), None, f"layers.{i}.linear_attn")
        for i in layers
    ]
    return model


def load(config: Any) -> Any:
    return fake_vllm.BaseModelLoader().create_model(config, config.model_config)


# Versions


@given(st.sampled_from(PIN.tested), st.sampled_from(["", "+cpu", "+cu130"]))
def test_a_tested_version_passes_however_it_was_built(version: str, local: str) -> None:
    PIN.check(version + local, {})


@given(st.text(min_size=1) | st.sampled_from(["0.31.9", "0.32.1", "0.33.0", "0.32.0rc1", "dev"]))
def test_any_other_version_is_refused_by_name_unless_told_otherwise(version: str) -> None:
    if version.strip() in PIN.tested:
        return
    with pytest.raises(hal.Unsupported) as refused:
        PIN.check(version, {})
    assert [reason.code for reason in refused.value.reasons] == [Code.LIBRARY_VERSION]
    assert refused.value.reasons[0].offered == version
    assert PIN.any_version in str(refused.value)
    PIN.check(version, {PIN.any_version: "1"})


def test_the_plugin_stops_an_engine_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PIN.any_version, raising=False)
    with fake_vllm.installed("0.33.0") as fake, pytest.raises(hal.Unsupported, match=r"0\.33\.0"):
        plugin.register()
    assert not fake.overrides


# Seams


def test_registering_replaces_every_layer_and_metadata_kind(engine: fake_vllm.Engine) -> None:
    plugin.register()
    owners = {name: layer.__name__ for name, layer in fake_vllm.PluggableLayer.registry.items()}
    assert owners == seams.LAYERS
    assert engine.overrides == dict.fromkeys(fake_vllm.MambaType, seams.BACKEND)


def test_registering_twice_changes_nothing(engine: fake_vllm.Engine) -> None:
    plugin.register()
    layers, loader = dict(fake_vllm.PluggableLayer.registry), fake_vllm.BaseModelLoader.create_model
    plugin.register()
    assert fake_vllm.PluggableLayer.registry == layers
    assert fake_vllm.BaseModelLoader.create_model is loader


@pytest.mark.parametrize(
    "module",
    [
        "vllm.v1.attention.backends.registry",
        "vllm.model_executor.custom_op",
        "vllm.model_executor.model_loader.base_loader",
    ],
)
def test_a_seam_that_moved_is_refused_by_its_name(
    engine: fake_vllm.Engine, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(hal.Unsupported, match=module):
        plugin.register()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (fake_vllm.QwenGatedDeltaNetAttention, "_forward_core"),
        (fake_vllm.KimiGatedDeltaNetAttention, "_forward"),
        (fake_vllm.MambaMixer2, "conv_ssm_forward"),
        (fake_vllm.ShortConv, "forward_native"),
        (fake_vllm.MambaBase, "bind_kv_cache"),
        (fake_vllm.MambaBase, "get_kv_cache_spec"),
    ],
)
def test_a_method_that_the_engine_calls_by_another_name_is_refused(
    engine: fake_vllm.Engine, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    """The engine would run its own method and never the layer's."""
    monkeypatch.delattr(owner, name)
    with pytest.raises(hal.Unsupported, match=name) as refused:
        plugin.register()
    assert [reason.code for reason in refused.value.reasons] == [Code.LIBRARY_VERSION]


def test_a_layer_class_that_moved_is_refused_by_its_name(
    engine: fake_vllm.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = sys.modules["vllm.model_executor.layers.mamba.short_conv"]
    monkeypatch.delattr(home, "ShortConv")
    with pytest.raises(hal.Unsupported, match="ShortConv") as refused:
        plugin.register()
    assert [reason.code for reason in refused.value.reasons] == [Code.LIBRARY_VERSION]


def test_a_layer_that_another_plugin_owns_is_refused(engine: fake_vllm.Engine) -> None:
    fake_vllm.PluggableLayer.registry["ShortConv"] = Model
    with pytest.raises(hal.Unsupported, match="layer ShortConv"):
        plugin.register()


def test_an_engine_that_keeps_its_own_metadata_is_refused(engine: fake_vllm.Engine) -> None:
    plugin.register()
    engine.backend = Model
    with pytest.raises(hal.Unsupported, match="metadata of GDN_ATTN"):
        load(fake_vllm.config(GDN_CONFIG, gdn_model))


# The model


def test_a_served_model_is_announced_in_one_line(engine: fake_vllm.Engine) -> None:
    plugin.register()
    model = load(fake_vllm.config(GDN_CONFIG, gdn_model))
    (line,) = engine.lines
    assert line.startswith("hal: 3 Gated DeltaNet layers of qwen3_5_text on cpu are served by cpu")
    report = hal_vllm.report()[-1]
    assert report["layers"] == dict.fromkeys(range(3), "gated_delta_net")
    assert report["calls"] == {}
    del model


def test_pages_are_sized_by_the_plan(engine: fake_vllm.Engine) -> None:
    plugin.register()
    model = load(fake_vllm.config(GDN_CONFIG, gdn_model))
    states = [spec for spec in hal.select("cpu", GDN_CONFIG).states if spec.layer == 0]
    assert model.get_mamba_state_shape_from_config(None) == tuple(spec.shape for spec in states)
    dtypes = model.get_mamba_state_dtype_from_config(None)
    assert [str(dtype) for dtype in dtypes] == [f"torch.{spec.dtype}" for spec in states]
    layer = model.layers[0]
    assert layer.get_state_shape() == tuple(spec.shape for spec in states)
    assert layer.get_state_dtype() == dtypes


def test_graphs_are_kept_apart_from_those_of_the_engine_alone(engine: fake_vllm.Engine) -> None:
    """vLLM hashes this dictionary into the name of a graph that it keeps on disk."""
    plugin.register()
    asked = fake_vllm.config(GDN_CONFIG, gdn_model)
    model = load(asked)
    assert asked.additional_config == {"theirs": 1, "hal": engine.lines}
    plain = {"model_config.is_hybrid": False, "model_config.has_inner_state": False}
    asked = fake_vllm.config(LLAMA, Model, **plain)
    load(asked)
    assert asked.additional_config == {"theirs": 1}
    del model


def test_a_model_with_a_layer_that_was_not_replaced_is_refused(engine: fake_vllm.Engine) -> None:
    plugin.register()
    with pytest.raises(hal.Unsupported, match="1 Gated DeltaNet layers") as refused:
        load(fake_vllm.config(GDN_CONFIG, lambda: gdn_model(range(2))))
    assert "none for layers 2" in str(refused.value)


def test_a_layer_of_another_kind_or_number_is_an_error(engine: fake_vllm.Engine) -> None:
    plugin.register()
    kimi = "KimiGatedDeltaNetAttention"
    with pytest.raises(HalError, match="layer 0 is Kimi Delta Attention in vLLM, Gated DeltaNet"):
        load(fake_vllm.config(GDN_CONFIG, lambda: gdn_model(name=kimi)))
    with pytest.raises(HalError, match="layer 3 is Gated DeltaNet in vLLM, without state"):
        load(fake_vllm.config(GDN_CONFIG, lambda: gdn_model(range(4))))


def test_a_layer_that_is_built_elsewhere_is_an_error(engine: fake_vllm.Engine) -> None:
    plugin.register()
    with pytest.raises(HalError, match="outside BaseModelLoader"):
        gdn_model()


def test_a_loader_that_builds_its_model_elsewhere_is_refused_for_a_model_with_state(
    engine: fake_vllm.Engine,
) -> None:
    """Nobody would look whether its layers were replaced."""
    plugin.register()
    seen: list[object] = []
    asked = fake_vllm.config(GDN_CONFIG, lambda: seen.append(1))
    with pytest.raises(hal.Unsupported, match="load format"):
        fake_vllm.OtherLoader().load_model(asked, asked.model_config)
    assert not seen
    plain = {"model_config.is_hybrid": False, "model_config.has_inner_state": False}
    asked = fake_vllm.config(LLAMA, lambda: "model", **plain)
    assert fake_vllm.OtherLoader().load_model(asked, asked.model_config) == "model"


def test_weights_that_change_in_place_are_bound_anew(
    engine: fake_vllm.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin.register()
    model = load(fake_vllm.config(GDN_CONFIG, gdn_model))
    forgotten: list[Session] = []

    def note(session: Session) -> None:
        forgotten.append(session)

    monkeypatch.setattr(Session, "forget", note)
    worker = fake_vllm.Worker()
    for update in (worker.reload_weights, worker.update_weights):
        forgotten.clear()
        assert update(lambda: len(forgotten)) == 0
        assert model.layers[0].hal_session in forgotten
    with pytest.raises(ZeroDivisionError):
        worker.reload_weights(lambda: 1 // 0)
    assert forgotten.count(model.layers[0].hal_session) == 2
    load(fake_vllm.config(GDN_CONFIG, gdn_model))
    forgotten.clear()
    worker.finish_weight_update()
    assert forgotten.count(model.layers[0].hal_session) == 1


def test_states_that_the_engine_counts_otherwise_are_an_error(
    engine: fake_vllm.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin.register()
    other = ((3, 80), (4, 8, 8))
    monkeypatch.setattr(fake_vllm.QwenGatedDeltaNetAttention, "get_state_shape", lambda self: other)
    with pytest.raises(HalError, match="states of"):
        load(fake_vllm.config(GDN_CONFIG, gdn_model))


def test_no_model_is_built_without_a_provider(
    engine: fake_vllm.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin.register()
    seen: list[object] = []
    monkeypatch.setattr(loader, "ask", lambda config, place: ask(config, Place("npu")))
    with pytest.raises(hal.Unsupported):
        load(fake_vllm.config(GDN_CONFIG, lambda: seen.append(1)))
    assert not seen


def test_a_model_without_linear_layers_stays_the_engines(engine: fake_vllm.Engine) -> None:
    plugin.register()
    plain = {"model_config.is_hybrid": False, "model_config.has_inner_state": False}
    model = Model()
    assert load(fake_vllm.config(LLAMA, lambda: model, **plain)) is model
    assert model.get_mamba_state_shape_from_config(None) == "stock shape"
    assert not engine.lines


# The question


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_a_way_to_run_that_is_not_served_is_refused_by_name(feature: Any) -> None:
    changes: dict[str, dict[str, object]] = {
        "speculative decoding": {"speculative_config": object()},
        "pipeline parallelism": {"parallel_config.pipeline_parallel_size": 2},
        "context parallelism": {"parallel_config.decode_context_parallel_size": 2},
        "micro-batching": {"parallel_config.use_ubatching": True},
        "state transfer between engines": {"kv_transfer_config": object()},
        "LoRA adapters": {"lora_config": object()},
        "ReplaySSM": {"cache_config.use_replayssm": True},
    }
    assert ask(fake_vllm.config(GDN_CONFIG, Model), CPU) is not None
    with pytest.raises(hal.Unsupported, match=feature.name) as refused:
        ask(fake_vllm.config(GDN_CONFIG, Model, **changes[feature.name]), CPU)
    assert [reason.code for reason in refused.value.reasons] == [Code.MODE_UNSUPPORTED]
    assert refused.value.refusal.fix() == feature.fix


def test_a_conv_state_of_another_dtype_than_the_model_is_refused() -> None:
    same = fake_vllm.config(GDN_CONFIG, Model, **{"cache_config.mamba_cache_dtype": "float32"})
    assert ask(same, CPU) is not None
    other = fake_vllm.config(GDN_CONFIG, Model, **{"cache_config.mamba_cache_dtype": "bfloat16"})
    with pytest.raises(hal.Unsupported) as refused:
        ask(other, CPU)
    assert [reason.code for reason in refused.value.reasons] == [Code.DTYPE_UNSUPPORTED]


def test_the_engines_state_dtype_is_asked_of_the_provider() -> None:
    config = fake_vllm.config(
        GDN_CONFIG, Model, **{"cache_config.mamba_ssm_cache_dtype": "bfloat16"}
    )
    with pytest.raises(hal.Unsupported) as refused:
        ask(config, CPU)
    assert Code.DTYPE_UNSUPPORTED in {reason.code for reason in refused.value.reasons}


def test_a_part_of_a_parallel_group_has_its_part_of_the_states() -> None:
    whole = ask(fake_vllm.config(GDN_CONFIG, Model), CPU)
    half = ask(fake_vllm.config(GDN_CONFIG, Model), Place("cpu", 1, 2))
    assert whole is not None
    assert half is not None
    assert 2 * half.slot_bytes == whole.slot_bytes


def test_a_model_with_state_that_hal_does_not_know_is_refused() -> None:
    with pytest.raises(hal.Unsupported, match="llama"):
        ask(fake_vllm.config(LLAMA, Model), CPU)
    with pytest.raises(ConfigError):
        ask(fake_vllm.config({"model_type": "qwen3_next"}, Model), CPU)


def test_every_kind_that_joins_has_a_line() -> None:
    for family, label in (("lfm2", "short-conv"), ("mamba2", "Mamba-2"), ("kimi_linear", "Kimi")):
        session = Session.of("vLLM", "hybrid-hal-vllm", hal.select("cpu", tiny(family)), 4)
        (line,) = session.lines()
        assert label in line
        assert line.endswith("cpu.torch (hybrid-hal-cpu 0.1.0)")
        assert Kind.FULL_ATTENTION not in session.kinds().values()


@pytest.mark.parametrize(
    ("platform", "name"),
    [
        (SimpleNamespace(device_type="cpu", is_rocm=lambda: False), "cpu"),
        (SimpleNamespace(device_type="cuda", is_rocm=lambda: False), "cuda:3"),
        (SimpleNamespace(device_type="cuda", is_rocm=lambda: True), "rocm:3"),
    ],
)
def test_a_device_has_the_name_that_hal_gives_it(
    monkeypatch: pytest.MonkeyPatch, platform: Any, name: str
) -> None:
    monkeypatch.setattr("torch.accelerator.current_device_index", lambda: 3)
    assert start.device_name(platform) == name


def test_importing_the_package_imports_neither_torch_nor_the_engine() -> None:
    from support.registry import run_python

    code = "import hal_vllm, hal_vllm.versions, sys; print({'torch', 'vllm'} & set(sys.modules))"
    ran = run_python(code)
    assert ran.stdout == "set()\n", ran.stderr


def test_what_cannot_be_imported_stops_vllm_and_is_no_missing_plugin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM would log a module that fails to import, and serve by itself."""
    monkeypatch.setitem(sys.modules, "hal_vllm.start", None)
    fresh = importlib.reload(plugin)
    with pytest.raises(ImportError, match="start"):
        fresh.register()
