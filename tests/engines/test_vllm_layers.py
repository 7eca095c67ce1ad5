"""vLLM's layers compute what the reference does, from vLLM's own batches and pages."""

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
from hal import reference
from hal.errors import HalError
from hal.model.spec import ScanDims, ShortConvDims
from hal.runtime.batch import Mode
from hal_vllm import plugin
from hal_vllm.params import UNPACKED, conv_weight, log_rates
from support import fake_vllm
from support.bound import FAMILIES, GDN_CONFIG, delta_params
from support.bound_scan import scan_params
from support.engine_schedules import Rows, check_any_schedule, relative
from support.model_configs import tiny

BLOCKS, PADDING, EPS = 7, 16, 1e-6


@dataclass(frozen=True)
class Case:
    """A model of one kind: its config, random inputs, a call of its layer, and the oracle."""

    config: dict[str, object]
    build: Callable[[Any, int], Any]
    inputs: Callable[[int], list[Tensor]]
    call: Callable[[Any, list[Tensor]], Tensor]
    alone: Callable[[list[Tensor]], Tensor]


def prefix(index: int) -> str:
    return f"layers.{index}.mixer"


def gdn() -> Case:
    bound = FAMILIES["gated_delta_net"]()

    def build(dims: Any, index: int) -> Any:
        layer = fake_vllm.QwenGatedDeltaNetAttention(
            SimpleNamespace(dims=dims), None, prefix(index)
        )
        fill_delta(layer, dims)
        return layer

    def call(layer: Any, given: list[Tensor]) -> Tensor:
        mixed, a, b, z = given
        out = torch.zeros_like(z)
        layer._forward_core(mixed_qkv=mixed, b=b, a=a, core_attn_out=out)
        norm = delta_params(layer.config.dims).norm_weight
        return reference.gated_rms_norm(out, z, norm, EPS, activation="silu")

    return Case(GDN_CONFIG, build, bound.inputs, call, bound.alone)


def kda() -> Case:
    bound = FAMILIES["kimi_delta"]()

    def build(dims: Any, index: int) -> Any:
        layer = fake_vllm.KimiGatedDeltaNetAttention(
            SimpleNamespace(dims=dims), None, prefix(index)
        )
        fill_delta(layer, dims)
        layer.o_norm.weight.copy_(delta_params(dims).norm_weight)
        return layer

    def call(layer: Any, given: list[Tensor]) -> Tensor:
        mixed, a, b, z = given
        out = torch.full((1, *z.shape), torch.nan)
        layer._forward(mixed_qkv=mixed, g1=a[None], g2=z, beta=b[None], core_attn_out=out)
        return out[0]

    return Case(tiny("kimi_linear"), build, bound.inputs, call, bound.alone)


def fill_delta(layer: Any, dims: Any) -> None:
    params = delta_params(dims)
    layer.conv1d.weight.copy_(params.conv_weight[:, None])
    assert params.gate is not None
    layer.A_log.copy_(params.gate.A_log)
    layer.dt_bias.copy_(params.gate.dt_bias.flatten())


def mamba2() -> Case:
    """Falcon-H1's, whose gate stands alone behind the scan, and whose numbers go on from 4."""
    bound, config = FAMILIES["falcon_h1"](), tiny("falcon_h1")
    count = len(hal.model.read(config).layers)

    def build(dims: ScanDims, index: int) -> Any:
        params = scan_params(dims)
        sizes = (dims.N, dims.W, dims.I, True, False, dims.G, dims.H, dims.P)
        layer = fake_vllm.MambaMixer2(64, *sizes, prefix=prefix(index + count))
        layer.conv1d.weight.copy_(params.conv_weight[:, None])
        layer.conv1d.bias.copy_(params.conv_bias)
        layer.A.copy_(-params.A_log.exp())
        layer.D.copy_(params.D)
        layer.dt_bias.copy_(params.dt_bias)
        return layer

    def call(layer: Any, given: list[Tensor]) -> Tensor:
        mixed, dt, z = given
        out = torch.full_like(z, torch.nan)
        layer.conv_ssm_forward(torch.cat((z, mixed, dt), dim=-1), out)
        return out.double() * z.double() * torch.sigmoid(z.double())

    return Case(config, build, bound.inputs, call, bound.alone)


def short_conv() -> Case:
    config = tiny("lfm2")
    dims = hal.model.read(config).layers[0].dims
    assert isinstance(dims, ShortConvDims)
    rng = torch.Generator().manual_seed(5)
    inner, outer, weight = (
        torch.randn(shape, generator=rng) / dims.hidden**0.5
        for shape in ((3 * dims.hidden, dims.hidden), (dims.hidden,) * 2, (dims.hidden, dims.W))
    )

    def build(found: Any, index: int) -> Any:
        layer = fake_vllm.ShortConv(
            SimpleNamespace(dims=found), found.hidden, index, prefix=prefix(index)
        )
        layer.conv.weight.copy_(weight[:, None])
        layer.in_proj.weight.copy_(inner)
        layer.out_proj.weight.copy_(outer)
        return layer

    def call(layer: Any, given: list[Tensor]) -> Tensor:
        out = torch.full_like(given[0], torch.nan)
        layer.forward_native(given[0], out)
        return out

    def alone(given: list[Tensor]) -> Tensor:
        B, C, x = (given[0] @ inner.T).chunk(3, dim=-1)
        ends, none = torch.tensor([0, x.shape[0]]), torch.tensor([-1])
        window = torch.zeros(2, dims.hidden, dims.W - 1)
        y, _ = reference.conv_prefill(
            B * x, weight, None, window, none, none, none, ends, x.shape[0], activation=None
        )
        return (C.double() * y) @ outer.double().T

    return Case(config, build, lambda n: [torch.randn(n, dims.hidden)], call, alone)


