"""CCA: the second convolution sees the first one's bias, and a row's past is its own."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hal
from hal.errors import ProviderError, StepOrderError
from hal.interfaces import ConvStep
from hal.model.spec import CcaDims
from hal.runtime.backend import Backend
from hal.runtime.batch import Batch, Mode
from hal.runtime.cca_layer import CcaLayer
from hal.runtime.params import CcaParams
from hal_cpu.plugin import MANIFEST
from hal_registry import Registry
from support.backends import backend_for
from support.bound_scan import cca, cca_alone, cca_params
from support.model_configs import tiny

WIDTH = 3
Change = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def bound_to(backend: Backend) -> tuple[CcaLayer, CcaDims]:
    """The first layer of the backend's model, with random weights."""
    spec = next(backend.selection.model.stateful_layers())
    assert isinstance(spec.dims, CcaDims)
    layer = backend.layer(spec.index, cca_params(spec.dims))
    assert isinstance(layer, CcaLayer)
    return layer, spec.dims


def bind(name: str = "zaya", **options: object) -> tuple[CcaLayer, CcaDims]:
    """A bound layer of the tiny model, in a step of three fresh tokens."""
    backend = backend_for(tiny(name), **options)
    layer, dims = bound_to(backend)
    backend.begin(Batch(Mode.EXTEND, [3], [0], [-1], [1]))
    return layer, dims


