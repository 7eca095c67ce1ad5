"""Every range that the manifest declares holds at its ends, and one beyond is refused by name."""

from typing import Any

import pytest
import torch

import hal
from hal.model.spec import GateKind
from hal.testing.case import Case
from hal.testing.conv_cases import conv_case
from hal.testing.delta_cases import Delta, delta_case
from hal.testing.rows import make_rows
from hal.testing.scan_cases import Scan, scan_case
from hal.testing.verify_cases import VerifyCase, accept, tree
from hal_cpu.plugin import DIMS, DRAFTS, GROUP_SIZES, MANIFEST, RATIOS, STATE_SIZES, WIDTHS
from hal_cpu.provider import TorchProvider
from hal_registry import Registry
from support.model_configs import tiny

PROVIDER = TorchProvider("cpu", {})
ROWS = make_rows([(65, "fork"), (17, "fresh")], pads=2)
STEPS = make_rows([(1, "fork"), (1, "pad"), (1, "fresh"), (1, "continue")])
TREES = make_rows([(5, "fork"), (3, "fresh"), (4, "continue")])
DELTAS = {
    "least K": Delta(H=1, HV=2, K=DIMS[0], V=16, qk_l2norm=False),
    "least V": Delta(H=1, HV=2, K=16, V=DIMS[0]),
    "most K": Delta(H=1, HV=1, K=DIMS[-1], V=16),
    "most V": Delta(H=1, HV=1, K=16, V=DIMS[-1]),
    "most channels": Delta(H=1, HV=1, K=DIMS[-1], V=16, gate=GateKind.CHANNEL),
    "least ratio": Delta(H=3, HV=3 * RATIOS[0]),
    "most ratio": Delta(H=2, HV=2 * RATIOS[-1], K=8, V=8),
    "most ratio of channels": Delta(H=1, HV=RATIOS[-1], K=8, V=8, gate=GateKind.SAFE),
}
SCANS = {
    "least P": Scan(H=2, P=DIMS[0], N=16),
    "most P": Scan(H=2, P=DIMS[-1], N=8),
    "least N": Scan(H=2, P=8, N=STATE_SIZES[0]),
    "most N": Scan(H=2, P=8, N=STATE_SIZES[-1]),
    "most N of channels": Scan(kind="mamba1", H=1, P=8, N=STATE_SIZES[-1], G=1),
    "most lightning": Scan(kind="lightning", H=2, P=DIMS[-1], N=STATE_SIZES[-1]),
    "least group": Scan(H=3, P=8, G=3 // GROUP_SIZES[0]),
    "most group": Scan(H=GROUP_SIZES[-1], P=4, N=8, G=1),
}


def call(case: Case) -> Any:
    interface, _, verb = case.operation.partition(".")
    return getattr(getattr(PROVIDER, interface), verb)


def check_all(prefill: Case, decode: Case, drafts: Case) -> None:
    """The three ways to run the same dims, and commit."""
    prefill.check(call(prefill))
    decode.check(call(decode))
    interface, rows = getattr(PROVIDER, drafts.operation.partition(".")[0]), drafts.rows
    VerifyCase.of(drafts, tree(rows), accept(rows)).check(interface, PROVIDER.scratch_spec)


@pytest.mark.parametrize("width", [WIDTHS[0], WIDTHS[-1]])
def test_conv_widths_hold_at_their_ends(width: int) -> None:
    cases = (conv_case(rows, width=width, decode=rows is STEPS) for rows in (ROWS, STEPS, TREES))
    check_all(*cases)


@pytest.mark.parametrize("name", DELTAS)
def test_dims_and_ratios_of_the_delta_rule_hold_at_their_ends(name: str) -> None:
    dims = DELTAS[name]
    if dims.V == 1:
        # One number a token: cancellation decides its error, so that only long rows tell.
        delta_case(ROWS, dims).check(PROVIDER.delta_rule.prefill)
        return
    check_all(*(delta_case(rows, dims, decode=rows is STEPS) for rows in (ROWS, STEPS, TREES)))


@pytest.mark.parametrize("name", SCANS)
def test_dims_groups_and_sizes_of_the_scan_hold_at_their_ends(name: str) -> None:
    dims = SCANS[name]
    check_all(*(scan_case(rows, dims, decode=rows is STEPS) for rows in (ROWS, STEPS, TREES)))


@pytest.mark.parametrize("width", [DRAFTS[0], DRAFTS[-1]])
@pytest.mark.parametrize("build", [conv_case, delta_case, scan_case])
def test_draft_widths_hold_at_their_ends(build: Any, width: int) -> None:
    rows = make_rows([(width, "fork"), (width, "fresh")])
    case = build(rows)
    interface = getattr(PROVIDER, case.operation.partition(".")[0])
    VerifyCase.of(case, tree(rows), accept(rows)).check(interface, PROVIDER.scratch_spec)


def explain(config: dict[str, Any], **options: Any) -> hal.Explanation:
    return hal.explain("cpu", config, registry=Registry.of(MANIFEST), **options)


BEYOND: list[tuple[str, dict[str, int], str]] = [
    ("qwen3_next", {"linear_key_head_dim": DIMS[-1] + 1}, "delta_rule.prefill needs head dims"),
    ("qwen3_next", {"linear_value_head_dim": DIMS[-1] + 1}, "delta_rule.prefill needs head dims"),
    (
        "qwen3_next",
        {"linear_num_key_heads": 1, "linear_num_value_heads": RATIOS[-1] + 1},
        "delta_rule.prefill needs HV/H 17",
    ),
    ("qwen3_next", {"linear_conv_kernel_dim": WIDTHS[-1] + 1}, "conv.prefill needs conv width 9"),
    ("qwen3_next", {"linear_conv_kernel_dim": WIDTHS[0] - 1}, "conv.prefill needs conv width 1"),
    ("lfm2", {"conv_L_cache": WIDTHS[-1] + 1}, "conv.prefill needs conv width 9"),
    ("bamba", {"mamba_d_state": STATE_SIZES[-1] + 1}, "scan.prefill needs state size 257"),
    ("mamba", {"state_size": STATE_SIZES[-1] + 1}, "scan.prefill needs state size 257"),
    (
        "bamba",
        {"mamba_n_heads": 4, "mamba_d_head": DIMS[-1] + 1, "hidden_size": 514,
         "num_attention_heads": 2, "num_key_value_heads": 2},
        "scan.prefill needs head dims",
    ),
    (
        "bamba",
        {"mamba_n_heads": GROUP_SIZES[-1] + 1, "mamba_d_head": 2, "mamba_n_groups": 1,
         "hidden_size": GROUP_SIZES[-1] + 1,
         "num_attention_heads": 1, "num_key_value_heads": 1},
        "scan.prefill needs HV/H 257",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("family", "change", "text"), BEYOND, ids=[str(b[1]) for b in BEYOND])
def test_one_beyond_a_range_is_refused(family: str, change: dict[str, int], text: str) -> None:
    assert explain(tiny(family)).fits
    refused = explain({**tiny(family), **change})
    assert not refused.fits
    assert text in str(refused)


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "lfm2", "bamba", "mamba"])
@pytest.mark.parametrize("shape", [False, True])
def test_drafts_are_served_up_to_the_declared_width(family: str, shape: bool) -> None:
    most = hal.Speculative(DRAFTS[-1], tree=shape)
    assert explain(tiny(family), speculative=most, prefix_cache=1).fits
    refused = explain(tiny(family), speculative=hal.Speculative(DRAFTS[-1] + 1, tree=shape))
    assert "needs verify width 33" in str(refused)


@pytest.mark.parametrize("family", ["qwen3_next", "bamba"])
def test_a_state_dtype_that_is_not_declared_is_refused(family: str) -> None:
    assert not explain(tiny(family), state_dtype="bfloat16").fits


def test_every_declared_dtype_is_a_float_that_the_sweeps_run() -> None:
    held = {dtype for offer in MANIFEST.offers.values() for dtype in offer.dtypes}
    assert held == {"float32", "bfloat16", "float16"}
    assert all(getattr(torch, dtype).is_floating_point for dtype in held)
