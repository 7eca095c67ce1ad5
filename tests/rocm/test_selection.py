"""What the AMD provider serves and refuses, and how far it says that this is proved."""

from dataclasses import replace
from pathlib import Path

import pytest

import hal
from hal.options import Speculative
from hal.testing.plan import Plan
from hal_registry import Code, Registry
from hal_rocm.arches import ARCHES
from hal_rocm.plugin import HOST_ONLY, MANIFEST, check

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
REAL = CONFIGS / "real"
REGISTRY = Registry.of(MANIFEST)
SERVED = ("qwen3-next-80b-a3b", "qwen3.8-27b", "lfm2-350m")
MAMBA = "nemotron-nano-9b-v2"
KDA = "kimi-linear-48b-a3b"


def explained(name: str, device: str = "rocm:gfx942", **options: object) -> hal.Explanation:
    return hal.explain(device, REAL / f"{name}.json", registry=REGISTRY, **options)


def codes(answer: hal.Explanation) -> set[str]:
    assert answer.refusal is not None
    return {reason.code for reason in answer.refusal.all_reasons()}


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", SERVED)
def test_families_that_engines_serve_on_rocm_fit_on_every_arch(name: str, arch: str) -> None:
    for dtype in ("bfloat16", "float16", "float32"):
        assert explained(name, f"rocm:{arch}", dtype=dtype).fits


@pytest.mark.parametrize("arch", ARCHES)
def test_decaying_channels_are_refused_where_their_prefill_spills(arch: str) -> None:
    answer = explained(KDA, f"rocm:{arch}")
    assert answer.fits is (ARCHES[arch].unit == "mfma")
    if not answer.fits:
        assert codes(answer) == {Code.SHAPE_UNSUPPORTED}
        assert "float32, or gfx90a, gfx942, gfx950" in str(answer)
        assert explained(KDA, f"rocm:{arch}", dtype="float32").fits


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_chunked_scans_are_served_in_bfloat16_everywhere(dtype: str, arch: str) -> None:
    answer = explained(MAMBA, f"rocm:{arch}", dtype=dtype)
    assert answer.fits is (dtype == "bfloat16" or ARCHES[arch].unit == "mfma")
    if not answer.fits:
        assert codes(answer) == {Code.DTYPE_UNSUPPORTED}


@pytest.mark.parametrize("name", SERVED[:2])
@pytest.mark.parametrize("tree", [False, True])
def test_drafts_may_be_verified(name: str, tree: bool) -> None:
    assert explained(name, speculative=Speculative(4, tree)).fits


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("width", [8, 9, 16, 17])
def test_long_drafts_need_registers(width: int, arch: str) -> None:
    answer = explained(SERVED[0], f"rocm:{arch}", speculative=Speculative(width))
    assert answer.fits is (width <= (16 if ARCHES[arch].unit == "mfma" else 8))
    if not answer.fits:
        assert codes(answer) == {Code.MODE_UNSUPPORTED}


@pytest.mark.parametrize("name", SERVED)
def test_graphs_wait_for_the_hardware(name: str) -> None:
    assert codes(explained(name, graphs=True)) == {Code.MODE_UNSUPPORTED}


def test_nothing_claims_to_have_run_on_hardware() -> None:
    assert {proof.level for proof in MANIFEST.proofs} == {"interpreter", "compiled"}


def test_every_offer_is_interpreted_and_compiled_for_every_arch_if_it_launches() -> None:
    levels = {(p.operation, p.dtype, p.arch): p.level for p in MANIFEST.proofs}
    for operation, offer in MANIFEST.offers.items():
        for dtype in offer.dtypes:
            assert levels.get((operation, dtype, "")) == "interpreter"
            compiled = [levels.get((operation, dtype, arch)) for arch in ARCHES]
            assert set(compiled) == {None if operation in HOST_ONLY else "compiled"}


def test_answers_say_how_far_they_are_proved() -> None:
    answer = explained("qwen3-next-80b-a3b")
    assert answer.selection is not None
    assert {choice.proof for choice in answer.selection.choices.values()} == {"interpreter"}
    assert set(HOST_ONLY) < set(MANIFEST.offers)


@pytest.mark.parametrize("arch", ARCHES)
def test_the_kit_plans_for_an_arch_what_is_offered_there(arch: str) -> None:
    """On a device the kit runs no point that selection refuses on it."""
    plan = Plan.of(MANIFEST, arch)
    for trial in (*plan.trials, *plan.verify):
        assert not [*check(replace(trial.need, arch=arch))], str(trial)
    refused = {trial.operation for trial in plan.refused}
    large = {"delta_rule.prefill", "delta_rule.verify", "scan.prefill"}
    assert refused == (set() if ARCHES[arch].unit == "mfma" else large)