CASES = {"gdn": gdn, "kda": kda, "mamba2": mamba2, "short_conv": short_conv}


@dataclass
class Served:
    """A model of the fake engine: the layer under test, its pages, and the engine itself."""

    case: Case
    engine: fake_vllm.Engine
    layer: Any
    layers: list[Any]
    pages: Tensor

    def run(self, rows: list[tuple[int, int, int]], given: list[Tensor], pads: int = 0) -> Tensor:
        """One step of rows of (block, tokens seen, new tokens) through vLLM's metadata."""
        self.engine.metadata = {self.layer.prefix: metadata(rows, pads)}
        return self.case.call(self.layer, given)


def metadata(rows: list[tuple[int, int, int]], pads: int = 0) -> Any:
    """What the builder makes of a batch; pad rows have live blocks and no tokens."""
    from hal_vllm.metadata import HalMetadataBuilder

    counts = [count for _, _, count in rows] + [0] * pads
    bounds = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
    seen = torch.tensor([done for _, done, _ in rows] + [9] * pads, dtype=torch.int32)
    blocks = torch.tensor([block for block, _, _ in rows] + [1] * pads, dtype=torch.int32)
    common = SimpleNamespace(
        num_reqs=len(counts),
        query_start_loc=bounds,
        query_start_loc_cpu=bounds,
        block_table_tensor=blocks[:, None],
        seq_lens=seen + torch.tensor(counts, dtype=torch.int32),
        max_query_len=max(counts),
        compute_num_computed_tokens=lambda: seen,
    )
    engine = SimpleNamespace(cache_config=SimpleNamespace(mamba_cache_mode="none"))
    return HalMetadataBuilder("spec", ["layer"], engine, "cpu").build(0, common)


