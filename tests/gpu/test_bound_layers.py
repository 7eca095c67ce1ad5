"""Layers bound through `hal.select` on the device equal the oracle, whatever the steps."""

import pytest
import torch

from support import device_bound as bound
from support import device_checks as checks

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dtype", checks.FLOATS)
def test_a_bound_delta_layer_equals_the_oracle_in_every_mode(dtype: torch.dtype) -> None:
    bound.delta(bound.Place(), dtype).run()


@pytest.mark.parametrize("dtype", checks.FLOATS)
def test_a_bound_short_conv_layer_equals_the_oracle_in_every_mode(dtype: torch.dtype) -> None:
    bound.short_conv(bound.Place(), dtype).run()


def test_a_selection_names_the_arch_it_found() -> None:
    backend = bound.Place().backend(bound.DELTA_CONFIG, torch.bfloat16, track=False)
    assert backend.selection.choices["delta_rule.decode"].provider == "cuda.triton"
    assert backend.pool.device.type == "cuda"
