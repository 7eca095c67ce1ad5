"""Where a provider fuses a whole layer the layer calls that, and gives what the pieces give."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import hal
from hal.model.spec import GateKind
from hal.runtime.batch import Batch, Mode
from hal.runtime.layers import DeltaLayer
from hal_cpu.plugin import MANIFEST
from hal_registry import Manifest, Registry
from support.backends import Bound, selected_with
from support.bound import FAMILIES
from support.fused_provider import CALLS

KINDS = ("gated_delta_net", "kimi_delta", "safe_delta")
PREFILL = MANIFEST.offers["delta_rule.prefill"]
DECODE = replace(
    MANIFEST.offers["delta_rule.decode"],
    layouts=("VK", "CW"),
    activations=("silu",),
    widths=range(2, 9),
)
FUSED = {"delta_rule.decode_fused": DECODE, "delta_rule.prefill_fused": PREFILL}


def manifest(**more: object) -> Manifest:
    """The CPU manifest with the fused operations."""
    fields = {"load": "support.fused_provider:FusedProvider", "proofs": (), **more}
    return replace(MANIFEST, offers={**MANIFEST.offers, **FUSED}, **fields)


@pytest.fixture(autouse=True)
def _no_calls() -> Iterator[None]:
    CALLS.clear()
    yield


def made(kind: str, **options: object) -> Bound:
    with selected_with(registry=Registry.of(manifest()), **options):
        return FAMILIES[kind]()


def run(bound: Bound, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """A prompt, a mixed step with a fork, and a decode step with a pad."""
    steps = [
        (Batch(Mode.EXTEND, [5, 3], [0, 0], [-1, -1], [1, 2]), slice(0, 8)),
        (Batch(Mode.MIXED, [1, 2], [5, 3], [1, 2], [1, 4]), slice(8, 11)),
        (Batch(Mode.DECODE, [1, 1], [6, 0], [1, -1], [1, -1]), slice(11, 13)),
    ]
    outputs = []
    for batch, tokens in steps:
        bound.backend.begin(batch)
        outputs.append(bound.call([tensor[tokens] for tensor in given]))
    return outputs


@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_layer_gives_what_its_pieces_give(kind: str) -> None:
    fused, plain = made(kind), FAMILIES[kind]()
    given = plain.inputs(13)
    for got, want in zip(run(fused, given), run(plain, given), strict=True):
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-6)
    assert CALLS == ["prefill", "prefill", "decode"]
    layer = next(fused.backend.selection.model.stateful_layers()).index
    states = [bound.backend.pool.tensors(layer) for bound in (fused, plain)]
    for name in states[0]:
        a, b = (tensors[name].nan_to_num(7) for tensors in states)
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_fused_decode_row_is_tracked_and_runs_once() -> None:
    bound = made("gated_delta_net", prefix_cache=True)
    bound.backend.begin(Batch(Mode.EXTEND, [5], [0], [-1], [2]))
    bound.call(bound.inputs(5))
    bound.backend.begin(Batch(Mode.DECODE, [1], [5], [2], [2], track=[(0, 6, 4)]))
    bound.call(bound.inputs(1))
    layer = next(bound.backend.selection.model.stateful_layers()).index
    for tensor in bound.backend.pool.tensors(layer).values():
        assert torch.equal(tensor[4], tensor[2])
    with pytest.raises(hal.StepOrderError, match="ran twice in one step"):
        bound.call(bound.inputs(1))


def test_of_another_provider_than_the_convs_the_fused_prefill_alone_is_taken() -> None:
    """A decode's conv weights would be laid out by the one and read by the other."""
    only = manifest(name="cpu.fused", priority=-0)
    only = replace(only, offers=FUSED)
    both = Registry.of(MANIFEST, only)
    with selected_with(registry=both):
        bound = FAMILIES["gated_delta_net"]()
    run(bound, bound.inputs(13))
    assert CALLS == ["prefill", "prefill"]


def test_a_layer_whose_gate_comes_ready_made_is_not_fused() -> None:
    bound = made("gated_delta_net")
    layer = bound.call.__closure__
    assert layer is not None
    found = next(c.cell_contents for c in layer if isinstance(c.cell_contents, DeltaLayer))
    assert set(found.fused) == {Mode.DECODE, Mode.EXTEND, Mode.MIXED, Mode.DRAFT_EXTEND}
    assert found.dims.gate is GateKind.SCALAR
    bare = replace(found, params=replace(found.params, gate=None))
    bound.backend.begin(Batch(Mode.EXTEND, [2], [0], [-1], [1]))
    x, a, b, z = bound.inputs(2)
    bare(x, -a.abs(), torch.sigmoid(b), z)
    assert CALLS == []
