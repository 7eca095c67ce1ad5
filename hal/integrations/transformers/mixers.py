"""How each kind of layer is driven: by which names a mixer is known, and where its weights are."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Final

from torch import nn

from hal.errors import HalError
from hal.integrations.transformers.seams import (
    CCA,
    CONV,
    DELTA,
    HEAD_SCAN,
    KDA,
    LIGHTNING,
    SCAN,
    CcaForward,
    ConvSeam,
    DeltaSeam,
    HeadScanSeam,
    LightningForward,
    ScanSeam,
)
from hal.model.spec import Kind
from hal.runtime.params import CcaParams, DeltaParams, LayerParams, ScanParams, ShortConvParams

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from hal.integrations.transformers.seams import Seam
    from hal.integrations.transformers.witness import Place


@dataclass(frozen=True, slots=True)
class Mixer:
    """One kind of layer: its seams by the name in the mixer's forward, and its weights.

    With `whole` the one seam replaces the forward itself, and its name only tells the mixer.
    """

    seams: Mapping[str, Callable[[Place], Seam]]
    params: Callable[[nn.Module], LayerParams]
    whole: bool = False


def delta_params(mixer: nn.Module) -> DeltaParams:
    """Conv weights alone: the mixer makes decay and beta, and norms the output itself."""
    return DeltaParams(*conv_weights(mixer, "conv1d"), gate=None)


def short_conv_params(mixer: nn.Module) -> ShortConvParams:
    """Weight and bias of an LFM2 short convolution."""
    return ShortConvParams(*conv_weights(mixer, "conv"))


def mamba2_params(mixer: nn.Module) -> ScanParams:
    """Conv weights, A, D and dt bias, each a head; the mixer norms and gates."""
    A_log, D, bias = (mixer.get_parameter(name).detach() for name in ("A_log", "D", "dt_bias"))
    return ScanParams(*conv_weights(mixer, "conv1d"), A_log, D, bias)


def mamba1_params(mixer: nn.Module) -> ScanParams:
    """Conv weights, A, D and dt bias by channel; Zamba's heads are laid one after the other."""
    named = {name: parameter.detach() for name, parameter in mixer.named_parameters()}
    bias = named.get("dt_proj.bias", named.get("dt_proj_bias"))
    A_log, D = named["A_log"], named["D"]
    return ScanParams(
        *conv_weights(mixer, "conv1d"),
        A_log.reshape(-1, A_log.shape[-1]),
        D.flatten(),
        None if bias is None else bias.flatten(),
    )


def lightning_params(mixer: nn.Module) -> ScanParams:
    """The decay of each head, which follows from its number and its layer's."""
    slope: Tensor = mixer.get_slope_rate()  # type: ignore[operator] # nn.Module knows no methods
    slope = slope.to(next(mixer.parameters()).device)
    return ScanParams(None, None, slope.flatten().float().log(), None, None)


def cca_params(mixer: nn.Module) -> CcaParams:
    """Weights and biases of both convolutions."""
    names = ("conv_qk_depthwise", "conv_qk_grouped")
    depthwise, grouped = (conv_weights(mixer, name) for name in names)
    return CcaParams(*depthwise, *grouped)


def conv_weights(mixer: nn.Module, name: str) -> tuple[Tensor, Tensor | None]:
    """Weight and bias `[C]` of a mixer's convolution; `[C, W]`, or `[C, D, W]` where grouped."""
    conv = mixer.get_submodule(name)
    if not isinstance(conv, nn.Conv1d):
        raise HalError(f"{type(mixer).__name__}.{name} is {type(conv).__name__}, expected Conv1d")
    bias = conv.bias
    return conv.weight.detach().squeeze(1), None if bias is None else bias.detach()


MIXERS: Final[Mapping[Kind, Mixer]] = {
    Kind.GATED_DELTA_NET: Mixer({CONV: ConvSeam, DELTA: DeltaSeam}, delta_params),
    Kind.KIMI_DELTA: Mixer({CONV: ConvSeam, KDA: DeltaSeam}, delta_params),
    Kind.MAMBA2: Mixer({CONV: ConvSeam, SCAN: ScanSeam}, mamba2_params),
    Kind.MAMBA1: Mixer({CONV: ConvSeam, HEAD_SCAN: HeadScanSeam}, mamba1_params),
    Kind.SHORT_CONV: Mixer({CONV: ConvSeam}, short_conv_params),
    Kind.LIGHTNING: Mixer({LIGHTNING: LightningForward}, lightning_params, whole=True),
    Kind.CCA: Mixer({CCA: CcaForward}, cca_params, whole=True),
}
"""One entry a kind of stateful layer."""


def forward_code(module: nn.Module) -> FunctionType | None:
    """The class's own forward beneath its decorators."""
    found = inspect.unwrap(type(module).forward)
    return found if isinstance(found, FunctionType) else None


def uses(module: nn.Module, names: frozenset[str]) -> frozenset[str]:
    """Which of the names a module's forward uses."""
    forward = forward_code(module)
    return names & frozenset(forward.__code__.co_names) if forward else frozenset()


def rebind(module: nn.Module, seams: Mapping[str, Callable[..., object]]) -> None:
    """Let this one instance find other kernels under the names that its forward uses."""
    forward = forward_code(module)
    if forward is None:
        raise HalError(f"{type(module).__name__}.forward is no function, so it cannot be bound")
    names: dict[str, Any] = {**forward.__globals__, **seams}
    own = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    replace(module, MethodType(own, module))


def replace(module: nn.Module, forward: Callable[..., object]) -> None:
    """Give this one instance another forward."""
    object.__setattr__(module, "forward", forward)
