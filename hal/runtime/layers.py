"""Linear layers bound to their providers: what an engine calls once a step for each layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from hal.errors import ProviderError, StepOrderError
from hal.runtime.batch import Mode
from hal.runtime.gates import gated_norm, ready

if TYPE_CHECKING:
    from torch import Tensor

    from hal.interfaces import Conv, ConvState, DeltaRule, Gate
    from hal.model.spec import DeltaDims, ShortConvDims
    from hal.runtime.params import DeltaParams
    from hal.runtime.step import Step


@dataclass(slots=True)
class Current:
    """The step that `begin` made last; all layers of a backend share this one cell."""

    step: Step | None = None

    def get(self) -> Step:
        """The step, or an error that names the missing call."""
        if self.step is None:
            raise StepOrderError("a layer was called before begin(batch), or after one that failed")
        return self.step


Served = TypeVar("Served")


def verifier(served: Served | None, draft: Draft | None) -> tuple[Served, Draft]:
    """The operation and its scratch, or an error where speculation was not selected."""
    if served is None or draft is None:
        raise StepOrderError("verify and commit need a selection with speculative")
    return served, draft


def failed(operation: str, error: RuntimeError, *tensors: Tensor) -> ProviderError:
    """A provider's raw error with the operation, shapes, dtypes and device around it."""
    shapes = ", ".join(f"{list(t.shape)} {t.dtype} on {t.device}" for t in tensors)
    return ProviderError(f"{operation} failed on inputs {shapes}: {error}")


@dataclass(slots=True)
class Draft:
    """The scratch of one operation of one layer, and the verify step that filled it last."""

    scratch: tuple[Tensor, ...]
    filled: Step | None = None

    def fill(self, step: Step) -> tuple[Tensor, ...]:
        """The scratch, from now on of this step."""
        self.filled = step
        return self.scratch

    def take(self, step: Step, layer: str) -> tuple[Tensor, ...]:
        """The scratch, if this step filled it; else a commit would write another step's tokens."""
        if self.filled is not step:
            raise StepOrderError(f"commit: {layer} did not run in the verify step")
        return self.scratch


@dataclass(slots=True)
class BoundConv:
    """The convolution of one layer: weights, state and the providers' operations.

    `verify` and `draft` are there where the selection is speculative.
    """

    prefill: Conv
    decode: Conv
    weight: Tensor
    bias: Tensor | None
    state: Tensor
    activation: str | None
    verify: Conv | None = None
    draft: Draft | None = None

    def commit(self, step: Step, last: Tensor) -> None:
        """Leave the window after each row's accepted path in its target slot."""
        rule, draft = verifier(self.verify, self.draft)
        scratch = draft.take(step, "a conv")
        bounds = step.query_start_loc
        rule.commit(self.state, scratch, step.src, step.dst, step.start, bounds, last)

    def _verify(self, x: Tensor, step: Step) -> Tensor:
        rule, draft = verifier(self.verify, self.draft)
        try:
            return rule.verify(
                x,
                self.weight,
                self.bias,
                self.state,
                step.src,
                step.start,
                step.query_start_loc,
                step.max_len,
                draft.fill(step),
                parents=step.parents,
                activation=self.activation,
            )
        except RuntimeError as error:
            raise failed("conv.verify", error, x, self.weight, self.state) from error

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """Convolve the step's packed tokens, act `[T, C]`."""
        if step.mode is Mode.VERIFY:
            return self._verify(x, step)
        try:
            if step.mode is Mode.DECODE:
                return self.decode.decode(
                    x,
                    self.weight,
                    self.bias,
                    self.state,
                    step.src,
                    step.dst,
                    step.start,
                    activation=self.activation,
                )
            return self.prefill.prefill(
                x,
                self.weight,
                self.bias,
                self.state,
                step.src,
                step.dst,
                step.start,
                step.query_start_loc,
                step.max_len,
                activation=self.activation,
                track=step.track,
            )
        except RuntimeError as error:
            raise failed("conv", error, x, self.weight, self.state) from error


