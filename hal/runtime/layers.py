"""Linear layers bound to their providers: what an engine calls once a step for each layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from torch.compiler import is_compiling

from hal.errors import ProviderError
from hal.model.spec import GateKind
from hal.runtime.batch import Mode
from hal.runtime.gates import gated_norm, ready
from hal.runtime.params import detach_gate
from hal.runtime.phases import Phases
from hal.runtime.seam import (
    Draft,
    check_act,
    check_beside,
    check_once,
    check_tokens,
    failed,
    filling,
    result,
    verifier,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from hal.interfaces import ConvState, DeltaRule, Gate
    from hal.model.spec import DeltaDims, ShortConvDims
    from hal.runtime.bound_conv import BoundConv
    from hal.runtime.operators import OperatorDelta
    from hal.runtime.params import DeltaParams
    from hal.runtime.seam import Current
    from hal.runtime.step import Step


@dataclass(slots=True)
class DeltaLayer:
    """A Gated DeltaNet or Kimi Delta layer, bound.

    Called with mixed_qkv `[T, C]` before the conv, a and b raw from the projections; the result is
    `[T, HV, V]`, normed and gated where z `[T, HV, V]` is given. Engines whose model code runs the
    pieces itself call `conv` and `delta_rule` in its place.
    """

    phases: ClassVar[Phases] = Phases.SPLIT
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
    compiled: OperatorDelta | None = None
    fused: Mapping[Mode, DeltaRule] = field(default_factory=dict)
    """Who serves the conv and the recurrence of a mode in fewer launches, where one does."""
    ran: Step | None = None
    sizes: tuple[int, int, int] = field(init=False)
    channels: int = field(init=False)

    def __post_init__(self) -> None:
        """Remember the widths of q, k and v side by side."""
        q, k, v = (size for _, size in self.dims.segments)
        self.sizes, self.channels = (q, k, v), q + k + v

    def __call__(self, mixed_qkv: Tensor, a: Tensor, b: Tensor, z: Tensor | None = None) -> Tensor:
        """Conv, split, gates, recurrence, and the gated norm where z is given."""
        self._check(mixed_qkv, a, b, z)
        step, gate = self.current.get(), self.params.gate
        rule = self.fused.get(step.mode) if self.fused else None
        if rule is not None and gate is not None and not is_compiling():
            return self._run_fused(rule, mixed_qkv, a, b, z, gate, step)
        q, k, v = self.split(self.bound_conv(mixed_qkv, step))
        if gate is not None and not self.fuses_gate:
            a, b, gate = *ready(gate, a, b), None
        return self._normed(self._recur(q, k, v, a, b, gate, step), z)

    def _normed(self, o: Tensor, z: Tensor | None) -> Tensor:
        if z is None or self.params.norm_weight is None:
            return o
        weight, eps, kind = self.params.norm_weight, self.params.norm_eps, self.dims.gate
        return self.current.get().clear_pads(gated_norm(o, z, weight, eps, kind))

    def _run_fused(
        self,
        rule: DeltaRule,
        mixed_qkv: Tensor,
        a: Tensor,
        b: Tensor,
        z: Tensor | None,
        gate: Gate,
        step: Step,
    ) -> Tensor:
        """The whole layer by its provider; a sigmoid-gated norm stays outside."""
        inside = z if gate.kind is GateKind.SCALAR else None
        check_once(self.ran, step, "the delta rule")
        if step.mode is Mode.DECODE:
            o = self._decode_fused(rule, mixed_qkv, a, b, inside, gate, step)
        else:
            o = self._prefill_fused(rule, self.conv(mixed_qkv), a, b, inside, gate, step)
        self.ran = step
        o = result("delta_rule", o, (len(mixed_qkv), self.dims.HV, self.dims.V), mixed_qkv.dtype)
        return o if inside is z else self._normed(o, z)

    def _decode_fused(
        self,
        rule: DeltaRule,
        mixed_qkv: Tensor,
        a: Tensor,
        b: Tensor,
        z: Tensor | None,
        gate: Gate,
        step: Step,
    ) -> Tensor:
        conv, params = self.bound_conv, self.params
        weight = None if z is None else params.norm_weight
        check_act("mixed_qkv", mixed_qkv, conv.dtype, step)
        check_once(conv.ran, step, "the conv")
        try:
            o = step.opaque(rule.decode_fused)(
                mixed_qkv, a, b, conv.weight, conv.bias, conv.activation, gate,
                conv.state, self.state, step.src, step.dst, step.start,
                z=z, norm_weight=weight, norm_eps=params.norm_eps,
            )  # fmt: skip
        except RuntimeError as error:
            raise failed("delta_rule.decode_fused", error, mixed_qkv, a, b, self.state) from error
        step.track_decode(conv.state)
        step.track_decode(self.state)
        conv.ran = step
        return o

    def _prefill_fused(
        self,
        rule: DeltaRule,
        mixed_qkv: Tensor,
        a: Tensor,
        b: Tensor,
        z: Tensor | None,
        gate: Gate,
        step: Step,
    ) -> Tensor:
        params = self.params
        weight = None if z is None else params.norm_weight
        try:
            return step.opaque(rule.prefill_fused)(
                mixed_qkv, a, b, gate, self.state,
                step.src, step.dst, step.query_start_loc, step.max_len,
                z=z, norm_weight=weight, norm_eps=params.norm_eps, track=step.track,
            )  # fmt: skip
        except RuntimeError as error:
            raise failed("delta_rule.prefill_fused", error, mixed_qkv, a, b, self.state) from error

    def _check(self, mixed_qkv: Tensor, a: Tensor, b: Tensor, z: Tensor | None) -> None:
        """Everything that could still fail after the conv has moved its state."""
        dims, tokens = self.dims, mixed_qkv.shape[0]
        heads = (tokens, dims.HV)
        check_tokens("mixed_qkv", mixed_qkv, (tokens, self.channels))
        check_beside("a", a, heads if dims.gate is GateKind.SCALAR else (*heads, dims.K))
        check_beside("b", b, heads)
        if z is not None:
            check_beside("z", z, (*heads, dims.V))
            if self.params.norm_weight is None:
                raise ValueError("z was given, but the layer was bound without norm_weight")

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
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            check_act(name, tensor, self.bound_conv.dtype, step)
        for name, tensor in (("a", a), ("b", b)):
            check_beside(name, tensor)
        return self._recur(q, k, v, a, b, detach_gate(gate), step)

    def _recur(
        self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gate: Gate | None, step: Step
    ) -> Tensor:
        if step.mode is Mode.VERIFY:
            return self._verify(q, k, v, a, b, gate, step)
        check_once(self.ran, step, "the delta rule")
        try:
            out = self._run(q, k, v, a, b, gate, step)
        except RuntimeError as error:
            raise failed("delta_rule", error, q, k, v, a, b, self.state) from error
        self.ran = step
        return result("delta_rule", out, v.shape, v.dtype)

    def _run(
        self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gate: Gate | None, step: Step
    ) -> Tensor:
        compiled, state = self.compiled if is_compiling() else None, self.state
        if step.mode is Mode.DECODE:
            decode = step.opaque((compiled or self.decode).decode)
            out = decode(q, k, v, a, b, gate, state, step.src, step.dst)
            if step.copies is not None:
                step.track_decode(state)
            return out
        rows = (step.src, step.dst, step.query_start_loc, step.max_len)
        serve = (compiled or self.prefill).prefill
        return serve(q, k, v, a, b, gate, state, *rows, track=step.track)

    def check_verified(self, step: Step) -> None:
        """Refuse a commit of a step whose tokens are not in the scratch."""
        verifier(self.verify, self.draft)[1].take(step, "a delta rule")
        self.bound_conv.check_verified(step)

    def commit(self, step: Step, last: Tensor, dst: Tensor | None = None) -> None:
        """Leave the states after each row's accepted path in its `dst`, by default the step's."""
        rule, draft = verifier(self.verify, self.draft)
        scratch, target = draft.take(step, "a delta rule"), step.dst if dst is None else dst
        self.bound_conv.commit(step, last, target)
        commit = step.opaque(rule.commit)
        commit(self.state, scratch, step.src, target, step.query_start_loc, last)

    def _verify(
        self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gate: Gate | None, step: Step
    ) -> Tensor:
        rule, draft = verifier(self.verify, self.draft)
        rows = (step.src, step.query_start_loc, step.max_len, draft.scratch)
        with filling(step, (draft,), "delta_rule.verify", q, k, v, a, b, self.state):
            verify = step.opaque(rule.verify)
            out = verify(q, k, v, a, b, gate, self.state, *rows, parents=step.parents)
            return result("delta_rule.verify", out, v.shape, v.dtype)


@dataclass(slots=True)
class ShortConvLayer:
    """An LFM2 or LFM3 short convolution, bound: C * Conv(B * x).

    B, C, x and the result are act `[T, hidden]`; B * x is rounded to act, since it is what the
    state holds. The state and the slots come from the sidecar, resolved once a step.
    """

    phases: ClassVar[Phases] = Phases.SPLIT
    current: Current
    layer_id: int
    dims: ShortConvDims
    bound_conv: BoundConv
    sidecar: ConvState

    def __call__(self, B: Tensor, C: Tensor, x: Tensor) -> Tensor:
        """Gate, convolve, gate; an IDLE step gives the empty result."""
        step, shape = self.current.get(), (x.shape[0], self.dims.hidden)
        for name, tensor in (("B", B), ("C", C), ("x", x)):
            check_tokens(name, tensor, shape)
            check_act(name, tensor, self.bound_conv.dtype, step)
        return step.clear_pads(C * self.conv(B * x))

    def conv(self, gated: Tensor) -> Tensor:
        """The convolution alone, on B * x `[T, hidden]`."""
        step = self.current.get()
        view = self.sidecar.step(self.layer_id)
        if view.tensors[0] is not self.bound_conv.state:
            raise ProviderError(f"conv_state.step gave another state for layer {self.layer_id}")
        return self.bound_conv(gated, step)

    def check_verified(self, step: Step) -> None:
        """Refuse a commit of a step whose tokens are not in the scratch."""
        self.bound_conv.check_verified(step)

    def commit(self, step: Step, last: Tensor, dst: Tensor | None = None) -> None:
        """Leave the window after each row's accepted path in its `dst`, by default the step's."""
        self.bound_conv.commit(step, last, dst)
