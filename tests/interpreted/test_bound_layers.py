"""Layers bound to the interpreted kernels equal the oracle, whatever the steps."""

from dataclasses import replace

import pytest
import torch

from hal_cuda.plugin import MANIFEST
from hal_registry import Registry
from support import device_bound as bound

HERE = bound.Place(
    "cpu",
    Registry.of(
        replace(
            MANIFEST,
            name="cpu.triton",
            device="cpu",
            load="hal_triton.provider:TritonProvider",
            probe="",
            needs=(),
            arches=(),
            proofs=(),
        )
    ),
)
"""The declaration of the NVIDIA provider, on tensors of the host."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bound_delta_layer_equals_the_oracle_in_every_mode(dtype: torch.dtype) -> None:
    bound.delta(HERE, dtype).run()


def test_a_bound_short_conv_layer_equals_the_oracle_in_every_mode() -> None:
    bound.short_conv(HERE, torch.float32).run()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bound_cca_layer_equals_the_oracle_in_every_mode(dtype: torch.dtype) -> None:
    bound.cca(HERE, dtype).run()