def inputs(dims: CcaDims, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random r and h."""
    rng = torch.Generator().manual_seed(seed)
    r, h = (torch.randn(tokens, n, generator=rng) for n in (dims.channels, dims.hidden))
    return r, h


def stage_one(params: CcaParams, dims: CcaDims, r: torch.Tensor) -> torch.Tensor:
    """The depthwise stage over the row behind its zeros, `[T + t1 - 1, C]`, by torch's own."""
    x = torch.nn.functional.pad(r.T[None], (dims.carry, 0))
    weight = params.depthwise_weight.to(r.dtype).unsqueeze(1)
    bias = params.depthwise_bias.to(r.dtype)
    return torch.nn.functional.conv1d(x, weight, bias, groups=dims.channels)[0].T


def stage_two(params: CcaParams, dims: CcaDims, first: torch.Tensor) -> torch.Tensor:
    """The grouped stage over the first one's outputs, `[T, C]`."""
    weight, bias = (t.to(first.dtype) for t in (params.grouped_weight, params.grouped_bias))
    x = first.T[None]
    return torch.nn.functional.conv1d(x, weight, bias, groups=dims.HQ + dims.HKV)[0].T


def test_the_first_token_sees_the_bias_of_the_first_stage_behind_it() -> None:
    """Two convolutions that are padded one by one would give another first token."""
    layer, dims = bind()
    r = torch.randn(3, dims.channels)
    out, _ = layer(r, torch.zeros(3, dims.hidden))
    params, conv = cca_params(dims), torch.nn.functional.conv1d
    first = conv(
        torch.nn.functional.pad(r.T[None], (1, 0)),
        params.depthwise_weight.unsqueeze(1), params.depthwise_bias, groups=dims.channels,
    )  # fmt: skip
    apart = conv(
        torch.nn.functional.pad(first, (1, 0)), params.grouped_weight, params.grouped_bias,
        groups=dims.HQ + dims.HKV,
    )[0].T  # fmt: skip
    assert (out[0] - apart[0]).abs().max() > 0.1
    torch.testing.assert_close(out[1:], apart[1:], rtol=1e-4, atol=1e-4)


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=8), seed=st.integers(0, 99))
def test_states_hold_the_last_inputs_exactly(sizes: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    bound = cca()
    r, h = bound.inputs(sum(sizes))
    done, pool = 0, bound.backend.pool
    for size in sizes:
        bound.backend.begin(Batch(Mode.MIXED, [size], [done], [5 if done else -1], [5]))
        bound.call([r[done : done + size], h[done : done + size]])
        done += size
    if not done:
        return
    held = pool.tensors(0)
    carry = held["conv"].shape[-1]
    padded = torch.cat((torch.zeros(carry, r.shape[1]), r))
    assert torch.equal(held["conv"][5], padded[-carry:].T)
    assert torch.equal(held["hidden"][5], h[-1])
    assert held["conv"][1:5].isnan().all() and held["hidden"][6].isnan().all()


def test_a_window_with_time_first_is_read_and_written_alike() -> None:
    """A provider of the other layout gives the same bits, on a pool with its axes swapped."""
    offers = {op: replace(offer, layouts=("WC",)) for op, offer in MANIFEST.offers.items()}
    registry, found = Registry.of(replace(MANIFEST, offers=offers)), []
    for options in ({}, {"registry": registry}):
        backend = backend_for(tiny("zaya"), speculative=hal.Speculative(WIDTH), **options)
        layer, dims = bound_to(backend)
        r, h = inputs(dims, 7)
        backend.begin(Batch(Mode.EXTEND, [3], [0], [-1], [1]))
        outs = [*layer(r[:3], h[:3])]
        backend.begin(Batch(Mode.VERIFY, [WIDTH], [3], [1], [1]))
        outs += layer(r[3:6], h[3:6])
        backend.commit([2])
        backend.begin(Batch(Mode.DECODE, [1], [5], [1], [2]))
        outs += layer(r[6:], h[6:])
        found.append((outs, backend.pool.tensors(0)))
    (first, held), (second, other) = found
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(held["conv"][1:3], other["conv"][1:3].transpose(1, 2))
    assert torch.equal(held["hidden"][1:3], other["hidden"][1:3])
    assert not held["conv"][1:3].isnan().any()


def test_a_fresh_decode_between_pads_sees_the_bias() -> None:
    """Stages that leave no window would take a fresh row for padding."""
    backend = backend_for(tiny("zaya", cca_time0=3, cca_time1=4))
    layer, dims = bound_to(backend)
    r, h = inputs(dims, 3)
    r[[0, 2]], h[[0, 2]] = float("nan"), float("nan")
    backend.begin(Batch(Mode.DECODE, [0, 1, 0], [0, 0, 0], [-1, -1, -1], [-1, 4, -1]))
    out, before = layer(r, h)
    want = cca_alone(cca_params(dims), dims, r[1:2].double())
    torch.testing.assert_close(out[1:2].double(), want, rtol=1e-5, atol=1e-5)
    assert not out[[0, 2]].any()
    assert not before.any()


def test_a_commit_writes_both_states_of_the_path() -> None:
    """Both tensors end as those of the prefix run alone, in the target and nowhere else."""
    backend = backend_for(tiny("zaya"), speculative=hal.Speculative(4, tree=True))
    layer, dims = bound_to(backend)
    r, h = inputs(dims, 7)
    backend.begin(Batch(Mode.EXTEND, [3], [0], [-1], [1]))
    layer(r[:3], h[:3])
    backend.begin(Batch(Mode.VERIFY, [4], [3], [1], [2], parents=[[-1, -1, 1, 0]]))
    layer(r[3:], h[3:])
    backend.commit([2], tips=[3])
    path = [0, 1, 2, 3, 6]
    backend.begin(Batch(Mode.EXTEND, [5], [0], [-1], [6]))
    layer(r[path], h[path])
    for tensor in backend.pool.tensors(0).values():
        assert torch.equal(tensor[2], tensor[6])
        assert tensor[3:6].isnan().all()
        assert not torch.equal(tensor[1], tensor[2])


def test_scratch_is_what_the_provider_asks_for_each_state() -> None:
    """One set for the window and one for the hidden state, a window of one input."""
    layer, dims = bind(speculative=hal.Speculative(WIDTH))
    assert layer.draft is not None and layer.hidden_draft is not None
    tokens = 8 * WIDTH
    assert [t.shape for t in layer.draft.scratch] == [(tokens, dims.channels), (tokens,)]
    assert [t.shape for t in layer.hidden_draft.scratch] == [(tokens, dims.hidden), (tokens,)]


def test_without_speculation_there_is_no_scratch_and_no_commit() -> None:
    layer, _ = bind()
    assert layer.verify is layer.draft is layer.hidden_draft is None
    with pytest.raises(StepOrderError, match="verify and commit need a selection with speculative"):
        layer.commit(layer.current.get(), torch.zeros(1, dtype=torch.int32))


@pytest.mark.parametrize("part", [0, 1])
def test_a_sidecar_that_gives_another_state_is_refused(part: int) -> None:
    layer, dims = bind()
    held = layer.sidecar.step(0)
    tensors = tuple(t.clone() if i == part else t for i, t in enumerate(held.tensors))

    class Other:
        def step(self, layer_id: int) -> ConvStep:
            return replace(held, tensors=tensors)

    with pytest.raises(ProviderError, match=r"conv_state\.step gave another state for layer 0"):
        replace(layer, sidecar=Other())(*inputs(dims, 3))
    assert all(t.isnan().all() for t in held.tensors)


class Failing:
    """A convolution whose library raises."""

    def prefill(self, *given: object, **options: object) -> torch.Tensor:
        """Raise what a driver raises."""
        raise RuntimeError("inner error 507018")

    decode = verify = prefill


@pytest.mark.parametrize(
    ("mode", "name"), [(Mode.DECODE, "cca"), (Mode.EXTEND, "cca"), (Mode.VERIFY, r"cca\.verify")]
)
def test_a_raw_provider_error_carries_operation_shapes_and_cause(mode: Mode, name: str) -> None:
    backend = backend_for(tiny("zaya"), speculative=hal.Speculative(WIDTH))
    layer, dims = bound_to(backend)
    assert layer.verify is not None
    names = ("prefill", "decode", "verify")
    parts = {name: replace(getattr(layer, name), conv=Failing()) for name in names}
    backend.begin(Batch(mode, [1], [0], [-1], [1]))
    text = rf"{name} failed on inputs \[1, {dims.channels}\] torch.float32"
    with pytest.raises(ProviderError, match=text) as caught:
        replace(layer, **parts)(*inputs(dims, 1))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_tracked_positions_hold_the_states_of_the_prefix_run_alone() -> None:
    _, dims = bind()
    backend = backend_for(tiny("zaya"), prefix_cache=True)
    layer = backend.layer(0, cca_params(dims))
    r, h = torch.randn(9, dims.channels), torch.randn(9, dims.hidden)
    rows = Batch(Mode.EXTEND, [3, 6], [0, 0], [-1, -1], [1, 2], track=[(1, 5, 3), (1, 1, 4)])
    backend.begin(rows)
    layer(r, h)
    for count, tracked in ((5, 3), (1, 4)):
        backend.begin(Batch(Mode.EXTEND, [count], [0], [-1], [6]))
        layer(r[3 : 3 + count], h[3 : 3 + count])
        for tensor in backend.pool.tensors(0).values():
            assert torch.equal(tensor[tracked], tensor[6])


def test_a_tracked_decode_keeps_both_states() -> None:
    backend = backend_for(tiny("zaya"), prefix_cache=True)
    layer, dims = bound_to(backend)
    r, h = inputs(dims, 4)
    backend.begin(Batch(Mode.EXTEND, [3], [0], [-1], [1]))
    layer(r[:3], h[:3])
    backend.begin(Batch(Mode.DECODE, [1], [3], [1], [1], track=[(0, 4, 5)]))
    layer(r[3:], h[3:])
    backend.begin(Batch(Mode.EXTEND, [4], [0], [-1], [2]))
    layer(r, h)
    for tensor in backend.pool.tensors(0).values():
        assert torch.equal(tensor[5], tensor[2])


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda r, h: (r[:, 1:], h), ValueError, r"layer call: r is \[3, 95\], expected \[3, 96\]"),
        (lambda r, h: (r, h[1:]), ValueError, r"layer call: h is \[2, 64\], expected \[3, 64\]"),
        (lambda r, h: (r, h.double()), TypeError, "layer call: h is torch.float64, selected for"),
    ],
)
def test_inputs_of_another_shape_or_dtype_are_refused_before_a_state_moves(
    change: Change, error: type[Exception], text: str
) -> None:
    layer, dims = bind()
    with pytest.raises(error, match=text):
        layer(*change(*inputs(dims, 3)))
    assert layer.prefill.window.isnan().all() and layer.prefill.hidden.isnan().all()


