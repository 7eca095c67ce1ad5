"""What `hal` answers about models on NPUs, by manifests alone, and what docs/npu.md says of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

import hal
from hal_npu.plugin import MANIFEST
from hal_registry import Code, Reason
from support.model_configs import CONFIGS

PAGE = (Path(__file__).parents[2] / "docs" / "npu.md").read_text()
PAIRS = re.findall(r"^\| \d \| .* \| (\w+ \w+(?: with speculation)?: .*) \|$", PAGE, re.MULTILINE)
LIFTED_BY_CONV_STATE = ("lfm2", "lfm2_moe", "lfm2_vl", "zaya")
SCANS = ("nemotron_h", "falcon_h1", "granitemoehybrid", "bamba", "mamba", "jamba", "minimax")
KDA = ("kimi_linear", "bailing_hybrid", "glm5_next")


def reasons(config: str, device: str = "npu", **options: object) -> tuple[Reason, ...]:
    """The reasons against a tiny config, none where it fits."""
    path = CONFIGS / "tiny" / f"{config}.json"
    given: object = str(path) if path.exists() else {"model_type": config}
    answer = hal.explain(device, given, dtype="bfloat16", **options)  # type: ignore[arg-type]
    return answer.refusal.all_reasons() if answer.refusal else ()


def test_the_page_has_eight_pairs_that_can_be_asked_and_one_that_cannot() -> None:
    assert len(PAIRS) == 8
    assert re.search(r"^\| 9 \| draft models .* \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_pair_of_the_page_is_answered_as_it_says(pair: str) -> None:
    question, _, answer = pair.partition(": ")
    device, config, *more = question.split()
    options: Mapping[str, object] = {"speculative": hal.Speculative(width=4)} if more else {}
    found = [f"{reason.code} {reason.subject}" for reason in reasons(config, device, **options)]
    assert answer in (found or ["fits"])


@pytest.mark.parametrize("config", LIFTED_BY_CONV_STATE)
def test_short_convolutions_are_refused_for_their_state_alone(config: str) -> None:
    (reason,) = reasons(config)
    assert (reason.code, reason.subject) == (Code.INTERFACE_MISSING, "conv_state")
    assert reason.fix == "install a provider for npu that offers conv_state"


def test_lfm3_lacks_the_state_and_the_width() -> None:
    found = {(reason.code, reason.subject) for reason in reasons("lfm3")}
    assert (Code.INTERFACE_MISSING, "conv_state") in found
    assert (Code.SHAPE_UNSUPPORTED, "conv.decode") in found


@pytest.mark.parametrize("config", SCANS)
def test_models_with_a_scan_are_refused_for_it_alone(config: str) -> None:
    assert {(r.code, r.subject) for r in reasons(config)} == {(Code.INTERFACE_MISSING, "scan")}


@pytest.mark.parametrize("config", KDA)
def test_channel_gates_lack_their_prefill_and_nothing_else(config: str) -> None:
    found = reasons(config)
    assert {reason.subject.split()[0] for reason in found} == {"delta_rule.prefill"}
    missing = next(reason for reason in found if reason.code is Code.OPERATION_MISSING)
    assert "chunk_kda_fwd" in missing.detail
    assert missing.fix.startswith("install a provider for npu that offers delta_rule.prefill")


@pytest.mark.parametrize("config", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_gated_delta_nets_fit_with_drafts_and_cached_prefixes(config: str) -> None:
    assert reasons(config, speculative=hal.Speculative(width=8), prefix_cache=True) == ()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speculative": hal.Speculative(width=4, tree=True)}, "verify tree"),
        ({"speculative": hal.Speculative(width=9)}, "verify width 9"),
        ({"graphs": True}, "feature graph"),
    ],
)
def test_what_was_not_shown_is_refused(options: dict[str, object], words: str) -> None:
    found = reasons("qwen3_next", **options)
    assert {reason.code for reason in found} == {Code.MODE_UNSUPPORTED}
    assert all(words in reason.needed for reason in found)


@pytest.mark.parametrize("arch", ["ascend910b", "ascend910_93"])
def test_arches_of_the_manifest_fit(arch: str) -> None:
    assert reasons("qwen3_next", f"npu:{arch}") == ()


@pytest.mark.parametrize("arch", ["ascend310p", "ascend950"])
def test_other_arches_are_refused(arch: str) -> None:
    assert {reason.code for reason in reasons("qwen3_next", f"npu:{arch}")} == {
        Code.ARCH_UNSUPPORTED
    }


def test_nothing_is_claimed_to_have_run_on_an_npu() -> None:
    assert {proof.level for proof in MANIFEST.proofs} == {"interpreter"}
    proved = {(proof.operation, proof.dtype) for proof in MANIFEST.proofs}
    assert proved == {(op, dtype) for op, o in MANIFEST.offers.items() for dtype in o.dtypes}


def test_the_proofs_are_those_of_the_page() -> None:
    """Every proof has a line in the table of results, under the date and versions it names."""
    (proof, *others) = MANIFEST.proofs
    assert {(p.date, p.versions, p.report) for p in others} == {
        (proof.date, proof.versions, "docs/npu.md")
    }
    assert f"On {proof.date}, sgl-kernel-npu 2026.08.21 (f425bdf1) with Triton 3.7.1" in PAGE
    lines = set(re.findall(r"^\| ([\w.]+) \| (\w+) \| \d+ \|", PAGE, re.MULTILINE))
    judged = {p for p in MANIFEST.proofs if not p.operation.endswith(".commit")}
    assert lines == {(p.operation, p.dtype) for p in judged}


def test_the_page_says_that_nothing_ran_on_hardware() -> None:
    assert "**Nothing of\nit has run on an NPU so far.**" in PAGE
    assert re.search(r"^\| hardware \| `make conformance PROVIDER=npu.ascend`.* \| never \|$",
                     PAGE, re.MULTILINE)  # fmt: skip


def test_limits_of_the_page_are_the_kits() -> None:
    from hal.testing.metric import LIMITS

    rows = re.findall(
        r"^\| ([\w.]+) \| (\w+) \| \d+ \| (\S+) \| (\S+) \| (\S+) \| (\S+) \|$", PAGE, re.MULTILINE
    )
    assert rows
    for operation, dtype, result, limit, state, held in rows:
        chunked = operation in ("delta_rule.prefill", "delta_rule.verify")
        out, kept = LIMITS[dtype, "chunked" if chunked else "one rounding"]
        assert float(result) <= float(limit) == out
        assert state == held == "exact" or float(state) <= float(held) == kept