@dataclass(slots=True)
class DeltaLayer:
    """A Gated DeltaNet or Kimi Delta layer, bound.

    Called with mixed_qkv `[T, C]` before the conv, a and b raw from the projections; the result is
    `[T, HV, V]`, normed and gated where z `[T, HV, V]` is given. Engines whose model code runs the
    pieces itself call `conv` and `delta_rule` in its place.
    """

    current: Current
    dims: DeltaDims
    params: DeltaParams
    bound_conv: BoundConv
    prefill: DeltaRule
    decode: DeltaRule
    state: Tensor
    fuses_gate: bool
    verify: DeltaRule | None = None
    draft: Draft | None = None
    sizes: tuple[int, int, int] = field(init=False)

    def __post_init__(self) -> None:
        """Remember the widths of q, k and v side by side."""
        q, k, v = (size for _, size in self.dims.segments)
        self.sizes = (q, k, v)

    def __call__(self, mixed_qkv: Tensor, a: Tensor, b: Tensor, z: Tensor | None = None) -> Tensor:
        """Conv, split, gates, recurrence, and the gated norm where z is given."""
        q, k, v = self.split(self.conv(mixed_qkv))
        gate = self.params.gate
        if gate is not None and not self.fuses_gate:
            a, b = ready(gate, a, b)
            gate = None
        o = self.delta_rule(q, k, v, a, b, gate)
        if z is None:
            return o
        if self.params.norm_weight is None:
            raise ValueError("z was given, but the layer was bound without norm_weight")
        kind = self.dims.gate
        normed = gated_norm(o, z, self.params.norm_weight, self.params.norm_eps, kind)
        return self.current.get().clear_pads(normed)

    def split(self, mixed_qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of q, k `[T, H, K]` and v `[T, HV, V]` in mixed_qkv `[T, C]`."""
        dims, tokens = self.dims, mixed_qkv.shape[0]
        q, k, v = mixed_qkv.split_with_sizes(self.sizes, dim=-1)
        return (
            q.view(tokens, dims.H, dims.K),
            k.view(tokens, dims.H, dims.K),
            v.view(tokens, dims.HV, dims.V),
        )

    def conv(self, mixed_qkv: Tensor) -> Tensor:
        """The convolution alone, `[T, C]` to `[T, C]`."""
        return self.bound_conv(mixed_qkv, self.current.get())

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gate: Gate | None = None
    ) -> Tensor:
        """The recurrence alone; without a gate, a is log decay and b is beta already."""
        step = self.current.get()
        if step.mode is Mode.VERIFY:
            return self._verify(q, k, v, a, b, gate, step)
        try:
            if step.mode is Mode.DECODE:
                return self.decode.decode(q, k, v, a, b, gate, self.state, step.src, step.dst)
            return self.prefill.prefill(
                q,
                k,
                v,
                a,
                b,
                gate,
                self.state,
                step.src,
                step.dst,
                step.query_start_loc,
                step.max_len,
                track=step.track,
            )
        except RuntimeError as error:
            raise failed("delta_rule", error, q, k, v, a, b, self.state) from error

    def commit(self, step: Step, last: Tensor) -> None:
        """Leave the states after each row's accepted path in its target slot."""
        rule, draft = verifier(self.verify, self.draft)
        scratch = draft.take(step, "a delta rule")
        self.bound_conv.commit(step, last)
        rule.commit(self.state, scratch, step.src, step.dst, step.query_start_loc, last)

    def _verify(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        gate: Gate | None,
        step: Step,
    ) -> Tensor:
        rule, draft = verifier(self.verify, self.draft)
        try:
            return rule.verify(
                q,
                k,
                v,
                a,
                b,
                gate,
                self.state,
                step.src,
                step.query_start_loc,
                step.max_len,
                draft.fill(step),
                parents=step.parents,
            )
        except RuntimeError as error:
            raise failed("delta_rule.verify", error, q, k, v, a, b, self.state) from error


@dataclass(slots=True)
class ShortConvLayer:
    """An LFM2 or LFM3 short convolution, bound: C * Conv(B * x).

    B, C, x and the result are act `[T, hidden]`; B * x is rounded to act, since it is what the
    state holds. The state and the slots come from the sidecar, resolved once a step.
    """

    current: Current
    layer_id: int
    dims: ShortConvDims
    bound_conv: BoundConv
    sidecar: ConvState

    def __call__(self, B: Tensor, C: Tensor, x: Tensor) -> Tensor:
        """Gate, convolve, gate; an IDLE step gives the empty result."""
        return self.current.get().clear_pads(C * self.conv(B * x))

    def conv(self, gated: Tensor) -> Tensor:
        """The convolution alone, on B * x `[T, hidden]`."""
        step = self.current.get()
        view = self.sidecar.step(self.layer_id)
        if view.tensors[0] is not self.bound_conv.state:
            raise ProviderError(f"conv_state.step gave another state for layer {self.layer_id}")
        return self.bound_conv(gated, step)

    def commit(self, step: Step, last: Tensor) -> None:
        """Leave the window after each row's accepted path in its target slot."""
        self.bound_conv.commit(step, last)
