"""Manifests say only what can be meant; each wrong field is named with what it expects."""

import copy
import dataclasses
import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal_registry import (
    API,
    OPERATIONS,
    Code,
    Manifest,
    ManifestError,
    Offer,
    Proof,
    Reason,
    Requirement,
)
from packaging import requirements
from support.registry import manifest, offers

GOOD: dict[str, Any] = {
    "name": "cuda.x",
    "device": "cuda",
    "api": API,
    "load": "module:name",
    "offers": {},
}

DEVICE = "expected a device type such as 'cuda'"

BAD = {
    "name-other-device": ({"name": "npu.x"}, "name: expected 'cuda.<flavour>', got 'npu.x'"),
    "name-without-flavour": ({"name": "cuda."}, "name: expected 'cuda.<flavour>', got 'cuda.'"),
    "name-type": ({"name": 3}, "name: expected text, got 3"),
    "device": ({"device": "no device"}, f"device: {DEVICE}, got 'no device'"),
    "device-type": ({"device": None}, f"device: {DEVICE}, got None"),
    "device-capital": ({"device": "Cuda", "name": "Cuda.x"}, f"device: {DEVICE}, got 'Cuda'"),
    "device-accent": ({"device": "\u00e9vil", "name": "\u00e9vil.x"}, f"device: {DEVICE}, got"),
    "device-underscore": ({"device": "_evil", "name": "_evil.x"}, f"device: {DEVICE}, got '_evil'"),
    "device-digits": ({"device": "x\u0663", "name": "x\u0663.x"}, f"device: {DEVICE}, got"),
    "device-long": ({"device": "x" * 41, "name": "x" * 41 + ".x"}, f"device: {DEVICE}, got"),
    "api": ({"api": 1}, "api: expected (major, minor), got 1"),
    "api-text": ({"api": ("1", "0")}, "api: expected (major, minor), got ('1', '0')"),
    "load": ({"load": "module"}, "load: expected 'module:name', got 'module'"),
    "load-empty": ({"load": ""}, "load: expected 'module:name', got ''"),
    "load-half": ({"load": "module:"}, "load: expected 'module:name', got 'module:'"),
    "load-thrice": ({"load": "a:b:c"}, "load: expected 'module:name', got 'a:b:c'"),
    "probe": ({"probe": "module"}, "probe: expected 'module:name' or nothing, got 'module'"),
    "needs-bare": ({"needs": "torch"}, "needs: expected a tuple of version requirements"),
    "needs": ({"needs": ("torch >",)}, "needs: expected a tuple of version requirements"),
    **{
        f"needs-{number}": ({"needs": (text,)}, "needs: expected a tuple of version requirements")
        for number, text in enumerate(
            ("torch>=2.*", "torch>=2;garbage", "torch==1.0.0.foo", "-torch", "torch~=2", "", "a b")
        )
    },
    "needs-type": ({"needs": (3,)}, "needs: expected a tuple of version requirements"),
    "hints": ({"hints": ("a",)}, "hints: expected texts by library, got ('a',)"),
    "hints-value": ({"hints": {"a": 1}}, "hints: expected texts by library, got {'a': 1}"),
    "arches": ({"arches": "sm_90"}, "arches: expected a tuple of names such as 'sm_90', got"),
    "arches-form": ({"arches": ("SM 90",)}, "arches: expected a tuple of names such as 'sm_90'"),
    "priority": ({"priority": -1}, "priority: expected an integer from 0 up, got -1"),
    "priority-type": ({"priority": "high"}, "priority: expected an integer from 0 up, got 'high'"),
    "note": ({"note": None}, "note: expected text, got None"),
    "check": ({"check": "yes"}, "check: expected a function or nothing, got 'yes'"),
    "proofs": ({"proofs": ("hardware",)}, "proofs: expected a tuple of Proof, got ('hardware',)"),
    "proof-not-offered": (
        {"proofs": (Proof("conv.decode", "float32", "compiled"),)},
        "proofs: expected an offered operation, got 'conv.decode'",
    ),
    "offers": ({"offers": ["conv"]}, "offers: expected offers by operation, got ['conv']"),
    "offers-operation": ({"offers": {"conv": Offer()}}, "offers: expected one of conv.prefill, "),
    "offers-value": (
        {"offers": {"conv.decode": {}}},
        "offers: conv.decode: expected an Offer, got {}",
    ),
}


