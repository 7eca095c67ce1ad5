"""The gated delta rule: Gated DeltaNet (scalar gate) and Kimi Delta Attention (channel gate)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hal.model.spec import GateKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Gate:
    """A layer's gate, bound once: makes log decay g and beta from the raw projections a and b.

    `A_log` f32 `[HV]`. `scalar`: a `[T, HV]`, dt_bias f32 `[HV]`,
    g = -exp(A_log) * softplus(a + dt_bias). `channel`: a `[T, HV, K]`, dt_bias f32 `[HV, K]`, same
    form. `safe`: g = lower_bound * sigmoid(exp(A_log) * (a + dt_bias)), lower_bound < 0.
    beta = beta_scale * sigmoid(b), b `[T, HV]`, in float32; softplus(x) = x above 20.
    """

    kind: GateKind
    A_log: Tensor
    dt_bias: Tensor
    lower_bound: float | None = None
    beta_scale: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a safe gate whose bound would not decay."""
        if self.kind is GateKind.SAFE and (self.lower_bound is None or self.lower_bound >= 0):
            raise ValueError(f"safe gate: lower_bound must be negative, got {self.lower_bound}")


class DeltaRule(Protocol):
    """The recurrence of a row and value head h, with key head h // (HV/H), all in float32.

    q' = K^-0.5 * l2(q), k' = l2(k), l2(x) = x / sqrt(sum(x*x) + 1e-6);
    S = S * exp(g); u = beta * (v - S k'); S = S + u k'^T; o = S q'.

    `state` f32 `[S, HV, V, K]` in layout "VK", `[S, HV, K, V]` in "KV". q, k `[T, H, K]`,
    v `[T, HV, V]`, result act `[T, HV, V]`, before any gated norm. With `gate=None`, a is g and b
    is beta already, float32 or act.
    """

    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        gate: Gate | None,
        state: Tensor,
        src: Tensor,
        dst: Tensor,
        query_start_loc: Tensor,
        max_len: int,
        *,
        qk_l2norm: bool = True,
        out: Tensor | None = None,
        track: Tensor | None = None,
    ) -> Tensor:
        """Run any mixture of rows, one-token continuations included; track i32 `[M, 3]`."""
        ...

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        gate: Gate | None,
        state: Tensor,
        src: Tensor,
        dst: Tensor,
        *,
        qk_l2norm: bool = True,
        out: Tensor | None = None,
    ) -> Tensor:
        """Advance every row by one token and read its new state.

        A row with neither slot is padding: its output is exactly zero and nothing is written.
        """
        ...

    def verify(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        gate: Gate | None,
        state: Tensor,
        src: Tensor,
        query_start_loc: Tensor,
        max_len: int,
        scratch: Sequence[Tensor],
        *,
        parents: Tensor | None = None,
        qk_l2norm: bool = True,
        out: Tensor | None = None,
    ) -> Tensor:
        """Run draft tokens, each from the state of its parent; `state` is only read."""
        ...

    def commit(
        self,
        state: Tensor,
        scratch: Sequence[Tensor],
        src: Tensor,
        dst: Tensor,
        query_start_loc: Tensor,
        last: Tensor,
    ) -> None:
        """Write the state after the path to row-relative token `last` (-1: write nothing)."""
        ...

    def decode_fused(
        self,
        mixed_qkv: Tensor,
        a: Tensor,
        b: Tensor,
        conv_weight: Tensor,
        conv_bias: Tensor | None,
        activation: str | None,
        gate: Gate | None,
        conv_state: Tensor,
        state: Tensor,
        src: Tensor,
        dst: Tensor,
        start: Tensor,
        *,
        z: Tensor | None = None,
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-6,
        out: Tensor | None = None,
    ) -> Tensor:
        """Equal `Conv.decode`, split and `decode` in one launch; mixed_qkv `[B, C]`, not convolved.

        Where z `[B, HV, V]` is given the result is rms(o) * norm_weight * silu(z).
        """
        ...

    def prefill_fused(
        self,
        mixed_qkv: Tensor,
        a: Tensor,
        b: Tensor,
        gate: Gate | None,
        state: Tensor,
        src: Tensor,
        dst: Tensor,
        query_start_loc: Tensor,
        max_len: int,
        *,
        z: Tensor | None = None,
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-6,
        out: Tensor | None = None,
        track: Tensor | None = None,
    ) -> Tensor:
        """Equal split and `prefill` (and the gated norm); mixed_qkv `[T, C]` after the conv."""
        ...
