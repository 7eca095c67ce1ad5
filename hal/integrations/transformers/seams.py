"""Where a mixer of transformers calls its kernels, and what of `hal` stands there instead.

A mixer's forward looks its kernels up among its module's names. Bound to `hal`, one instance runs
the same code over a copy of those names in which the kernels are bound layers. Without a cache a
mixer takes its branch for many tokens, for prompts and decode rows alike, so the functions of that
branch are all there is to replace.
"""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Final, Protocol

from torch import Tensor, nn

from hal.errors import HalError
from hal.model.spec import Kind
from hal.runtime.layers import DeltaLayer
from hal.runtime.params import DeltaParams, LayerParams, ShortConvParams

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hal.runtime.binder import Layer

CONV: Final = "causal_conv1d_fn"
DELTA: Final = "torch_chunk_gated_delta_rule"


@dataclass(slots=True)
class Witness:
    """Sees every linear layer run through `hal`, each of its seams exactly once a step."""

    expected: set[tuple[int, str]] = field(default_factory=set)
    seen: Counter[tuple[int, str]] = field(default_factory=Counter)

    def begin(self) -> None:
        """Forget the last step."""
        self.seen.clear()

    def note(self, layer_id: int, seam: str) -> None:
        """Book one call."""
        self.seen[layer_id, seam] += 1

    def check(self) -> None:
        """Raise unless every seam was called once; the text names those that were not."""
        known = self.expected | set(self.seen)
        wrong = sorted(key for key in known if self.seen[key] != (key in self.expected))
        if wrong:
            named = ", ".join(f"layer {i} {name} {self.seen[i, name]} times" for i, name in wrong)
            raise HalError(f"linear layers must run through hal exactly once a step, but: {named}")


@dataclass(frozen=True, slots=True)
class Place:
    """One seam of one layer: the bound layer, its id and the witness of its model."""

    layer: Layer
    layer_id: int
    witness: Witness


class ConvSeam:
    """Stands for `causal_conv1d_fn`: `[1, C, T]` to `[1, C, T]` over the step's rows."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def __call__(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Convolve with the weights that were bound; `weight` and `bias` are the same ones."""
        place = self._place
        bound = place.layer.bound_conv
        if bound is None or activation != bound.activation:
            offered = "no conv" if bound is None else bound.activation
            raise HalError(
                f"layer {place.layer_id}: its conv has activation {activation}, hal bound {offered}"
            )
        refuse_packing(place.layer_id, kwargs)
        place.witness.note(place.layer_id, CONV)
        return place.layer.conv(hidden_states[0].transpose(0, 1)).transpose(0, 1)[None]


class DeltaSeam:
    """Stands for the chunked delta rule: q, k `[1, T, H, K]`, v `[1, T, HV, V]`, g and beta made.

    The state stays in the pool, so the second result is None.
    """

    def __init__(self, place: Place) -> None:
        self._place = place

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: object,
    ) -> tuple[Tensor, None]:
        """Run the recurrence over the step's rows; g is the log decay, beta is ready."""
        place = self._place
        if not isinstance(place.layer, DeltaLayer) or not use_qk_l2norm_in_kernel:
            raise HalError(f"layer {place.layer_id}: expected a delta rule with normed q and k")
        refuse_packing(place.layer_id, kwargs)
        place.witness.note(place.layer_id, DELTA)
        out = place.layer.delta_rule(query[0], key[0], value[0], g[0], beta[0])
        return out[None], None


class MakeSeam(Protocol):
    """Makes what stands in for one kernel of one layer."""

    def __call__(self, place: Place) -> Callable[..., object]:
        """The stand-in."""
        ...


@dataclass(frozen=True, slots=True)
class Mixer:
    """How one kind of layer is driven: its kernels by name, and where its weights are."""

    kernels: Mapping[str, MakeSeam]
    params: Callable[[nn.Module], LayerParams]


def delta_params(mixer: nn.Module) -> DeltaParams:
    """Conv weights alone: the mixer makes decay and beta, and norms the output itself."""
    return DeltaParams(*conv_weights(mixer, "conv1d"), gate=None)


def short_conv_params(mixer: nn.Module) -> ShortConvParams:
    """Weight and bias of an LFM2 short convolution."""
    return ShortConvParams(*conv_weights(mixer, "conv"))


def conv_weights(mixer: nn.Module, name: str) -> tuple[Tensor, Tensor | None]:
    """Weight `[C, W]` and bias `[C]` of a mixer's depthwise convolution."""
    conv = mixer.get_submodule(name)
    if not isinstance(conv, nn.Conv1d):
        raise HalError(f"{type(mixer).__name__}.{name} is {type(conv).__name__}, expected Conv1d")
    bias = conv.bias
    return conv.weight.detach().squeeze(1), None if bias is None else bias.detach()


MIXERS: Final[Mapping[Kind, Mixer]] = {
    Kind.GATED_DELTA_NET: Mixer({CONV: ConvSeam, DELTA: DeltaSeam}, delta_params),
    Kind.SHORT_CONV: Mixer({CONV: ConvSeam}, short_conv_params),
}
"""One entry a kind of stateful layer."""


def forward_code(module: nn.Module) -> FunctionType | None:
    """The class's own forward beneath its decorators."""
    found = inspect.unwrap(type(module).forward)
    return found if isinstance(found, FunctionType) else None


def uses(module: nn.Module, kernels: frozenset[str]) -> frozenset[str]:
    """Which of the kernels a module's forward names."""
    forward = forward_code(module)
    return kernels & frozenset(forward.__code__.co_names) if forward else frozenset()


def rebind(module: nn.Module, kernels: Mapping[str, Callable[..., object]]) -> None:
    """Let this one instance find other kernels under the names that its forward uses."""
    forward = forward_code(module)
    if forward is None:
        raise HalError(f"{type(module).__name__}.forward is no function, so it cannot be bound")
    names: dict[str, Any] = {**forward.__globals__, **kernels}
    own = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    object.__setattr__(module, "forward", MethodType(own, module))


def refuse_packing(layer_id: int, given: Mapping[str, object]) -> None:
    """A mixer that packs rows its own way would not mean the step's rows."""
    named = [name for name in ("cu_seqlens", "seq_idx") if given.get(name) is not None]
    if named:
        raise HalError(f"layer {layer_id}: {named[0]} was given, the rows are the step's alone")