@pytest.fixture(scope="module", params=sorted(CASES))
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A loaded model of one kind, its pages full of NaN."""
    case = CASES[request.param]()
    with fake_vllm.installed() as engine:
        plugin.register()
        stateful = list(hal.model.read(case.config).stateful_layers())
        build: Callable[[], object] = lambda: SimpleNamespace(  # noqa: E731 # reads as a config does
            layers=[case.build(layer.dims, layer.index) for layer in stateful]
        )
        config = fake_vllm.config(case.config, build)
        layers = fake_vllm.BaseModelLoader().create_model(config, config.model_config).layers
        for layer in layers:
            layer.process_weights_after_loading(torch.float32)
            layer.bind_kv_cache(pages_of(layer))
        pages = pages_of(layers[0])
        layers[0].bind_kv_cache(pages)
        yield Served(case, engine, layers[0], layers, pages)


def pages_of(layer: Any) -> Tensor:
    shapes = zip(layer.get_state_shape(), layer.get_state_dtype(), strict=True)
    size = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes)
    return torch.full((BLOCKS, size + PADDING), -1, dtype=torch.int8)


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_schedule_gives_what_each_request_gives_alone(
    served: Served, data: st.DataObject
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1 << 20)))
    blocks = data.draw(st.permutations(range(1, BLOCKS)))[:2]

    def run(rows: Rows, packed: list[Tensor]) -> Tensor:
        return served.run(rows, packed, pads=data.draw(st.integers(0, 2)))

    check_any_schedule(data, served.case, blocks, run)


def test_nothing_is_written_outside_the_rows_blocks(served: Served) -> None:
    served.pages.fill_(-1)
    served.run([(3, 0, 5)], served.case.inputs(5), pads=2)
    served.run([(3, 5, 1)], served.case.inputs(1), pads=2)
    others = [block for block in range(BLOCKS) if block != 3]
    assert (served.pages[others] == -1).all()
    assert (served.pages[:, -PADDING:] == -1).all()
    assert (served.pages[3, :-PADDING] != -1).any()


def test_the_null_block_is_never_written_nor_read(served: Served) -> None:
    before = served.pages.clone()
    given_ = served.case.inputs(4)
    assert relative(served.run([(0, 0, 4)], given_), served.case.alone(given_)) < 1e-5
    assert torch.equal(served.pages, before)


def test_tokens_beyond_the_rows_come_out_as_zero(served: Served) -> None:
    given_ = served.case.inputs(6)
    for tensor in given_:
        tensor[4:] = torch.nan
    served.engine.metadata = {served.layer.prefix: metadata([(2, 0, 4)])}
    out = {
        "gdn": lambda: core(served, given_),
        "kda": lambda: served.case.call(served.layer, given_)[4:],
        "mamba2": lambda: scanned(served, given_),
        "short_conv": lambda: served.case.call(served.layer, given_)[4:],
    }[kind(served)]()
    assert torch.equal(out, torch.zeros_like(out))


def kind(served: Served) -> str:
    names = {"gated_delta_net": "gdn", "kimi_delta": "kda"}
    found = str(served.layer.hal_kind)
    return names.get(found, found)


def core(served: Served, given_: list[Tensor]) -> Tensor:
    mixed, a, b, z = given_
    out = torch.zeros_like(z)
    served.layer._forward_core(mixed_qkv=mixed, b=b, a=a, core_attn_out=out)
    return out[4:]


def scanned(served: Served, given_: list[Tensor]) -> Tensor:
    mixed, dt, z = given_
    out = torch.full_like(z, torch.nan)
    served.layer.conv_ssm_forward(torch.cat((z, mixed, dt), dim=-1), out)
    return out[4:]


def test_the_short_conv_is_called_by_either_name() -> None:
    with fake_vllm.installed():
        plugin.register()
        layers = __import__("hal_vllm.layers", fromlist=["HalShortConv"])
        called: list[tuple[object, ...]] = []

        class Recorded(layers.HalShortConv):  # type: ignore[misc, name-defined] # a class of the fake
            def forward_native(self, hidden_states: Tensor, output: Tensor) -> None:
                called.append((hidden_states, output))

        given_ = (torch.zeros(1), torch.zeros(1))
        Recorded.__new__(Recorded).forward_cuda(*given_)
    assert called == [given_]


def test_a_run_without_metadata_moves_no_state(served: Served) -> None:
    before, session = served.pages.clone(), served.layer.hal_session
    calls = session.calls.total()
    for missing in (None, {}):
        served.engine.metadata = missing
        served.case.call(served.layer, served.case.inputs(3))
    assert torch.equal(served.pages, before)
    assert session.calls.total() == calls


def test_calls_are_counted_by_kind_and_mode(served: Served) -> None:
    calls = served.layer.hal_session.calls
    calls.clear()
    served.run([(1, 0, 3)], served.case.inputs(3))
    served.run([(1, 3, 1)], served.case.inputs(1))
    name = str(served.layer.hal_kind)
    assert calls == {(name, str(Mode.MIXED)): 1, (name, str(Mode.DECODE)): 1}


def test_metadata_of_another_backend_is_an_error(served: Served) -> None:
    served.engine.metadata = {served.layer.prefix: object()}
    with pytest.raises(HalError, match="hal's backend did not take"):
        served.case.call(served.layer, served.case.inputs(2))


def test_reloaded_weights_are_bound_anew(served: Served) -> None:
    given_ = served.case.inputs(5)
    conv = vars(served.layer)["_modules"].get("conv1d") or served.layer.conv
    first = served.run([(2, 0, 5)], given_)
    kept = conv.weight.clone()
    conv.weight.mul_(2)
    served.layer.process_weights_after_loading(torch.float32)
    changed = served.run([(2, 0, 5)], given_)
    conv.weight.copy_(kept)
    served.layer.process_weights_after_loading(torch.float32)
    again = served.run([(2, 0, 5)], given_)
    assert relative(changed, first.double()) > 1e-2
    assert torch.equal(again, first)


def test_pages_that_the_engine_moved_are_taken_anew(served: Served) -> None:
    moved, given_ = served.pages.clone(), served.case.inputs(4)
    served.layer.bind_kv_cache(moved)
    before = served.pages.clone()
    served.run([(5, 0, 4)], given_)
    assert torch.equal(served.pages, before)
    assert not torch.equal(moved[5], before[5])
    served.layer.bind_kv_cache(served.pages)


def test_the_engine_keeps_its_own_spec_of_one_state_a_block(served: Served) -> None:
    assert served.layer.get_kv_cache_spec(None) == "stock spec"


def test_a_row_without_tokens_before_others_is_an_error(served: Served) -> None:
    with pytest.raises(ValueError, match="stands before others"):
        metadata([(1, 0, 0), (2, 0, 3)])


def test_a_batch_of_no_rows_is_a_step() -> None:
    with fake_vllm.installed():
        plugin.register()
        step = metadata([(1, 0, 0)]).step
    assert (step.rows, step.tokens) == (0, 0)


def test_a_packed_conv_weight_is_taken_from_where_the_engine_keeps_it() -> None:
    conv = fake_vllm.Linear(6, 1, 4)
    original = torch.randn(6, 4)
    conv.weight.copy_(original[:, None])
    assert torch.equal(conv_weight(conv), original)
    vars(conv)[UNPACKED] = original.clone()
    conv.weight.fill_(torch.nan)
    assert torch.equal(conv_weight(conv), original)


@given(st.floats(-7, 4))
def test_rates_come_back_from_their_negated_exponential(rate: float) -> None:
    A = -torch.tensor([rate]).exp()
    assert float((-log_rates(A).float().exp() / A - 1).abs()) < 1e-6