def test_weights_that_carry_gradients_leave_none_on_results_or_states() -> None:
    backend = backend_for(tiny("zaya"))
    _, dims = bind()
    full = cca_params(dims)
    weights = {n: torch.nn.Parameter(getattr(full, n)) for n in CcaParams.__slots__}
    layer = backend.layer(0, CcaParams(**weights))
    backend.begin(Batch(Mode.EXTEND, [3], [0], [-1], [1]))
    results = (*layer(*inputs(dims, 3)), *backend.pool.tensors(0).values())
    assert not any(tensor.requires_grad for tensor in results)


def test_a_layer_runs_once_a_step() -> None:
    layer, dims = bind()
    layer(*inputs(dims, 3))
    with pytest.raises(StepOrderError, match="the CCA of a layer ran twice in one step"):
        layer(*inputs(dims, 3))


@pytest.mark.parametrize("missing", ["depthwise_bias", "grouped_bias"])
def test_a_bias_may_be_absent(missing: str) -> None:
    backend = backend_for(tiny("zaya"))
    spec = next(backend.selection.model.stateful_layers())
    dims = spec.dims
    assert isinstance(dims, CcaDims)
    full = cca_params(dims)
    zero = torch.zeros(dims.channels)
    given_ = {n: getattr(full, n) for n in CcaParams.__slots__}
    layer = backend.layer(spec.index, CcaParams(**{**given_, missing: None}))
    backend.begin(Batch(Mode.EXTEND, [4], [0], [-1], [1]))
    r = torch.randn(4, dims.channels)
    out, _ = layer(r, torch.zeros(4, dims.hidden))
    want = cca_alone(CcaParams(**{**given_, missing: zero}), dims, r.double())
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_rounded_after_each_stage_and_nowhere_else() -> None:
    """ZAYA's own modules round as often; the delay is exact."""
    half, dims = bind(dtype="bfloat16")
    r, h = (tensor.bfloat16() for tensor in inputs(dims, 3))
    out, before = half(r, h)
    params = cca_params(dims)
    first = stage_one(params, dims, r.double()).bfloat16().double()
    want = stage_two(params, dims, first)
    assert out.dtype == before.dtype == torch.bfloat16
    assert ((out.double() - want).norm() / want.norm()).item() < 2**-8
    assert torch.equal(before[1:], h[:-1]) and not before[0].any()


@pytest.mark.parametrize("name", list(CcaParams.__slots__))
def test_weights_of_another_shape_are_refused_with_both_shapes(name: str) -> None:
    backend = backend_for(tiny("zaya"))
    spec = next(backend.selection.model.stateful_layers())
    assert isinstance(spec.dims, CcaDims)
    full = cca_params(spec.dims)
    given_ = {n: getattr(full, n) for n in CcaParams.__slots__}
    text = rf"layer 0: {name.replace('_', ' ')} is \[95"
    with pytest.raises(ValueError, match=text):
        backend.layer(spec.index, CcaParams(**{**given_, name: given_[name][1:]}))
