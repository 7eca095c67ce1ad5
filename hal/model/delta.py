"""Dims of delta-rule layers, shared by the families that have them."""

from typing import Final

from hal.model.fields import Fields
from hal.model.spec import DeltaDims, GateKind

MAX_WIDTH: Final = 256
"""Widest convolution that is taken for real."""


def gated_delta(
    fields: Fields, H: int, HV: int, K: int, V: int, beta_scale: float = 1.0
) -> DeltaDims:
    """Make Gated DeltaNet dims; the value heads share the key heads evenly."""
    if HV % H:
        raise fields.error("linear_num_value_heads", f"a multiple of {H} key heads", str(HV))
    width = fields.integer("linear_conv_kernel_dim", high=MAX_WIDTH)
    return DeltaDims(H, HV, K, V, W=width, beta_scale=beta_scale)


def kimi_delta(heads: int, dim: int, width: int, bound: float | None) -> DeltaDims:
    """Make Kimi Delta dims: one head count and one dim; the gate is safe where it has a bound."""
    gate = GateKind.CHANNEL if bound is None else GateKind.SAFE
    return DeltaDims(heads, heads, dim, dim, width, gate=gate, lower_bound=bound)


def lower_bound(fields: Fields, name: str) -> float | None:
    """Read the lower bound of a safe gate, a negative log decay."""
    value = fields.number(name)
    if value is not None and not -1e6 < value < 0:
        raise fields.error(name, "a negative number")
    return value
