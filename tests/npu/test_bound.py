"""Bound layers over the fake vendor do what they do over the CPU provider, mode after mode."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import hal
from hal.model.spec import DeltaDims
from hal.runtime.batch import Batch, Mode
from hal_cpu.plugin import MANIFEST as CPU
from hal_npu.plugin import MANIFEST as NPU
from hal_registry import Manifest, Registry
from support.bound import GDN_CONFIG, delta_params

CONFIG = GDN_CONFIG | {"linear_key_head_dim": 16, "linear_value_head_dim": 24}
FAKE = replace(
    NPU,
    name="cpu.fake",
    device="cpu",
    load="npu.fakes:on_cpu",
    probe="",
    needs=(),
    arches=(),
    proofs=(),
)
STEPS = (
    Batch(Mode.EXTEND, [5, 3], [0, 0], [-1, -1], [1, 2], track=[(0, 4, 5)]),
    Batch(Mode.DECODE, [1, 1], [5, 3], [1, 2], [1, 2]),
    Batch(Mode.MIXED, [1, 70], [6, 4], [1, 5], [1, 3]),
    Batch(Mode.VERIFY, [3, 3, 2], [7, 4, 74], [1, 2, 3], [1, 4, 3]),
    Batch(Mode.DECODE, [1, 1, 1], [9, 5, 76], [1, 4, 3], [1, 4, 3]),
)
ACCEPTED = [2, 1, 2]


def results(manifest: Manifest, layouts: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The outputs of every step of one layer, and its states at the end."""
    recurrent = replace(
        manifest,
        offers={
            name: replace(offer, layouts=[x for x in offer.layouts if x in (layouts, "CW")])
            for name, offer in manifest.offers.items()
        },
    )
    selection = hal.select(
        "cpu", CONFIG, dtype="bfloat16", speculative=hal.Speculative(width=3), prefix_cache=True,
        registry=Registry.of(recurrent),
    )  # fmt: skip
    backend = selection.backend(slots=6, max_batch=4, max_tokens=128)
    spec = next(selection.model.stateful_layers())
    dims = spec.dims
    assert isinstance(dims, DeltaDims)
    layer = backend.layer(spec.index, delta_params(dims))
    gen = torch.Generator().manual_seed(3)
    given = []
    for batch in STEPS:
        backend.begin(batch)
        tokens = sum(batch.lengths)
        sizes = ((sum(n for _, n in dims.segments),), (dims.HV,), (dims.HV,), (dims.HV, dims.V))
        made = [torch.randn(tokens, *size, generator=gen).bfloat16() for size in sizes]
        given.append(layer(*made))
        if batch.mode is Mode.VERIFY:
            backend.commit(ACCEPTED)
    return given, backend.pool.tensors(spec.index)


@pytest.mark.parametrize("layout", ["VK", "KV"])
def test_every_mode_gives_what_the_cpu_gives(layout: str) -> None:
    mine, states = results(FAKE, layout)
    right, ends = results(CPU, layout)
    for got, want in zip(mine, right, strict=True):
        torch.testing.assert_close(got, want, rtol=5e-2, atol=5e-2)
    assert torch.equal(states["conv"], ends["conv"])
    torch.testing.assert_close(states["recurrent"], ends["recurrent"], rtol=2e-2, atol=2e-2)
