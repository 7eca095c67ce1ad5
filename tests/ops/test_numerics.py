"""Extreme decays, gates at their edges and near-zero inputs stay finite and equal the oracle."""

import pytest
import torch

from hal import reference
from hal.interfaces import Gate
from hal.model.spec import GateKind
from hal_cpu.gates import beta_of, log_decay
from hal_cpu.provider import TorchProvider
from support.ops import Delta, delta_case, make_rows

PREFILL = TorchProvider("cpu", {}).delta_rule.prefill
STRONG = -27.631021  # log(1e-12)


def ready(g: torch.Tensor, *, channel: bool, kind: str = "fork", dims: Delta | None = None) -> None:
    """Check a prefill of one row with the given log decay of every token."""
    dims = dims or Delta(gate=None)
    case = delta_case(make_rows([(g.shape[0], kind)]), dims)
    shape = (g.shape[0], dims.HV, dims.K) if channel else (g.shape[0], dims.HV)
    full = g.view(-1, *[1] * (len(shape) - 1)).expand(shape).contiguous()
    case.replace(a=full).check(PREFILL)


@pytest.mark.parametrize("channel", [False, True])
@pytest.mark.parametrize("at", [None, 0, 5, 40, 63, 64])
def test_decay_of_1e_minus_12_is_finite_and_right(channel: bool, at: int | None) -> None:
    g = torch.full((130,), STRONG) if at is None else torch.full((130,), -0.01)
    if at is not None:
        g[at] = STRONG
    ready(g, channel=channel)


@pytest.mark.parametrize("channel", [False, True])
def test_weak_decays_behind_strong_ones_keep_their_digits(channel: bool) -> None:
    g = torch.full((192,), -1e-3)
    g[:32] = STRONG
    g[70:78] = STRONG
    ready(g, channel=channel)


@pytest.mark.parametrize("channel", [False, True])
@pytest.mark.parametrize("every", [1, 2])
def test_no_decay_at_all_is_right(channel: bool, every: int) -> None:
    g = torch.full((257,), -0.05)
    g[::every] = 0.0
    ready(g, channel=channel)


def test_tiny_decay_over_a_long_row_never_grows() -> None:
    ready(torch.full((2048,), -1e-7), channel=False, dims=Delta(H=1, HV=1, K=8, V=8, gate=None))


@pytest.mark.parametrize("channel", [False, True])
def test_decays_that_differ_by_channel_and_token_are_right(channel: bool) -> None:
    dims = Delta(gate=None, per_channel=channel)
    case = delta_case(make_rows([(100, "fork"), (17, "fresh")]), dims)
    wild = case.args["a"] * torch.randint(0, 200, case.args["a"].shape)
    case.replace(a=wild).check(PREFILL)


@pytest.mark.parametrize("kind", list(GateKind))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_equal_the_formulas_over_their_whole_range(
    kind: GateKind, dtype: torch.dtype
) -> None:
    HV, K = 3, 5
    edge = torch.tensor([-100.0, -40, -17, -16, -1, 0, 1, 16, 19.999, 20, 20.001, 40, 100])
    shape = (len(edge), HV) if kind is GateKind.SCALAR else (len(edge), HV, K)
    a = edge.view(-1, *[1] * (len(shape) - 1)).expand(shape).to(dtype)
    b = edge.view(-1, 1).expand(len(edge), HV).to(dtype)
    bound = -5.0 if kind is GateKind.SAFE else None
    gate = Gate(kind, torch.tensor([0.0, 1.0, 2.7]), torch.zeros(shape[1:]) + 0.01, bound, 2.0)
    g, beta = reference.gates(a, b, gate)
    torch.testing.assert_close(log_decay(a, gate).double(), g, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(beta_of(b, gate).double(), beta, rtol=1e-5, atol=1e-7)
    assert (log_decay(a, gate) <= 0).all()


def test_the_step_of_softplus_at_twenty_is_the_contracts() -> None:
    gate = Gate(GateKind.SCALAR, torch.zeros(1), torch.zeros(1))
    g = log_decay(torch.tensor([[20.0], [20.5], [90.0]]), gate)
    assert g.flatten().tolist() == [-20.0, -20.5, -90.0]


def test_all_zero_inputs_give_zero() -> None:
    case = delta_case(make_rows([(70, "fresh"), (1, "fresh")]))
    zero = {name: torch.zeros_like(case.args[name]) for name in ("q", "k", "v")}
    case.replace(**zero).check(PREFILL)


@pytest.mark.parametrize("row", [0, 1])
def test_nan_of_one_row_stays_in_that_row(row: int) -> None:
    rows = make_rows([(70, "fork"), (70, "fork"), (1, "fork"), (1, "fresh")])
    case = delta_case(rows)
    clean, _ = case.run(PREFILL)
    hot = case.args["k"].clone()
    hot[rows.spans()[row]] = float("nan")
    got, _ = case.replace(k=hot).run(PREFILL)
    for i, span in enumerate(rows.spans()):
        assert got[span].isnan().all() if i == row else torch.equal(got[span], clean[span])
