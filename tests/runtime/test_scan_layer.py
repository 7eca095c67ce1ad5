"""Scan layers: the norm and gate around them, limits in every mode, heads one by one, binding."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.errors import ProviderError
from hal.model.spec import ScanDims
from hal.runtime.batch import Batch, Mode
from hal.runtime.gates import grouped_norm
from support.backends import backend_for
from support.bound_scan import mamba1, mamba2, scan_alone, scan_layer, scan_params
from support.model_configs import tiny

LIMITED = {"time_step_limit": [0.05, 0.3]}


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether the relative Frobenius error is that of float32."""
    return bool((got.double() - want).norm() <= 1e-5 * want.norm())


@pytest.mark.parametrize("before", [False, True])
@settings(max_examples=10, deadline=None)
@given(cut=st.integers(1, 19), seed=st.integers(0, 99))
def test_the_gate_comes_before_or_after_the_norm_as_bound(
    before: bool, cut: int, seed: int
) -> None:
    torch.manual_seed(seed)
    bound = mamba2(before=before)
    given_ = bound.inputs(20)
    bound.backend.begin(Batch(Mode.EXTEND, [cut], [0], [-1], [3]))
    first = bound.call([t[:cut] for t in given_])
    bound.backend.begin(Batch(Mode.EXTEND, [20 - cut], [cut], [3], [3]))
    out = torch.cat((first, bound.call([t[cut:] for t in given_])))
    assert close(out, bound.alone(given_))


def test_the_norm_takes_each_group_by_itself() -> None:
    """A group of large values leaves the others as they are."""
    y, z, weight = torch.randn(5, 12), torch.randn(5, 12), torch.ones(12)
    small = grouped_norm(y, z, weight, 1e-6, 3, norm_before_gate=True)
    y[:, :4] *= 100
    large = grouped_norm(y, z, weight, 1e-6, 3, norm_before_gate=True)
    torch.testing.assert_close(small, large, rtol=1e-4, atol=1e-4)
    whole = grouped_norm(y, z, weight, 1e-6, 1, norm_before_gate=True)
    assert (whole - large).abs().max() > 0.5


@pytest.mark.parametrize("name", ["bamba", "mamba2", "granitemoehybrid", "falcon_h1"])
def test_the_dt_limit_binds_in_prefill_and_decode_alike(name: str) -> None:
    bound = mamba2(tiny(name, **LIMITED))
    given_ = bound.inputs(12)
    outs = []
    for start, length, mode in ((0, 9, Mode.EXTEND), (9, 1, Mode.DECODE), (10, 2, Mode.MIXED)):
        src = -1 if start == 0 else 2
        bound.backend.begin(Batch(mode, [length], [start], [src], [2]))
        outs.append(bound.call([t[start : start + length] for t in given_]))
    assert close(torch.cat(outs), bound.alone(given_))
    unlimited = mamba2(tiny(name)).alone(given_)
    assert not close(torch.cat(outs), unlimited)


def test_heads_are_views_of_one_state_and_of_its_weights() -> None:
    _, layer = scan_layer(tiny("zamba"))
    heads, width = layer.heads(), layer.dims.P
    assert len(heads) == layer.dims.H == 2
    for i, head in enumerate(heads):
        cut = slice(i * width, (i + 1) * width)
        assert head.state.data_ptr() == layer.state[:, cut].data_ptr()
        assert torch.equal(head.A, layer.A[cut])
        assert (head.dims.H, head.dims.P, head.dims.G) == (1, width, 1)
        assert head.heads() == (head,)


def test_heads_scanned_out_of_order_leave_each_other_alone() -> None:
    torch.manual_seed(1)
    bound = mamba1("zamba")
    backend, layer = scan_layer(tiny("zamba"))
    x, dt, B, C, _ = bound.inputs(6)
    backend.begin(Batch(Mode.EXTEND, [6], [0], [-1], [1]))
    parts = {}
    for i in (1, 0):
        head, cut = layer.heads()[i], slice(i * layer.dims.P, (i + 1) * layer.dims.P)
        parts[i] = head.scan(x[:, cut], dt[:, cut], B[:, i : i + 1], C[:, i : i + 1])
    assert close(torch.cat((parts[0], parts[1]), -1), scan_alone(layer, x, dt, B, C, None))


def test_a_layer_without_a_conv_says_so() -> None:
    _, layer = scan_layer(tiny("minimax"))
    with pytest.raises(ValueError, match="this scan layer has no conv"):
        layer.conv(torch.zeros(1, 4))


def test_rates_are_float32_whatever_the_weights_are() -> None:
    backend = backend_for(tiny("bamba"))
    spec = next(backend.selection.model.stateful_layers())
    assert isinstance(spec.dims, ScanDims)
    params = scan_params(spec.dims)
    names = ("A_log", "D", "dt_bias")
    layer = backend.layer(
        spec.index, replace(params, **{n: getattr(params, n).bfloat16() for n in names})
    )
    assert layer.A.dtype == layer.params.D.dtype == layer.params.dt_bias.dtype == torch.float32


@pytest.mark.parametrize("name", ["bamba", "mamba", "zamba", "minimax"])
@pytest.mark.parametrize("part", ["A_log", "D", "dt_bias", "conv_weight"])
def test_weights_of_another_shape_are_refused_with_both_shapes(name: str, part: str) -> None:
    backend = backend_for(tiny(name))
    spec = next(backend.selection.model.stateful_layers())
    assert isinstance(spec.dims, ScanDims)
    params = scan_params(spec.dims)
    held = getattr(params, part)
    if held is None:
        return
    text = rf"layer 0: {part.replace('_weight', ' weight')} is \[{held.shape[0] - 1}"
    with pytest.raises(ValueError, match=text):
        backend.layer(spec.index, replace(params, **{part: held[1:]}))


def test_a_conv_that_the_model_has_must_be_given() -> None:
    backend = backend_for(tiny("bamba"))
    spec = next(backend.selection.model.stateful_layers())
    assert isinstance(spec.dims, ScanDims)
    with pytest.raises(ValueError, match="layer 0: conv weight is missing, width is 4"):
        backend.layer(spec.index, replace(scan_params(spec.dims), conv_weight=None))


@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.EXTEND])
def test_a_raw_provider_error_carries_operation_shapes_and_cause(mode: Mode) -> None:
    backend, layer = scan_layer(tiny("bamba"))
    backend.begin(Batch(mode, [1], [0], [-1], [1]))

    class Failing:
        def prefill(self, *given: object, **options: object) -> torch.Tensor:
            raise RuntimeError("inner error 507018")

        decode = prefill

    layer.prefill = layer.decode = Failing()
    dims = layer.dims
    x, B = torch.zeros(1, dims.H, dims.P), torch.zeros(1, dims.G, dims.N)
    with pytest.raises(ProviderError, match=r"scan failed on inputs \[1, 8, 16\]") as caught:
        layer.scan(x, torch.zeros(1, dims.H), B, B)
    assert isinstance(caught.value.__cause__, RuntimeError)
