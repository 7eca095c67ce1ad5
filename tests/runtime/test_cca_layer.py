"""CCA: the second convolution sees the first one's bias, and a row's past is its own."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.interfaces import ConvStep
from hal.model.spec import CcaDims
from hal.runtime.batch import Batch, Mode
from hal.runtime.cca_layer import CcaLayer
from hal.runtime.params import CcaParams
from support.backends import backend_for
from support.bound_scan import cca, cca_alone, cca_params
from support.model_configs import tiny


def bind(name: str = "zaya", **options: object) -> tuple[CcaLayer, CcaDims]:
    """A bound layer of the tiny model."""
    backend = backend_for(tiny(name), **options)
    spec = next(backend.selection.model.stateful_layers())
    assert isinstance(spec.dims, CcaDims)
    layer = backend.layer(spec.index, cca_params(spec.dims))
    assert isinstance(layer, CcaLayer)
    backend.begin(Batch(Mode.EXTEND, [3], [0], [-1], [1]))
    return layer, spec.dims


def test_the_first_token_sees_the_bias_of_the_first_stage_behind_it() -> None:
    """Two convolutions that are padded one by one would give another first token."""
    layer, dims = bind()
    r = torch.randn(3, dims.channels)
    out, _ = layer(r, torch.zeros(3, dims.hidden))
    params, conv = layer.params, torch.nn.functional.conv1d
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
    """The same pool seen with its axes swapped gives the same bits."""
    layer, dims = bind()
    held = layer.sidecar.step(0)
    window, hidden = held.tensors

    class Swapped:
        def step(self, layer_id: int) -> ConvStep:
            return replace(held, tensors=(window.transpose(1, 2), hidden))

    swapped = replace(layer, layout="WC", sidecar=Swapped())
    r, h = torch.randn(3, dims.channels), torch.randn(3, dims.hidden)
    first, kept = layer(r, h), window[1].clone()
    second = swapped(r, h)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(window[1], kept) and not kept.isnan().any()


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


def test_bfloat16_is_rounded_once() -> None:
    """The float32 result of the same rounded inputs, rounded: no rounding between the stages."""
    half, dims = bind(dtype="bfloat16")
    r, h = torch.randn(3, dims.channels).bfloat16(), torch.randn(3, dims.hidden).bfloat16()
    out, before = half(r, h)
    want = cca_alone(half.params, dims, r.double())
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
