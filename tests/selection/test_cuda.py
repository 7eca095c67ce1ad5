"""What the NVIDIA provider serves, refuses, and says where its device is not."""

from pathlib import Path

import pytest
import torch

import hal
from hal.options import Speculative
from hal_cuda.plugin import MANIFEST
from hal_cuda.probe import presence
from hal_registry import Presence, Registry

REAL = Path(__file__).parents[1] / "data" / "configs" / "real"
SERVED = ("qwen3-next-80b-a3b", "qwen3.8-27b", "lfm2-350m")
REGISTRY = Registry.of(MANIFEST)


def explained(name: str, device: str = "cuda:sm_90", **options: object) -> hal.Explanation:
    return hal.explain(device, REAL / f"{name}.json", registry=REGISTRY, **options)


def codes(answer: hal.Explanation) -> set[str]:
    assert answer.refusal is not None
    groups = answer.refusal.to_dict()["candidates"]
    assert isinstance(groups, list)
    return {reason["code"] for group in groups for reason in group["reasons"]}


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


@pytest.mark.parametrize("name", SERVED)
def test_speculation_is_refused(name: str) -> None:
    answer = explained(name, speculative=Speculative(4))
    assert codes(answer) == {"operation-missing"}


def test_gates_that_decay_by_channel_are_refused_for_prefill_alone() -> None:
    answer = explained("kimi-linear-48b-a3b")
    assert codes(answer) == {"shape-unsupported"}
    assert "delta_rule.decode" not in str(answer)


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
