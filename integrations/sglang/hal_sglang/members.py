"""SGLang's linear layers as members of a session: found in the built model, by class."""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, Final, cast

from hal.errors import HalError
from hal.interfaces import Gate
from hal.model.spec import DeltaDims, Kind
from hal.runtime.params import DeltaParams, ShortConvParams
from hal_sglang.pool import layer_states
from hal_sglang.serve import forward_short_conv

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from hal.integrations.engines.session import Session

DELTA: Final = frozenset({"RadixLinearAttention"})
SHORT_CONV: Final = frozenset({"Lfm2ShortConv", "Lfm2MoeShortConv"})
"""Class names of SGLang's layers that the plugin serves."""


@dataclass(eq=False, slots=True)
class Member:
    """One layer of SGLang's model; the pool is known once the backend is built."""

    module: Any
    index: int
    session: Session
    pool: Any = None

    @property
    def hal_states(self) -> dict[str, Tensor]:
        """The layer's state tensors in SGLang's pool, by the plan's names."""
        if self.pool is None:
            raise HalError(f"layer {self.index}: SGLang built no linear backend before a step")
        return layer_states(self.pool, self.index, self.session)


@dataclass(eq=False, slots=True)
class DeltaMember(Member):
    """A Gated DeltaNet layer: its conv and gate; the norm stays SGLang's."""

    @property
    def hal_params(self) -> DeltaParams:
        """The conv's weight `[C, W]` and the gate, as loaded."""
        layer, dims = self.module, self._dims()
        rates, bias = layer.A_log.float(), layer.dt_bias.float()
        gate = Gate(dims.gate, rates, bias, dims.lower_bound, dims.beta_scale)
        return DeltaParams(layer.conv_weights, layer.bias, gate)

    def _dims(self) -> DeltaDims:
        layers = self.session.selection.model.layers
        return next(cast("DeltaDims", each.dims) for each in layers if each.index == self.index)


@dataclass(eq=False, slots=True)
class ShortConvMember(Member):
    """A short convolution between its two projections, which stay SGLang's."""

    @property
    def hal_params(self) -> ShortConvParams:
        """The conv's weight `[hidden, W]` and bias, as loaded."""
        return ShortConvParams(self.module.conv_weight, self.module.conv_bias)


def join(model: nn.Module, session: Session) -> None:
    """Take the model's linear layers into the session, and refuse a model with another one.

    A short convolution gets its forward replaced, on the very object that was found.
    """
    for module in model.modules():
        name = type(module).__name__
        if name in DELTA:
            found = DeltaMember(module, int(cast("int", module.layer_id)), session)
            session.join(found.index, Kind.GATED_DELTA_NET, found)
        elif name in SHORT_CONV:
            short = ShortConvMember(module, int(cast("int", module.layer_idx)), session)
            session.join(short.index, Kind.SHORT_CONV, short)
            vars(module)["forward"] = MethodType(forward_short_conv, module)
    session.check_complete()


def of(session: Session) -> Iterator[Member]:
    """The session's layers."""
    return (cast("Member", member) for member in session.members.values())
