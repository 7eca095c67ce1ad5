"""The weights of a linear layer, sharded and as loaded; a backend binds them once."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

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

    def detached(self) -> "DeltaParams":
        """The same weights without their graphs, which a state would otherwise keep alive."""
        return replace(self, gate=detach_gate(self.gate), norm_weight=detach(self.norm_weight))


@dataclass(frozen=True, slots=True, eq=False)
class ShortConvParams:
    """A short-conv layer: weight `[hidden, W]`, bias `[hidden]` or None."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class ScanParams:
    """A scan layer: conv weights (None where the scan has no conv), A, skip, dt bias, output norm.

    Mamba-2: A_log, D and dt_bias f32 `[H]`. Mamba-1: A_log `[I, N]`, D and dt_bias `[I]`.
    Lightning has D and dt_bias None and A_log = log(slope). `norm_weight` `[I]` is of the grouped
    gated norm; None: z gates inside the scan. The gate comes before the norm unless
    `norm_before_gate`.
    """

    conv_weight: Tensor | None
    conv_bias: Tensor | None
    A_log: Tensor
    D: Tensor | None
    dt_bias: Tensor | None
    norm_weight: Tensor | None = None
    norm_eps: float = 1e-5
    norm_before_gate: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class CcaParams:
    """A CCA layer: depthwise weight `[C, t0]`, then grouped weight `[C, D, t1]`, biases `[C]`."""

    depthwise_weight: Tensor
    depthwise_bias: Tensor | None
    grouped_weight: Tensor
    grouped_bias: Tensor | None


LayerParams = DeltaParams | ShortConvParams | ScanParams | CcaParams


def named_tensors(params: LayerParams | Gate) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a layer's weights, those of its gate among them, by their names."""
    for field in fields(params):
        value = getattr(params, field.name)
        if isinstance(value, Gate):
            yield from named_tensors(value)
        elif isinstance(value, Tensor):
            yield field.name, value


def detach(tensor: Tensor | None) -> Tensor | None:
    """The tensor without its graph, through None."""
    return None if tensor is None else tensor.detach()


def detach_gate(gate: Gate | None) -> Gate | None:
    """The gate without its weights' graphs, through None."""
    if gate is None:
        return None
    return replace(gate, A_log=gate.A_log.detach(), dt_bias=gate.dt_bias.detach())


def in_float32(tensor: Tensor | None) -> Tensor | None:
    """The tensor in float32 without its graph, through None."""
    return None if tensor is None else tensor.detach().float()
