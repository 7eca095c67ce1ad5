"""The plugin takes hold of every seam of SGLang, or no start gets past it; `hal` is asked first."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hal
import hal_sglang
from hal.errors import ConfigError, HalError
from hal.options import Options
from hal_registry import Code
from hal_sglang import ask, plugin, question, seams
from hal_sglang.pool import planned
from hal_sglang.question import FEATURES, Ask, decided, judged
from hal_sglang.versions import PIN
from support import fake_sglang
from support.bound import GDN_CONFIG, LFM2_CONFIG
from support.model_configs import tiny

LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 16}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_sglang.Engine]:
    monkeypatch.delenv(PIN.any_version, raising=False)
    with fake_sglang.installed() as fake:
        yield fake


def take_hold() -> None:
    """What SGLang does with a plugin: call it, swallow what it raises, apply its hooks."""
    with suppress(Exception):
        plugin.register()
    fake_sglang.HookRegistry.apply()


def module(name: str) -> Any:
    return sys.modules[fake_sglang.RUNTIME + name]


def arguments(config: dict[str, object] = GDN_CONFIG, **flags: object) -> Any:
    return module("server_args").ServerArgs(fake_sglang.Config(config), **flags)


def runner(config: dict[str, object] = GDN_CONFIG, **flags: object) -> Any:
    made = arguments(config, **flags)
    return module("model_executor.model_runner").ModelRunner(made, lambda model: None)


def asked(config: dict[str, object] = GDN_CONFIG, hybrid: bool = True, **flags: object) -> Ask:
    values = SimpleNamespace(**(fake_sglang.FLAGS | flags))
    return Ask(fake_sglang.Config(config), torch.float32, values, hybrid, "cpu")


# Versions


@given(st.sampled_from(PIN.tested), st.sampled_from(["", "+cpu", "+cu130"]))
def test_a_tested_version_passes_however_it_was_built(version: str, local: str) -> None:
    PIN.check(version + local, {})


@given(st.text(min_size=1) | st.sampled_from(["0.5.22", "0.5.24", "0.5.23rc1", "dev"]))
def test_any_other_version_is_refused_by_name_unless_told_otherwise(version: str) -> None:
    if version.strip() in PIN.tested:
        return
    with pytest.raises(hal.Unsupported) as refused:
        PIN.check(version, {})
    assert [reason.code for reason in refused.value.reasons] == [Code.LIBRARY_VERSION]
    assert refused.value.reasons[0].offered == version
    assert PIN.any_version in str(refused.value)
    PIN.check(version, {PIN.any_version: "1"})


def test_an_engine_of_another_version_stops_at_its_arguments() -> None:
    with fake_sglang.installed("0.5.24"):
        take_hold()
        with pytest.raises(hal.Unsupported, match=r"0\.5\.24"):
            arguments().check_server_args()


# Seams


def test_registering_patches_every_seam_and_they_are_seen(engine: fake_sglang.Engine) -> None:
    take_hold()
    assert fake_sglang.HookRegistry._patched == set(seams.HOOKS)
    seams.verify()
    assert arguments().check_server_args() == "checked"


def test_registering_twice_changes_nothing(engine: fake_sglang.Engine) -> None:
    take_hold()
    take_hold()
    assert [len(hooks) for hooks in fake_sglang.HookRegistry._hooks.values()] == [1] * len(
        seams.HOOKS
    )


@pytest.mark.parametrize("target", sorted(seams.HOOKS))
def test_a_patch_that_the_engine_swallowed_stops_every_start(
    engine: fake_sglang.Engine, target: str
) -> None:
    owner, name = fake_sglang._owner(target)
    original = getattr(owner, name)
    take_hold()
    fake_sglang.HookRegistry._patched.discard(target)
    stop_all(target)
    fake_sglang.HookRegistry._patched.add(target)
    setattr(owner, name, original)
    stop_all(target)


def stop_all(target: str) -> None:
    """Every hook but the missing one refuses."""
    starts = {
        "check_server_args": lambda: arguments().check_server_args(),
        "load_model": lambda: runner().load_model(),
    }
    for name, start in starts.items():
        if not target.endswith(name):
            with pytest.raises(hal.Unsupported, match=target.rpartition(".")[2]):
                start()


def test_a_hook_that_another_plugin_replaced_is_refused_one_it_wraps_is_not(
    engine: fake_sglang.Engine,
) -> None:
    take_hold()
    registry = module("layers.attention.attention_registry")
    ours = registry.attn_backend_wrapper
    registry.attn_backend_wrapper = fake_sglang._around(ours, lambda f, *rest: f(*rest))
    seams.verify()
    registry.attn_backend_wrapper = lambda runner, full: "theirs"
    with pytest.raises(hal.Unsupported, match="attn_backend_wrapper"):
        seams.verify()


@pytest.mark.parametrize("gone", ["plugins.hook_registry", "server_args", "configs.hybrid_arch"])
def test_a_plugin_that_fails_leaves_an_engine_that_cannot_start(
    engine: fake_sglang.Engine, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    start, load = arguments(), runner()
    held = module(gone)
    monkeypatch.setitem(sys.modules, fake_sglang.RUNTIME + gone, None)
    if gone == "plugins.hook_registry":
        with pytest.raises(hal.Unsupported, match="hook_registry"):
            plugin.register()
        for each in (start.check_server_args, load.load_model):
            with pytest.raises(hal.Unsupported, match="hook_registry"):
                each()
    else:
        take_hold()
        with pytest.raises((hal.Unsupported, ImportError)):
            load.load_model()
        monkeypatch.setitem(sys.modules, fake_sglang.RUNTIME + gone, held)
    assert not load.loaded


def test_an_attribute_that_moved_is_refused_by_its_path(engine: fake_sglang.Engine) -> None:
    with pytest.raises(hal.Unsupported, match=r"sglang\.srt\.server_args\.Gone"):
        seams.find("sglang.srt.server_args.Gone")
    with pytest.raises(hal.Unsupported, match=r"absent\.module"):
        seams.find("absent.module")


# The model


def test_a_served_model_is_announced_before_its_weights(engine: fake_sglang.Engine) -> None:
    take_hold()
    started = runner()
    started.fill = lambda model: engine.lines.append("weights")
    backend = started.start(slots=4)
    line, weights = engine.lines
    assert line.startswith("hal: 3 Gated DeltaNet layers of qwen3_5_text on cpu are served by cpu")
    assert weights == "weights"
    assert not engine.stock
    assert (backend.full_attn_backend, backend.full_attn_layers) == ("full", [3])
    report = hal_sglang.report()[-1]
    assert report["layers"] == dict.fromkeys(range(3), "gated_delta_net")
    assert report["engine"] == "SGLang"


@pytest.mark.parametrize("config", [GDN_CONFIG, LFM2_CONFIG], ids=["gdn", "short_conv"])
def test_the_pool_has_the_shapes_and_dtypes_of_the_plan(
    engine: fake_sglang.Engine, config: dict[str, object]
) -> None:
    take_hold()
    started = runner(config)
    started.start(slots=4)
    index = min(started.req_to_token_pool.layers)
    plan = {spec.name: spec for spec in hal.select("cpu", config).states if spec.layer == index}
    cache = started.req_to_token_pool.mamba2_layer_cache(index)
    for name, tensor in (("conv", cache.conv[0]), ("recurrent", cache.temporal)):
        if name in plan:
            assert tuple(tensor.shape[1:]) == plan[name].shape
            assert tensor.dtype == getattr(torch, plan[name].dtype)
    assert ("recurrent" in plan) == (cache.temporal.numel() > 0)


def test_a_pool_of_other_layers_or_sizes_is_an_error(engine: fake_sglang.Engine) -> None:
    take_hold()
    started = runner()
    params = started.server_args.config.mamba2_cache_params
    started.start(slots=2)
    session = seams._SERVED[started]
    shape = fake_sglang.Shape(params.shape.conv, (4, 8, 8))
    for wrong, text in (
        (fake_sglang.Params(params.shape, params.dtype, [0, 1]), "states of layers"),
        (fake_sglang.Params(shape, params.dtype, params.layers), "recurrent state"),
        (
            fake_sglang.Params(
                fake_sglang.Shape([(7, 3)], params.shape.temporal), params.dtype, params.layers
            ),
            "conv channels",
        ),
    ):
        with pytest.raises(HalError, match=text):
            planned(wrong, session)


def test_a_model_with_a_layer_of_another_class_is_refused_before_its_weights(
    engine: fake_sglang.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = type("OtherAttention", (fake_sglang.RadixLinearAttention,), {})
    monkeypatch.setattr(fake_sglang, "RadixLinearAttention", other)
    take_hold()
    started = runner()
    with pytest.raises(hal.Unsupported, match="3 Gated DeltaNet layers"):
        started.load_model()
    assert not started.loaded


def test_a_layer_that_the_config_has_as_something_else_is_an_error(
    engine: fake_sglang.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = type("RadixLinearAttention", (fake_sglang.Lfm2ShortConv,), {"layer_id": 0})
    monkeypatch.setattr(fake_sglang, "Lfm2ShortConv", other)
    take_hold()
    with pytest.raises(HalError, match="layer 0 is Gated DeltaNet in SGLang, short-conv"):
        runner(LFM2_CONFIG).load_model()


def test_nothing_is_loaded_where_the_device_itself_refuses(
    engine: fake_sglang.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_hold()
    started = runner()
    monkeypatch.setattr(type(started), "device", "npu")
    with pytest.raises(hal.Unsupported, match="npu"):
        started.load_model()
    assert not started.loaded
    assert started.model is None


def test_a_model_without_linear_layers_stays_the_engines(
    engine: fake_sglang.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_sglang.Config, "hybrid", False)
    take_hold()
    started = runner(LLAMA)
    arguments(LLAMA).check_server_args()
    loader = module("model_loader.loader")
    monkeypatch.setattr(
        loader,
        "_initialize_model",
        fake_sglang._around(lambda *given: torch.nn.Module(), seams.build_model),
    )
    started.load_model()
    registry = module("layers.attention.attention_registry")
    assert registry.attn_backend_wrapper(started, "full") == "stock backend"
    assert started.loaded
    assert not engine.lines


def test_a_runner_that_went_past_the_question_gets_no_backend(engine: fake_sglang.Engine) -> None:
    take_hold()
    registry, loader = module("layers.attention.attention_registry"), module("model_loader.loader")
    with pytest.raises(HalError, match="was not asked about"):
        registry.attn_backend_wrapper(runner(), "full")
    with pytest.raises(HalError, match="before hal was asked"):
        loader._initialize_model(runner().model_config, "load config")
    assert not engine.stock


def test_a_loader_that_builds_its_model_elsewhere_gets_no_backend(
    engine: fake_sglang.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_hold()
    started = runner()
    stock = fake_sglang.initialize_model
    monkeypatch.setattr(
        type(started),
        "load_model",
        fake_sglang._around(
            lambda runner: stock(runner.model_config, ""),
            seams.load_model,
        ),
    )
    started.load_model()
    with pytest.raises(HalError, match="past the seam"):
        module("layers.attention.attention_registry").attn_backend_wrapper(started, "full")


# The question


CHANGES: dict[str, dict[str, object]] = {
    "speculative decoding": {"speculative_algorithm": "NGRAM"},
    "graphs": {"disable_cuda_graph": False},
    "torch.compile": {"enable_torch_compile": True},
    "states tracked inside a step": {"mamba_radix_cache_strategy": "extra_buffer_lazy"},
    "pipeline parallelism": {"pp_size": 2},
    "context parallelism": {"dcp_size": 2},
    "data-parallel attention": {"enable_dp_attention": True},
    "micro-batching": {"enable_two_batch_overlap": True},
    "state transfer between engines": {"disaggregation_mode": "prefill"},
    "state tiers": {"enable_hierarchical_cache": True},
    "LoRA adapters": {"lora_paths": ["a"]},
    "ReplaySSM": {"enable_linear_replayssm_spec": True},
    "multi-item scoring": {"enable_mis": True},
}


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_a_way_to_run_that_is_not_served_is_refused_by_name(feature: Any) -> None:
    assert decided(asked(), judged) is not None
    with pytest.raises(hal.Unsupported, match=feature.name) as refused:
        decided(asked(**CHANGES[feature.name]), judged)
    assert [reason.code for reason in refused.value.reasons] == [Code.MODE_UNSUPPORTED]
    assert refused.value.refusal.fix() == feature.fix


@pytest.mark.parametrize("family", ["mamba2", "kimi_linear", "falcon_h1", "zaya", "jamba"])
def test_a_model_with_another_kind_of_layer_is_refused_before_anything_is_built(
    engine: fake_sglang.Engine, family: str
) -> None:
    take_hold()
    with pytest.raises(hal.Unsupported, match="in SGLang") as refused:
        arguments(tiny(family)).check_server_args()
    assert Code.MODE_UNSUPPORTED in {reason.code for reason in refused.value.reasons}


@pytest.mark.parametrize("device", ["npu", "rocm", "xpu", "musa"])
def test_a_pair_without_a_provider_is_refused_by_manifests_alone(device: str) -> None:
    place = Ask(
        fake_sglang.Config(LFM2_CONFIG),
        torch.bfloat16,
        SimpleNamespace(**fake_sglang.FLAGS),
        True,
        device,
    )
    answer = hal.explain(device, LFM2_CONFIG, dtype="bfloat16")
    if answer.fits:
        assert decided(place, judged) is not None
        return
    with pytest.raises(hal.Unsupported, match=device):
        decided(place, judged)


def test_the_engines_state_dtypes_are_asked_of_the_provider() -> None:
    with pytest.raises(hal.Unsupported) as refused:
        decided(asked(mamba_ssm_dtype="bfloat16"), judged)
    assert Code.DTYPE_UNSUPPORTED in {reason.code for reason in refused.value.reasons}
    values = {question.STATE_DTYPE: "float16", question.CONV_DTYPE: "bfloat16"}
    assert question.options(asked(), values).state_dtype == "float16"
    assert question.options(asked(mamba_ssm_dtype="float32"), values).state_dtype == "float32"
    (reason,) = question.unserved(asked(), values)
    assert (reason.code, reason.offered) == (Code.DTYPE_UNSUPPORTED, "float32")
    assert not list(question.unserved(asked(), {question.CONV_DTYPE: "float32"}))


def test_a_part_of_a_parallel_group_has_its_part_of_the_states() -> None:
    whole = decided(asked(), judged)
    flags = SimpleNamespace(**fake_sglang.FLAGS)
    half = decided(
        Ask(fake_sglang.Config(GDN_CONFIG), torch.float32, flags, True, "cpu", 1, 2), judged
    )
    assert whole is not None
    assert half is not None
    assert 2 * half.slot_bytes == whole.slot_bytes


def test_what_neither_side_has_states_for_is_left_alone_what_one_side_has_is_not() -> None:
    assert decided(asked(LLAMA, hybrid=False), judged) is None
    with pytest.raises(hal.Unsupported, match="llama"):
        decided(asked(LLAMA), judged)
    assert decided(asked({"model_type": "qwen3_next"}, hybrid=False), judged) is None
    with pytest.raises(ConfigError):
        decided(asked({"model_type": "qwen3_next"}), judged)


def test_the_question_of_a_process_names_its_device(
    engine: fake_sglang.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = runner()
    assert ask.of_runner(started).device == "cpu"
    monkeypatch.setattr(type(started), "device", "cuda")
    monkeypatch.setattr(type(started), "gpu_id", 3)
    assert ask.of_runner(started).device == "cuda:3"
    assert ask.of_arguments(arguments(device="cuda", tp_size=2)).size == 2
    monkeypatch.setattr("torch.version.hip", "6.4")
    assert ask.of_runner(started).device == "rocm:3"
    assert ask.device_name("npu") == "npu"


def test_judging_asks_manifests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hal.binding.construct", lambda *given: pytest.fail("a provider was built"))
    assert judged("cpu", GDN_CONFIG, Options(dtype="float32")).dtype == "float32"


def test_importing_the_package_imports_neither_torch_nor_the_engine() -> None:
    from support.registry import run_python

    code = (
        "import hal_sglang, hal_sglang.plugin, hal_sglang.versions, sys;"
        "print({'torch', 'sglang'} & set(sys.modules))"
    )
    ran = run_python(code)
    assert ran.stdout == "set()\n", ran.stderr
