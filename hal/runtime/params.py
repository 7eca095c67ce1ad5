"""The weights of a linear layer, sharded and as loaded; a backend binds them once."""

from dataclasses import dataclass

from torch import Tensor

from hal.interfaces import Gate


@dataclass(frozen=True, slots=True, eq=False)
class DeltaParams:
    """A delta-rule layer: conv_weight `[C, W]`, conv_bias `[C]` or None, gate and output norm.

    `norm_weight` `[V]` and `norm_eps` are of the gated RMS norm; None leaves it to the caller.
    A `gate` of None says that the caller hands over log decay and beta ready-made.
    """

    conv_weight: Tensor
    conv_bias: Tensor | None
    gate: Gate | None
    norm_weight: Tensor | None = None
    norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class ShortConvParams:
    """A short-conv layer: weight `[hidden, W]`, bias `[hidden]` or None."""

    weight: Tensor
    bias: Tensor | None


LayerParams = DeltaParams | ShortConvParams
