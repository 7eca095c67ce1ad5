"""The registered operators: true schemas, the provider's own results, and graphs without breaks."""

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from hal.runtime.batch import Batch, Mode
from hal.runtime.operators import OperatorConv, OperatorDelta, operators
from hal_cpu.provider import TorchProvider
from support.bound import delta
from support.ops import Case, conv_case, delta_case, i32, make_rows

LAYOUTS = {"conv": "CW", "recurrent": "VK"}
PROVIDER = TorchProvider("cpu", {"layouts": LAYOUTS})
FOUND = operators("cpu.torch", "cpu", LAYOUTS, PROVIDER)
BOTH = {"prefill": FOUND, "decode": FOUND}
ROWS = make_rows([(5, "fresh"), (0, "continue"), (3, "fork"), (1, "continue")], pads=2)
STEP = make_rows([(1, "continue"), (1, "pad"), (1, "fork")])


def cases() -> dict[str, Case]:
    """One case for each operator, without poison in what opcheck compares."""
    return {
        "conv_prefill": conv_case(ROWS),
        "conv_decode": conv_case(STEP, decode=True),
        "delta_rule_prefill": delta_case(ROWS),
        "delta_rule_decode": delta_case(STEP, decode=True),
    }


def call(name: str) -> object:
    """The method of the operator wrapper that answers to a name."""
    wrapper = OperatorConv(BOTH) if name.startswith("conv") else OperatorDelta(BOTH)
    return getattr(wrapper, name.rpartition("_")[2])


def direct(name: str) -> object:
    """The provider's own method."""
    interface, _, verb = name.rpartition("_")
    return getattr(getattr(PROVIDER, interface), verb)


@pytest.mark.parametrize("name", sorted(cases()))
def test_an_operator_gives_the_provider_s_result_and_state_bit_for_bit(name: str) -> None:
    case = cases()[name]
    want, state = case.run(direct(name))  # type: ignore[arg-type]

    def without_out(*, out: Tensor | None = None, **given: object) -> Tensor:
        result: Tensor = call(name)(**given)  # type: ignore[operator]
        return result

    got, left = case.run(without_out)
    assert torch.equal(got, want)
    assert torch.equal(left.nan_to_num(7), state.nan_to_num(7))


@pytest.mark.parametrize("name", sorted(cases()))
def test_schemas_fakes_and_mutations_are_true(name: str) -> None:
    args = cases()[name].args
    if name.startswith("conv"):
        order = ["x", "weight", "bias", "state", "src", "dst", "start"]
        tail: list[object] = ["silu"]
        flat = [args[key] for key in order]
    else:
        gate = args["gate"]
        flat = [args[key] for key in "qkvab"]
        flat += [gate.kind.value, gate.A_log, gate.dt_bias, None, 1.0]
        flat += [args[key] for key in ("state", "src", "dst")]
        tail = [True]
    if name.endswith("prefill"):
        flat += [args["query_start_loc"], args["max_len"]]
        tail.append(None)
    clean = [t.nan_to_num(0.5) if isinstance(t, Tensor) else t for t in flat]
    opcheck(FOUND.get(name), (*clean, *tail), test_utils=("test_schema", "test_faketensor"))


def test_one_provider_registers_once_for_its_layouts() -> None:
    assert operators("cpu.torch", "cpu", LAYOUTS, PROVIDER) is FOUND
    other = operators("cpu.torch", "cpu", {"conv": "WC", "recurrent": "KV"}, PROVIDER)
    assert other.namespace != FOUND.namespace


def test_a_whole_layer_compiles_into_one_graph() -> None:
    conv, rule = OperatorConv(BOTH), OperatorDelta(BOTH)
    case = delta_case(STEP, decode=True)
    window = torch.zeros(STEP.slots, 24, 3)
    weight, start = torch.randn(24, 4), i32(*STEP.start)

    def layer(x: Tensor, q: Tensor, state: Tensor, window: Tensor) -> Tensor:
        y = conv.decode(
            x, weight, None, window, case.args["src"], case.args["dst"], start, activation="silu"
        )
        given = {**case.args, "q": q, "state": state}
        return rule.decode(**given) + y.sum()

    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    x = torch.randn(3, 24)
    states = [torch.zeros_like(case.args["state"]) for _ in range(2)]
    windows = [window.clone(), window.clone()]
    q = case.args["q"].nan_to_num(0.5)
    eager = layer(x, q, states[0], windows[0])
    assert torch.allclose(eager, compiled(x, q, states[1], windows[1]), equal_nan=True)
    assert torch.equal(windows[0], windows[1])
    assert torch.equal(states[0], states[1])


def test_a_bound_layer_compiles_with_its_operators_and_gives_the_eager_result() -> None:
    eager, compiled = delta(), delta()
    call = torch.compile(compiled.call, fullgraph=True, backend="eager")
    given = eager.inputs(3)
    results = []
    for bound, run in ((eager, eager.call), (compiled, call)):
        bound.backend.begin(Batch(Mode.EXTEND, [2, 1], [0, 0], [-1, -1], [1, 2]))
        results.append(run([tensor.clone() for tensor in given]))
    assert torch.equal(*results)