@pytest.mark.parametrize("kind", sorted(BAD))
def test_a_malformed_field_is_named_with_what_it_expects(kind: str) -> None:
    change, text = BAD[kind]
    with pytest.raises(ManifestError) as caught:
        Manifest(**{**GOOD, **change})
    assert str(caught.value).startswith(f"{change.get('name', 'cuda.x')}: {text}")


def test_every_field_has_a_malformed_example() -> None:
    tried = {name for change, _ in BAD.values() for name in change}
    assert tried == {field.name for field in dataclasses.fields(Manifest)}


WORDS = ("dtypes", "state_dtypes", "layouts", "gates", "kinds", "activations", "verify", "features")
NUMBERS = ("head_dims", "ratios", "widths", "state_sizes", "verify_widths", "track")


@pytest.mark.parametrize("name", WORDS)
def test_an_unknown_word_in_an_offer_is_an_error_that_lists_the_known(name: str) -> None:
    with pytest.raises(ManifestError, match=f"conv.decode: {name}: expected one of .*'bogus'"):
        manifest("cuda.x", "conv.decode", offer=Offer(**{name: ("bogus",)}))


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["4", 2.0, -1, True])
def test_numbers_in_an_offer_are_integers(name: str, value: object) -> None:
    with pytest.raises(ManifestError, match=f"conv.decode: {name}: expected integers, got"):
        manifest("cuda.x", "conv.decode", offer=Offer(**{name: (value,)}))


@pytest.mark.parametrize("name", [*WORDS, *NUMBERS, "arches"])
@pytest.mark.parametrize("value", ["silu", 4, None, True, {"a": 1}])
def test_an_offer_holds_collections_never_single_values(name: str, value: object) -> None:
    with pytest.raises(ManifestError, match=f"{name}: expected a set, tuple or range"):
        manifest("cuda.x", "conv.decode", offer=Offer(**{name: value}))


def test_every_field_of_an_offer_is_checked() -> None:
    assert {field.name for field in dataclasses.fields(Offer)} == {*WORDS, *NUMBERS, "arches"}


def test_only_head_dims_may_be_pairs() -> None:
    manifest("cuda.x", "scan.decode", offer=Offer(head_dims={(64, 96)}))
    with pytest.raises(ManifestError, match=r"widths: expected integers, got \(3, 4\)"):
        manifest("cuda.x", "scan.decode", offer=Offer(widths={(3, 4)}))


def test_a_proof_has_a_known_level() -> None:
    proof = Proof("conv.decode", "float32", "hoped")  # type: ignore[arg-type]
    with pytest.raises(ManifestError, match="expected one of hardware, interpreter, compiled"):
        manifest("cuda.x", "conv", proofs=(proof,))


TOLD = {"date": "2026-11-29", "versions": "torch 2.13", "report": "reports/x.json"}


@pytest.mark.parametrize("name", TOLD)
@pytest.mark.parametrize("value", ["", None, 3])
def test_a_proof_by_hardware_says_when_with_what_and_where(name: str, value: Any) -> None:
    manifest("cuda.x", "conv", proofs=(Proof("conv.decode", "float32", "hardware", **TOLD),))
    proof = Proof("conv.decode", "float32", "hardware", **{**TOLD, name: value})
    with pytest.raises(ManifestError, match=r"conv\.decode: expected date, versions and report"):
        manifest("cuda.x", "conv", proofs=(proof,))


def test_a_proof_of_another_level_may_say_less() -> None:
    for level in ("interpreter", "compiled"):
        manifest("cuda.x", "conv", proofs=(Proof("conv.decode", "float32", level),))


def needs_of(text: str) -> bool:
    try:
        Manifest(**{**GOOD, "needs": (text,)})
    except ManifestError:
        return False
    return True


NEED_PARTS = ["torch", "a-b", "A_b", ">=", "==", "~=", "===", "<", "2", "2.1", "2.*", "1.0.0.foo",
              ",", ";", " ", "[x]", "python_version", "'3'",
              "extra", "@", "*", "!", "+cu12"]  # fmt: skip


