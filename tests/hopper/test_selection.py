"""The Hopper provider wins prefill where it fits; the shared kernels serve everything else."""

from pathlib import Path

import pytest
import torch

import hal
from hal_cuda.hopper import nvrtc
from hal_cuda.hopper.plugin import MANIFEST, OFFERS
from hal_cuda.hopper.probe import presence
from hal_cuda.plugin import MANIFEST as TRITON
from hal_registry import Presence, Reason, Registry, load
from support.registry import run_python

REAL = Path(__file__).parents[1] / "data" / "configs" / "real"
BOTH = Registry.of(TRITON, MANIFEST)
QWEN = "qwen3-next-80b-a3b"


def explained(name: str = QWEN, device: str = "cuda:sm_90", **options: object) -> hal.Explanation:
    return hal.explain(device, REAL / f"{name}.json", registry=BOTH, **options)


def chosen(answer: hal.Explanation) -> dict[str, str]:
    assert answer.selection is not None, answer
    return {op: choice.provider for op, choice in answer.selection.choices.items()}


def test_prefill_is_the_specialists_and_the_rest_is_shared() -> None:
    found = chosen(explained(dtype="bfloat16"))
    special = {op for op, name in found.items() if name == "cuda.hopper"}
    assert "delta_rule.prefill" in special
    assert special <= set(OFFERS)
    assert found["delta_rule.decode"] == found["conv.prefill"] == "cuda.triton"


def test_both_share_the_state() -> None:
    answer = explained(dtype="bfloat16")
    assert answer.selection is not None
    assert answer.selection.layouts["recurrent"] == "VK"


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_dtypes_are_shared(dtype: str) -> None:
    assert set(chosen(explained(dtype=dtype)).values()) == {"cuda.triton"}


@pytest.mark.parametrize("config", ["lfm2-350m"])
def test_a_model_without_the_delta_rule_is_shared(config: str) -> None:
    assert set(chosen(explained(config)).values()) == {"cuda.triton"}


@pytest.mark.parametrize("field", ["linear_key_head_dim", "linear_value_head_dim"])
def test_other_head_dims_are_shared(field: str) -> None:
    import json

    config = json.loads((REAL / f"{QWEN}.json").read_text()) | {field: 64}
    answer = hal.explain("cuda:sm_90", config, dtype="bfloat16", registry=BOTH)
    assert chosen(answer)["delta_rule.prefill"] == "cuda.triton"


@pytest.mark.parametrize("key", ["delta_rule", "delta_rule.prefill"])
def test_an_override_takes_the_shared_kernels(key: str) -> None:
    answer = explained(dtype="bfloat16", providers={key: "cuda.triton"})
    assert chosen(answer)["delta_rule.prefill"] == "cuda.triton"


def test_an_override_of_one_operation_takes_the_specialist() -> None:
    answer = explained(dtype="bfloat16", providers={"delta_rule.prefill": "cuda.hopper"})
    assert chosen(answer)["delta_rule.prefill"] == "cuda.hopper"


def test_an_override_that_cannot_hold_is_refused() -> None:
    answer = explained(dtype="float16", providers={"delta_rule.prefill": "cuda.hopper"})
    assert not answer.fits
    assert "cuda.hopper" in str(answer)


def test_prefixes_are_tracked_where_the_chunks_allow() -> None:
    found = chosen(explained(dtype="bfloat16", prefix_cache=64))
    assert found["delta_rule.prefill"] == "cuda.hopper"


def test_the_ranks_of_tensor_parallelism_take_it_too() -> None:
    answer = explained(dtype="bfloat16", tp=hal.Shard(rank=1, size=4))
    assert chosen(answer)["delta_rule.prefill"] == "cuda.hopper"


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_100", "sm_120"])
def test_no_other_arch_takes_it(arch: str) -> None:
    answer = explained(device=f"cuda:{arch}", dtype="bfloat16")
    assert not answer.fits
    alone = hal.explain(f"cuda:{arch}", REAL / f"{QWEN}.json", registry=Registry.of(MANIFEST))
    assert "arch-unsupported" in str(alone.refusal.to_dict() if alone.refusal else alone)


def test_the_manifest_imports_nothing_heavy() -> None:
    heavy = ("torch", "triton", "ctypes.util")
    code = f"import hal_cuda.hopper.plugin, sys; print([m for m in {heavy!r} if m in sys.modules])"
    assert run_python(code).stdout == "[]\n"


def test_every_offer_has_a_proof_with_its_report() -> None:
    assert {(p.operation, p.dtype) for p in MANIFEST.proofs} == {
        (op, dtype) for op, offer in OFFERS.items() for dtype in offer.dtypes
    }
    assert all(p.level == "hardware" and p.report.startswith("docs/reports/")
               for p in MANIFEST.proofs)  # fmt: skip


def test_what_is_offered_can_be_loaded() -> None:
    pytest.importorskip("triton")
    for path in (MANIFEST.load, MANIFEST.probe):
        assert callable(load(path))


def test_a_provider_takes_one_layout_and_one_kind_of_device() -> None:
    pytest.importorskip("triton")
    made = load(MANIFEST.load)
    for device, layouts in (("cpu", {}), ("cuda:0", {"recurrent": "KV"})):
        with pytest.raises(ValueError, match=r"cuda\.hopper: "):
            made(device, {"layouts": layouts})
    with pytest.raises(TypeError, match="expected a mapping"):
        made("cuda:0", {"layouts": "VK"})


HOPPER = Presence(1, "sm_90", "a device")


@pytest.mark.parametrize("there", [Presence(0, detail="none"), Presence(2, "sm_120"), HOPPER])
@pytest.mark.parametrize("compiler", [None, Path("libnvrtc.so.13")])
def test_the_probe_asks_for_a_compiler_where_the_device_fits(
    there: Presence, compiler: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hal_cuda.probe.presence", lambda index: there)
    monkeypatch.setattr(nvrtc, "found", lambda: compiler)
    answer = presence(None)
    if there is HOPPER and compiler is None:
        assert isinstance(answer, Reason)
        assert answer.code == "library-missing" and "nvidia-cuda-nvrtc" in answer.fix
    else:
        assert answer is there


def test_without_a_device_the_probe_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    found = presence(None)
    assert isinstance(found, Presence) and found.count == 0
