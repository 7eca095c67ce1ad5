"""SGLang's layers compute what the reference does, from SGLang's own batches and slots."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hal
import hal_sglang
from hal import reference
from hal.errors import HalError, ProviderError
from hal.interfaces import Gate
from hal.model.spec import DeltaDims, GateKind, ShortConvDims
from hal.runtime.batch import NO_SLOT, Mode
from hal_sglang import plugin, seams
from hal_sglang.factories import DeltaKernel, Key, factories
from hal_sglang.serve import check_mode, step_of
from support import fake_sglang
from support.bound import FAMILIES, GDN_CONFIG, LFM2_CONFIG, delta_params
from support.engine_schedules import check_any_schedule, relative

SLOTS, EPS = 7, 1e-6


@dataclass(frozen=True)
class Case:
    """A model of one kind: its config, weights, random inputs, a call of its layer, the oracle."""

    config: dict[str, object]
    fill: Callable[[Any], None]
    inputs: Callable[[int], list[Tensor]]
    call: Callable[[Any, Any, Any, list[Tensor]], Tensor]
    alone: Callable[[list[Tensor]], Tensor]


def gdn() -> Case:
    bound = FAMILIES["gated_delta_net"]()
    dims = delta_dims()
    params = delta_params(dims)
    assert params.gate is not None
    gate = params.gate

    def fill(model: Any) -> None:
        for layer in model:
            layer.conv_weights.copy_(params.conv_weight)
            layer.A_log.copy_(gate.A_log)
            layer.dt_bias.copy_(gate.dt_bias)

    def call(backend: Any, layer: Any, batch: Any, given: list[Tensor]) -> Tensor:
        mixed, a, b, z = given
        linear, decodes = backend.linear_attn_backend, batch.forward_mode.is_decode()
        forward = linear.forward_decode if decodes else linear.forward_extend
        out = forward(layer, batch, mixed_qkv=mixed, a=a, b=b)
        assert out.shape[0] == 1
        return reference.gated_rms_norm(out[0], z, params.norm_weight, EPS, activation="silu")

    return Case(GDN_CONFIG, fill, bound.inputs, call, bound.alone)


def short_conv() -> Case:
    dims = next(iter(hal.model.read(LFM2_CONFIG).stateful_layers())).dims
    assert isinstance(dims, ShortConvDims)
    rng = torch.Generator().manual_seed(5)
    inner, outer, weight = (
        torch.randn(shape, generator=rng) / dims.hidden**0.5
        for shape in ((3 * dims.hidden, dims.hidden), (dims.hidden,) * 2, (dims.hidden, dims.W))
    )

    def fill(model: Any) -> None:
        for layer in model:
            layer.conv_weight.copy_(weight)
            layer.in_proj.weight.copy_(inner)
            layer.out_proj.weight.copy_(outer)

    def call(backend: Any, layer: Any, batch: Any, given: list[Tensor]) -> Tensor:
        return layer(given[0], batch)

    def alone(given: list[Tensor]) -> Tensor:
        B, C, x = (given[0] @ inner.T).chunk(3, dim=-1)
        ends, none = torch.tensor([0, x.shape[0]]), torch.tensor([-1])
        window = torch.zeros(2, dims.hidden, dims.W - 1)
        y, _ = reference.conv_prefill(
            B * x, weight, None, window, none, none, none, ends, x.shape[0], activation=None
        )
        return (C.double() * y) @ outer.double().T

    return Case(LFM2_CONFIG, fill, lambda n: [torch.randn(n, dims.hidden)], call, alone)


def delta_dims() -> DeltaDims:
    dims = hal.model.read(GDN_CONFIG).layers[0].dims
    assert isinstance(dims, DeltaDims)
    return dims


CASES = {"gdn": gdn, "short_conv": short_conv}


@dataclass
class Served:
    """A started fake engine: the layer under test, its backend and its pool."""

    case: Case
    engine: fake_sglang.Engine
    runner: Any
    backend: Any
    layer: Any

    @property
    def states(self) -> list[Tensor]:
        index = min(self.runner.req_to_token_pool.layers)
        cache = self.runner.req_to_token_pool.mamba2_layer_cache(index)
        return [*cache.conv, cache.temporal]

    def run(self, rows: list[tuple[int, int, int]], given: list[Tensor]) -> Tensor:
        """One step of rows of (slot, tokens seen, new tokens) through SGLang's metadata."""
        made = batch(rows)
        self.backend.linear_attn_backend.init_forward_metadata(made)
        return self.case.call(self.backend, self.layer, made, given)