@given(st.lists(st.sampled_from(NEED_PARTS), min_size=1, max_size=7).map("".join))
def test_a_need_is_taken_exactly_when_packaging_can_judge_it(text: str) -> None:
    try:
        marker = requirements.Requirement(text).marker
        good = marker is None or marker.evaluate() is not None
    except ValueError:
        good = False
    assert needs_of(text) == good


def test_a_range_is_as_good_as_its_ends() -> None:
    manifest("cuda.x", "conv", offer=Offer(widths=range(1, 10**15)))
    for bad in (range(-1, 3), range(3, -2, -1)):
        with pytest.raises(ManifestError, match="widths: expected integers"):
            manifest("cuda.x", "conv", offer=Offer(widths=bad))


def an_own_rule(need: Requirement) -> list[Reason]:
    return []


def test_a_manifest_crosses_a_process_whole() -> None:
    made = manifest("cuda.x", "conv", hints={"a": "b"}, check=an_own_rule, priority=3)
    for again in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made), copy.copy(made)):
        assert again == made
        assert again.digest() == made.digest()
        assert again.check is an_own_rule
        with pytest.raises(TypeError):
            again.offers["scan.decode"] = Offer()  # type: ignore[index]


def test_a_manifest_cannot_be_changed_through_what_it_was_made_of() -> None:
    offered, hints = offers("conv"), {"a": "b"}
    made = Manifest(**{**GOOD, "offers": offered, "hints": hints})
    offered.clear()
    hints.clear()
    assert set(made.offers) == {op for op in OPERATIONS if op.startswith("conv.")}
    assert made.hints == {"a": "b"}
    with pytest.raises(TypeError):
        made.offers["scan.decode"] = Offer()  # type: ignore[index]


def test_interfaces_are_those_with_an_offer() -> None:
    assert manifest("cuda.x", "scan.decode", "conv").interfaces == ("conv", "scan")


def test_the_declaration_is_plain_data() -> None:
    made = manifest("cuda.x", "scan.decode", offer=Offer(widths=range(2, 5), dtypes={"float32"}))
    plain = json.loads(json.dumps(made.to_dict()))
    assert plain["offers"]["scan.decode"]["widths"] == {"first": 2, "last": 4, "step": 1}
    assert plain["offers"]["scan.decode"]["dtypes"] == ["float32"]


def test_the_digest_follows_the_declaration_and_nothing_else() -> None:
    made = manifest("cuda.x", "conv", offer=Offer(gates={"safe", "scalar", "channel"}))
    again = manifest("cuda.x", "conv", offer=Offer(gates={"channel", "scalar", "safe"}))
    assert made.digest() == again.digest()
    proof = Proof("conv.decode", "float32", "hardware", **TOLD)
    assert dataclasses.replace(made, proofs=(proof,)).digest() == made.digest()
    assert dataclasses.replace(made, priority=1).digest() != made.digest()
    narrow = manifest("cuda.x", "conv", offer=Offer(gates={"safe"}))
    assert narrow.digest() != made.digest()


@pytest.mark.parametrize("name", ["subject", "needed", "offered", "detail", "fix"])
@pytest.mark.parametrize("value", [None, 3, ["text"], b"text"])
def test_a_reason_is_made_of_text(name: str, value: Any) -> None:
    good: dict[str, Any] = {
        "code": Code.MODE_UNSUPPORTED,
        "subject": "",
        "needed": "",
        "offered": "",
    }
    Reason(**good)
    with pytest.raises(TypeError, match=f"{name} of a Reason: expected text"):
        Reason(**{**good, name: value})
    with pytest.raises(ValueError, match="is not a valid Code"):
        Reason(**{**good, "code": value})


def test_reasons_and_requirements_are_values() -> None:
    need = Requirement("conv.decode", "3 layers", dtype="float32")
    assert need == dataclasses.replace(need)
    assert len({need, dataclasses.replace(need, width=4)}) == 2
    assert [field.name for field in dataclasses.fields(Reason)] == [
        "code",
        "subject",
        "needed",
        "offered",
        "detail",
        "fix",
    ]
