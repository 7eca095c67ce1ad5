"""What the NVIDIA provider serves, refuses, and says where its device is not."""

from pathlib import Path

import pytest
import torch

import hal
from hal.options import Speculative
from hal_cuda.hopper.plugin import MANIFEST as HOPPER
from hal_cuda.plugin import MANIFEST
from hal_cuda.probe import presence
from hal_registry import Presence, Registry

REAL = Path(__file__).parents[1] / "data" / "configs" / "real"
SERVED = (
    "qwen3-next-80b-a3b",
    "qwen3.8-27b",
    "lfm2-350m",
    "kimi-linear-48b-a3b",
    "bamba-9b",
    "falcon-h1-1.5b",
    "nemotron-nano-9b-v2",
    "mamba-130m-hf",
)
REGISTRY = Registry.of(MANIFEST)


def explained(name: str, device: str = "cuda:sm_90", **options: object) -> hal.Explanation:
    return hal.explain(device, REAL / f"{name}.json", registry=REGISTRY, **options)


def codes(answer: hal.Explanation) -> set[str]:
    assert answer.refusal is not None
    groups = answer.refusal.to_dict()["candidates"]
    assert isinstance(groups, list)
    return {reason["code"] for group in groups for reason in group["reasons"]}


def test_hopper_takes_the_prefill_of_the_heads_it_was_made_for() -> None:
    both = Registry.of(MANIFEST, HOPPER)

    def prefill(name: str, **options: object) -> str:
        found = hal.explain("cuda:sm_90", REAL / f"{name}.json", registry=both, **options)
        assert found.selection is not None
        return found.selection.choices["delta_rule.prefill"].provider

    assert prefill("qwen3-next-80b-a3b") == "cuda.hopper"
    assert prefill("qwen3-next-80b-a3b", dtype="float32") == "cuda.triton"
    assert prefill("kimi-linear-48b-a3b") == "cuda.hopper"
    asked = {"delta_rule.prefill": "cuda.triton", "delta_rule.prefill_fused": "cuda.triton"}
    assert prefill("qwen3-next-80b-a3b", providers=asked) == "cuda.triton"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", SERVED)
def test_models_whose_operations_are_proved_fit(name: str, dtype: str) -> None:
    assert explained(name, dtype=dtype).fits


@pytest.mark.parametrize("name", SERVED)
def test_decode_may_be_captured(name: str) -> None:
    assert explained(name, graphs=True).fits


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_100", "sm_120"])
def test_an_arch_that_nothing_ran_on_is_refused(arch: str) -> None:
    assert codes(explained("qwen3-next-80b-a3b", f"cuda:{arch}")) == {"arch-unsupported"}


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("name", SERVED)
def test_drafts_fit_up_to_the_width_that_was_proved(name: str, tree: bool) -> None:
    assert explained(name, speculative=Speculative(16, tree=tree), graphs=True).fits
    assert codes(explained(name, speculative=Speculative(17, tree=tree))) == {"mode-unsupported"}


def test_a_convolution_of_two_stages_takes_windows_that_are_no_ring() -> None:
    assert explained("zaya1-8b-original").fits


@pytest.mark.parametrize(("grid", "fits"), [(True, True), (64, True), (128, True), (16, False)])
def test_prefixes_are_tracked_at_multiples_of_a_chunk(grid: int | bool, fits: bool) -> None:
    assert explained("qwen3-next-80b-a3b", prefix_cache=grid).fits is fits


def test_a_selection_without_a_device_is_refused_and_not_an_error() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    with pytest.raises(hal.Unsupported, match=r"triton|cuda:0"):
        hal.select("cuda", REAL / "lfm2-350m.json", registry=REGISTRY)


@pytest.mark.parametrize("index", [None, 0, 99])
def test_the_probe_never_raises(index: int | None) -> None:
    found = presence(index)
    assert isinstance(found, Presence)
    assert found.count >= 0 and found.detail


def broken() -> bool:
    raise RuntimeError("driver is gone")


def test_a_broken_driver_is_an_absent_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", broken)
    assert presence(None) == Presence(0, detail="RuntimeError: driver is gone")


def test_torch_for_rocm_has_no_nvidia_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert presence(None).count == 0


def test_the_probe_names_the_arch_of_the_device_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", [(9, 0), (12, 0)].__getitem__)
    assert presence(None).arch == presence(0).arch == "sm_90"
    assert presence(1).arch == "sm_120"
    assert presence(2).arch == ""
    monkeypatch.delenv("HAL_TRITON_TABLE", raising=False)
    assert presence(0).notes == ()
    monkeypatch.setenv("HAL_TRITON_TABLE", "mine.json")
    assert presence(0).notes == (
        "HAL_TRITON_TABLE names mine.json, whose block sizes replace shipped ones",
    )