def batch(rows: list[tuple[int, int, int]], name: str | None = None) -> Any:
    """A batch as SGLang makes it: a decode where every row has one token and a past."""
    decodes = all(count == 1 and seen > 0 for _, seen, count in rows)
    counts = [count for _, _, count in rows]
    mode = fake_sglang.mode(name or ("DECODE" if decodes else "EXTEND"))
    metadata = SimpleNamespace(
        mamba_cache_indices=torch.tensor([slot for slot, _, _ in rows], dtype=torch.int32),
        query_start_loc=torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
    )
    return SimpleNamespace(
        forward_mode=mode,
        logical_forward_mode=mode,
        metadata=metadata,
        seq_lens=torch.tensor([seen + count for _, seen, count in rows]),
        extend_prefix_lens=torch.tensor([seen for _, seen, _ in rows]),
        extend_seq_lens_cpu=counts,
    )


@pytest.fixture(scope="module", params=sorted(CASES))
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A started model of one kind, its pool full of NaN."""
    case = CASES[request.param]()
    with fake_sglang.installed() as engine:
        plugin.register()
        fake_sglang.HookRegistry.apply()
        arguments = fake_sglang.ServerArgs(fake_sglang.Config(case.config))
        make = __import__("sys").modules["sglang.srt.model_executor.model_runner"].ModelRunner
        runner = make(arguments, case.fill)
        engine.backend = runner.start(SLOTS)
        yield Served(case, engine, runner, engine.backend, runner.model[0])


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_schedule_gives_what_each_request_gives_alone(
    served: Served, data: st.DataObject
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1 << 20)))
    slots = data.draw(st.permutations(range(1, SLOTS)))[:2]
    check_any_schedule(data, served.case, slots, served.run)


def test_a_fresh_row_reads_nothing_of_its_slot(served: Served) -> None:
    for tensor in served.states:
        tensor.fill_(torch.nan)
    inputs = served.case.inputs(5)
    assert relative(served.run([(3, 0, 5)], inputs), served.case.alone(inputs)) < 1e-5


def test_nothing_is_written_outside_the_rows_slots(served: Served) -> None:
    for tensor in served.states:
        tensor.fill_(torch.nan)
    served.run([(3, 0, 5)], served.case.inputs(5))
    served.run([(3, 5, 1)], served.case.inputs(1))
    for tensor in served.states:
        others = [slot for slot in range(SLOTS) if slot != 3]
        assert tensor[others].isnan().all()
        assert not tensor[3].isnan().any()


@pytest.mark.parametrize("pad", [0, -1])
def test_a_padded_row_gives_zeros_and_touches_nothing(served: Served, pad: int) -> None:
    for tensor in served.states:
        tensor.fill_(torch.nan)
    inputs = served.case.inputs(3)
    served.run([(2, 0, 3)], inputs)
    inputs = served.case.inputs(2)
    for tensor in inputs[:1]:
        tensor[1] = torch.nan
    made = batch([(2, 3, 1), (pad, 1, 1)])
    served.backend.linear_attn_backend.init_forward_metadata(made)
    out = raw(served, made, inputs)
    assert not out[0].isnan().any()
    if "conv_weights" in dir(served.layer):
        assert torch.equal(out[1], torch.zeros_like(out[1]))
    for tensor in served.states:
        assert tensor[[0, SLOTS - 1]].isnan().all()


def raw(served: Served, made: Any, inputs: list[Tensor]) -> Tensor:
    """The layer's own result: without the norm outside, which would read z."""
    if len(inputs) == 1:
        return served.layer(inputs[0], made)
    mixed, a, b, _ = inputs
    linear = served.backend.linear_attn_backend
    return linear.forward_decode(served.layer, made, mixed, a, b)[0]


