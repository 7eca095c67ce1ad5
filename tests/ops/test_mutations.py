"""Every known mistake is caught by the parity check that the right operator passes."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from hal.model.spec import GateKind
from hal.testing.scan_cases import Scan, scan_case
from hal.testing.verify_cases import Served, VerifyCase
from hal_cpu.provider import TorchProvider
from ops import mutations as wrong
from ops import mutations_verify as wrong_verify
from support.ops import LIMITS, Call, Case, Delta, conv_case, delta_case, i32, make_rows

PROVIDER = TorchProvider("cpu", {})
PACKED = make_rows(
    [(70, "fork"), (2, "fork"), (0, "continue"), (1, "fresh"), (5, "fresh"), (2, "continue")],
    seed=21,
    pads=2,
)
TOKENS = make_rows(
    [(1, "fork"), (1, "pad"), (1, "fresh"), (1, "continue"), (1, "pad"), (1, "fork")], seed=22
)
SAFE = Delta(gate=GateKind.SAFE)
CASES: dict[str, tuple[Case, Call, dict[str, wrong.Mutation]]] = {
    "conv.prefill": (
        conv_case(PACKED),
        PROVIDER.conv.prefill,
        wrong.COMMON | wrong.PACKED | wrong.CONV,
    ),
    "conv.decode": (
        conv_case(TOKENS, decode=True),
        PROVIDER.conv.decode,
        wrong.COMMON | wrong.TOKENS | wrong.CONV,
    ),
    "delta.prefill": (
        delta_case(PACKED),
        PROVIDER.delta_rule.prefill,
        wrong.COMMON | wrong.PACKED | wrong.DELTA,
    ),
    "delta.decode": (
        delta_case(TOKENS, decode=True),
        PROVIDER.delta_rule.decode,
        wrong.COMMON | wrong.TOKENS | wrong.DELTA,
    ),
    "ready gates": (
        delta_case(PACKED, Delta(gate=None)),
        PROVIDER.delta_rule.prefill,
        wrong.READY,
    ),
    "scaled": (delta_case(PACKED, Delta(scale=1e-4)), PROVIDER.delta_rule.prefill, wrong.SCALED),
    "doubled": (
        delta_case(PACKED, Delta(beta_scale=2)),
        PROVIDER.delta_rule.prefill,
        wrong.DOUBLED,
    ),
    "safe": (delta_case(PACKED, SAFE), PROVIDER.delta_rule.prefill, wrong.SAFE),
}
LIMITED = Scan(z=True, dt_limit=(0.01, 0.1))
CASES |= {
    f"{kind}.{verb}": (
        scan_case(rows, replace(LIMITED, kind=kind), decode=verb == "decode"),
        getattr(PROVIDER.scan, verb),
        wrong.COMMON | shared | wrong.SCAN,
    )
    for kind in ("mamba2", "mamba1")
    for verb, rows, shared in (
        ("prefill", PACKED, wrong.PACKED),
        ("decode", TOKENS, wrong.TOKENS),
    )
}
PAIRS = [(name, mistake) for name, (_, _, found) in CASES.items() for mistake in found]


@pytest.mark.parametrize("name", CASES)
def test_the_right_operator_passes(name: str) -> None:
    case, call, _ = CASES[name]
    case.check(call)


@pytest.mark.parametrize(("name", "mistake"), PAIRS, ids=[" - ".join(pair) for pair in PAIRS])
def test_a_wrong_operator_fails(name: str, mistake: str) -> None:
    case, call, found = CASES[name]
    with pytest.raises(AssertionError, match=r"^(conv|delta_rule|scan)\."):
        case.check(found[mistake](call))


DRAFTS = make_rows(
    [(4, "fork"), (5, "fork"), (0, "continue"), (3, "fresh"), (2, "continue")], seed=23, pads=2
)
PARENTS = i32(-1, 0, 0, 2, -1, 0, 0, 1, -1, -1, 0, 0, -1, 0, 7, 7)
LAST = i32(2, 3, 99, -1, 0)
DRAFT_CASES: dict[str, Case] = {
    "conv": conv_case(DRAFTS),
    "delta": delta_case(DRAFTS),
    "mamba2": scan_case(DRAFTS),
    "mamba1": scan_case(DRAFTS, Scan(kind="mamba1")),
}
MISTAKES = wrong_verify.VERIFY | wrong_verify.TREE
WRONG_PAIRS = [
    (name, mistake)
    for name in DRAFT_CASES
    for mistake in MISTAKES
    # Mamba-1's scratch holds whole states, so its commit reads no source: nothing is mistaken.
    if (name, mistake) != ("mamba1", "commit starts from zeros")
]


def verify_of(name: str) -> tuple[VerifyCase, Served]:
    case = DRAFT_CASES[name]
    served = getattr(PROVIDER, case.operation.partition(".")[0])
    return VerifyCase.of(case, PARENTS, LAST), served


@pytest.mark.parametrize("name", DRAFT_CASES)
def test_the_right_verify_and_commit_pass(name: str) -> None:
    verify, served = verify_of(name)
    verify.check(served, PROVIDER.scratch_spec)


@pytest.mark.parametrize(("name", "mistake"), WRONG_PAIRS, ids=[" - ".join(p) for p in WRONG_PAIRS])
def test_a_wrong_verify_or_commit_fails(name: str, mistake: str) -> None:
    verify, served = verify_of(name)
    with pytest.raises(AssertionError, match=r"^(conv|delta_rule|scan)\.verify"):
        verify.check(MISTAKES[mistake](served), PROVIDER.scratch_spec)


def test_the_naive_loop_without_a_mistake_passes() -> None:
    case, call, _ = CASES["ready gates"]
    case.check(wrong.naive()(call))


def test_one_wrong_head_fails_though_the_mean_would_pass() -> None:
    case, call, _ = CASES["delta.prefill"]

    def one_head(**args: object) -> torch.Tensor:
        result = call(**args)
        result[:70, 0] *= 1 + 2e-5
        return result

    errors = case.errors(one_head)
    assert not errors.within(LIMITS["float32", "one rounding"])
    assert errors.out / 4 < LIMITS["float32", "one rounding"][0]


@pytest.mark.parametrize("mistake", ["history dropped after the first token"])
def test_a_wrong_first_token_fails_though_the_row_is_long(mistake: str) -> None:
    case = conv_case(make_rows([(200, "fork")]))

    def forgets(**args: object) -> torch.Tensor:
        right = PROVIDER.conv.prefill(**args)
        clone = {**args, "src": i32(-1), "dst": i32(-1), "out": None}
        right[0] = PROVIDER.conv.prefill(**clone)[0]
        return right

    errors = case.errors(forgets)
    assert errors.head > 0.1 > errors.out / 2


@pytest.mark.parametrize(("slot", "offset"), list(product([1, -1], [0, -1])))
def test_one_stray_element_is_seen(slot: int, offset: int) -> None:
    rows = make_rows([(3, "fork")], seed=2)
    free = sorted({*range(1, rows.slots)} - {rows.dst[0]})
    case = replace(delta_case(rows, gap=2))

    def stray(**args: object) -> torch.Tensor:
        result = PROVIDER.delta_rule.prefill(**args)
        args["state"][free[0] if slot > 0 else free[-1]].view(-1)[offset] = 5.0
        return result

    dense = delta_case(rows)
    assert dense.errors(stray).stray == 1
    assert case.errors(PROVIDER.delta_rule.prefill).stray == 0
