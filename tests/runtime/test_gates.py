"""Gates made by the runtime equal the oracle's, and a provider that fuses none loses nothing."""

from dataclasses import replace

import pytest
import torch

from hal import reference
from hal.interfaces import Gate
from hal.model.spec import DeltaDims, GateKind
from hal.runtime.batch import Batch, Mode
from hal.runtime.gates import gated_norm, ready
from hal.runtime.layers import DeltaLayer
from hal_cpu.plugin import MANIFEST
from hal_registry import Registry
from support.bound import GDN_CONFIG, backend_for, delta_params

HEADS, K, TOKENS = 4, 6, 9
SHAPES = {GateKind.SCALAR: (HEADS,), GateKind.CHANNEL: (HEADS, K), GateKind.SAFE: (HEADS, K)}


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("kind", list(GateKind))
def test_ready_gates_equal_the_oracle_on_both_sides_of_the_softplus_step(
    kind: GateKind, scale: float
) -> None:
    shape = SHAPES[kind]
    bound = -5.0 if kind is GateKind.SAFE else None
    gate = Gate(kind, torch.randn(HEADS), torch.randn(shape), bound, beta_scale=2.0)
    a, b = torch.randn(TOKENS, *shape) * scale, torch.randn(TOKENS, HEADS) * scale
    g, beta = ready(gate, a, b)
    want_g, want_beta = reference.gates(a, b, gate)
    assert g.dtype == beta.dtype == torch.float32
    assert torch.allclose(g.double(), want_g.reshape(g.shape), rtol=1e-5, atol=1e-8)
    assert torch.allclose(beta.double(), want_beta, rtol=1e-5)
    assert (g <= 0).all() and beta.max() > 1


@pytest.mark.parametrize("bound", [None, 0.0, 5.0])
def test_a_safe_gate_needs_a_negative_bound(bound: float | None) -> None:
    with pytest.raises(ValueError, match="lower_bound must be negative"):
        Gate(GateKind.SAFE, torch.zeros(1), torch.zeros(1, 1), bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", list(GateKind))
def test_the_gated_norm_equals_the_oracle_with_one_rounding(
    kind: GateKind, dtype: torch.dtype
) -> None:
    o, z = torch.randn(2, TOKENS, HEADS, 12).to(dtype)
    weight = torch.rand(12) + 0.5
    activation = "silu" if kind is GateKind.SCALAR else "sigmoid"
    want = reference.gated_rms_norm(o, z, weight, 1e-5, activation=activation)
    got = gated_norm(o, z, weight, 1e-5, kind)
    assert got.dtype == dtype
    limit = 1e-5 if dtype == torch.float32 else 4e-3
    assert float((got.double() - want).norm() / want.norm()) < limit


def layer_of(gates: tuple[str, ...]) -> tuple[DeltaLayer, object]:
    """A layer on a CPU provider that offers only these gates."""
    offers = {
        name: replace(offer, gates=gates) if offer.gates else offer
        for name, offer in MANIFEST.offers.items()
    }
    backend = backend_for(GDN_CONFIG, registry=Registry.of(replace(MANIFEST, offers=offers)))
    spec = next(backend.selection.model.stateful_layers())
    assert isinstance(spec.dims, DeltaDims)
    layer = backend.layer(spec.index, delta_params(spec.dims))
    assert isinstance(layer, DeltaLayer)
    backend.begin(Batch(Mode.EXTEND, [5], [0], [-1], [1]))
    return layer, backend


def test_a_provider_without_a_fused_gate_gets_it_ready_made() -> None:
    fused, _one = layer_of(("scalar", "ready_scalar"))
    bare, _two = layer_of(("ready_scalar",))
    assert fused.fuses_gate and not bare.fuses_gate
    dims = fused.dims
    x = torch.randn(5, sum(size for _, size in dims.segments))
    a, b = torch.randn(2, 5, dims.HV)
    assert torch.allclose(fused(x, a, b), bare(x, a, b), rtol=1e-4, atol=1e-6)