def test_tokens_beyond_the_rows_come_out_as_zero(served: Served) -> None:
    made = batch([(2, 0, 4)])
    served.backend.linear_attn_backend.init_forward_metadata(made)
    inputs = served.case.inputs(6)
    if len(inputs) > 1:
        inputs[0][4:] = torch.nan
    out = raw(served, made, inputs)
    assert torch.equal(out[4:], torch.zeros_like(out[4:]))
    assert out[:4].abs().sum() > 0


def test_calls_are_counted_by_kind_and_mode(served: Served) -> None:
    calls = seams._SERVED[served.runner].calls
    calls.clear()
    served.run([(1, 0, 3)], served.case.inputs(3))
    served.run([(1, 3, 1)], served.case.inputs(1))
    (kind,) = {kind for kind, _ in calls}
    assert calls == {(kind, str(Mode.MIXED)): 1, (kind, str(Mode.DECODE)): 1}
    entry = hal_sglang.report()
    assert any(f"{kind} DECODE" in each["calls"] for each in entry)


def test_updated_weights_are_bound_anew(served: Served) -> None:
    weights = sys_module("sglang.srt.model_executor.model_runner_components.weight_updater")
    updater, inputs = weights.WeightUpdater(), served.case.inputs(5)
    names = {"conv_weights", "conv_weight"} & set(dir(served.layer))
    tensor = getattr(served.layer, names.pop())
    first = served.run([(2, 0, 5)], inputs)
    assert updater.update_weights_from_tensor(lambda: tensor.mul_(2)) == "updated"
    changed = served.run([(2, 0, 5)], inputs)
    updater.update_weights_from_disk(lambda: tensor.div_(2))
    assert relative(changed, first) > 1e-2
    assert torch.equal(served.run([(2, 0, 5)], inputs), first)

    def stop_halfway() -> None:
        tensor.mul_(2)
        raise ConnectionError("the sender is gone")

    with pytest.raises(ConnectionError):
        updater.end_weight_update(stop_halfway)
    assert torch.equal(served.run([(2, 0, 5)], inputs), changed)


def sys_module(name: str) -> Any:
    return __import__("sys").modules[name]


def test_an_idle_batch_runs_nothing(served: Served) -> None:
    made = batch([(1, 0, 1)], "IDLE")
    served.backend.linear_attn_backend.init_forward_metadata(made)
    assert served.backend.linear_attn_backend.hal_step is None
    if "in_proj" in dir(served.layer):
        hidden = torch.randn(1, 24)
        assert served.layer(hidden, made) is hidden
    else:
        with pytest.raises(HalError, match="before SGLang made"):
            raw(served, made, served.case.inputs(1))


def test_graphs_that_come_all_the_same_are_errors(served: Served) -> None:
    linear = served.backend.linear_attn_backend
    with pytest.raises(HalError, match="graph"):
        linear.init_forward_metadata_out_graph(batch([(1, 0, 1)]))
    with pytest.raises(HalError, match="graph"):
        linear.init_forward_metadata_capture_cpu_graph(1, 2)


