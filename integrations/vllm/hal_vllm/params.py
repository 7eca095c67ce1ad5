"""Weights of vLLM's layers in the form that `hal` binds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal.interfaces import Gate

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hal.model.spec import DeltaDims

UNPACKED = "_cpu_unpacked_conv_weight"
"""Where the CPU engine keeps a conv weight that it packed in place at load."""


def conv_weight(conv: nn.Module) -> Tensor:
    """A conv's weight `[C, W]` as it was in the checkpoint; vLLM holds `[C, 1, W]`."""
    weight: Tensor = vars(conv).get(UNPACKED, conv.weight)
    return weight.view(weight.shape[0], weight.shape[-1])


def model_gate(dims: DeltaDims, A_log: Tensor, dt_bias: Tensor) -> Gate:
    """The gate of the model's kind over this rank's rates and biases."""
    return Gate(dims.gate, A_log.float(), dt_bias.float(), dims.lower_bound, dims.beta_scale)


def log_rates(A: Tensor) -> Tensor:
    """A_log of rates that are kept as A = -exp(A_log); float64, so that A comes back."""
    return (-A.detach().double()).log()