def test_a_short_conv_on_another_backend_is_an_error(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "in_proj" not in dir(served.layer):
        return
    made = batch([(1, 0, 2)])
    monkeypatch.setattr(served.engine, "backend", SimpleNamespace(linear_attn_backend="stock"))
    with pytest.raises(HalError, match="hal's backend is not there"):
        served.layer(torch.zeros(2, 24), made)


# Steps


@given(
    st.lists(
        st.tuples(st.integers(-1, 9), st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=6
    )
)
def test_a_step_has_the_rows_of_its_batch(rows: list[tuple[int, int, int]]) -> None:
    made = batch(rows)
    step = step_of(made, made.metadata)
    assert step.tokens == sum(count for _, _, count in rows)
    assert step.rows == len(rows)
    assert step.max_len == max(count for _, _, count in rows)
    dst = [slot if slot > 0 else NO_SLOT for slot, _, _ in rows]
    assert step.dst.tolist() == dst
    pairs = zip(dst, rows, strict=True)
    assert step.src.tolist() == [slot if seen else NO_SLOT for slot, (_, seen, _) in pairs]
    assert step.query_start_loc.tolist()[-1] == step.tokens


@pytest.mark.parametrize("name", ["TARGET_VERIFY", "DRAFT_EXTEND_V2"])
def test_a_batch_of_drafts_is_an_error(name: str) -> None:
    with pytest.raises(HalError, match=name):
        check_mode(batch([(1, 3, 2)], name))


def test_rows_without_tokens_are_an_error() -> None:
    made = batch([(1, 0, 3), (2, 0, 0)])
    with pytest.raises(HalError, match="rows of"):
        step_of(made, made.metadata)


# Factories


def gate_inputs(tokens: int) -> tuple[list[Tensor], Gate]:
    dims = delta_dims()
    gate = delta_params(dims).gate
    assert gate is not None
    shapes = ((dims.H, dims.K), (dims.H, dims.K), (dims.HV, dims.V), (dims.HV,), (dims.HV,))
    return [torch.randn(tokens, *shape) for shape in shapes], gate


def kernels(fuses_gate: bool | None = None) -> tuple[DeltaKernel, DeltaKernel]:
    made = factories(hal.select("cpu", GDN_CONFIG, dtype="float32"))
    assert set(made) == {Key("cpu", "gdn", "decode"), Key("cpu", "gdn", "prefill")}
    decode, prefill = made["cpu", "gdn", "decode"](), made["cpu", "gdn", "prefill"]()
    if fuses_gate is not None:
        decode = DeltaKernel(decode.rule, fuses_gate)
    return decode, prefill


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1 << 20), fuses=st.booleans(), lens=st.permutations([1, 5, 9]))
def test_kernels_by_key_take_the_engines_arguments_and_match_the_reference(
    seed: int, fuses: bool, lens: list[int]
) -> None:
    torch.manual_seed(seed)
    dims, (decode, prefill) = delta_dims(), kernels(fuses)
    pool = torch.randn(SLOTS, dims.HV, dims.V, dims.K)
    (q, k, v, a, b), gate = gate_inputs(sum(lens))
    slots, starts = torch.tensor([4, 2, 5]), torch.tensor([0, *accumulate(lens)])
    decay = -gate.A_log.exp() * torch.nn.functional.softplus(a + gate.dt_bias)
    beta = torch.sigmoid(b)
    want, states = reference.delta_rule_prefill(
        q, k, v, a, b, gate, pool, slots, slots, starts, max(lens)
    )
    got, none, nothing = prefill.extend(
        q[None],
        k[None],
        v[None],
        decay[None],
        beta[None],
        ssm_states=pool,
        cache_indices=slots,
        query_start_loc=starts,
        layer_id=3,
    )
    assert none is nothing is None
    assert relative(got[0], want) < 1e-5
    (q, k, v, a, b), _ = gate_inputs(3)
    want, _ = reference.delta_rule_decode(q, k, v, a, b, gate, states, slots, slots)
    got = decode.decode(
        q[None],
        k[None],
        v[None],
        a,
        b,
        A_log=gate.A_log,
        dt_bias=gate.dt_bias,
        ssm_states=pool,
        cache_indices=slots,
        query_start_loc=torch.arange(4),
    )
    assert relative(got[0], want) < 1e-5


def test_a_kernels_padded_row_gives_zeros_and_touches_nothing() -> None:
    dims, (decode, _) = delta_dims(), kernels()
    pool = torch.full((SLOTS, dims.HV, dims.V, dims.K), torch.nan)
    (q, k, v, a, b), gate = gate_inputs(1)
    out = decode.decode(
        q[None],
        k[None],
        v[None],
        a,
        b,
        A_log=gate.A_log,
        dt_bias=gate.dt_bias,
        ssm_states=pool,
        cache_indices=torch.tensor([-1]),
    )
    assert torch.equal(out, torch.zeros_like(out))
    assert pool.isnan().all()


def test_a_model_without_such_layers_has_no_kernels() -> None:
    assert factories(hal.select("cpu", LFM2_CONFIG)) == {}
    assert GateKind.SCALAR is delta_dims().gate


def test_a_provider_that_lost_its_delta_rule_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    made = factories(hal.select("cpu", GDN_CONFIG, dtype="float32"))
    monkeypatch.setattr(
        "hal_sglang.factories.build", lambda *given: SimpleNamespace(delta_rule=None)
    )
    with pytest.raises(ProviderError, match="has no delta rule"):
        made["cpu", "gdn", "decode"]()
