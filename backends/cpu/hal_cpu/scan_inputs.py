"""The inputs of a scan in one form for both Mamba generations.

Mamba-2 runs `heads` of P channels that share a step and a decay. Mamba-1 runs its groups as heads
whose channels have steps of their own and a decay that differs along N. Lightning is Mamba-2 with
steps of one.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from hal_cpu.gates import silu_, softplus


@dataclass(frozen=True, slots=True, eq=False)
class Rates:
    """What a layer applies to every token; `A` is `[H]` (Mamba-2) or `[I, N]` (Mamba-1)."""

    A: Tensor
    D: Tensor | None
    dt_bias: Tensor | None
    dt_limit: tuple[float, float]
    dt_softplus: bool

    def steps(self, dt: Tensor) -> Tensor:
        """d in float32, of dt's shape: bias, softplus and limit are applied here and only here."""
        d = dt.float()
        if self.dt_bias is not None:
            d = d + self.dt_bias
        return (softplus(d) if self.dt_softplus else d).clamp(*self.dt_limit)


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The per-token tensors of a call; they are always cut together.

    x, z `[T, H, P]` or `[T, I]`, dt `[T, H]`, `[T, I]` or None, B and C `[T, G, N]`.
    """

    x: Tensor
    dt: Tensor | None
    B: Tensor
    C: Tensor
    z: Tensor | None

    def pick(self, index: Tensor) -> Self:
        """The tokens at `index`, copied."""
        dt = None if self.dt is None else self.dt.index_select(0, index)
        z = None if self.z is None else self.z.index_select(0, index)
        x, B, C = (tensor.index_select(0, index) for tensor in (self.x, self.B, self.C))
        return replace(self, x=x, dt=dt, B=B, C=C, z=z)

    def cut(self, begin: int, end: int) -> Self:
        """The tokens `[begin, end)`, viewed."""
        dt = None if self.dt is None else self.dt[begin:end]
        z = None if self.z is None else self.z[begin:end]
        x, B, C = (tensor[begin:end] for tensor in (self.x, self.B, self.C))
        return replace(self, x=x, dt=dt, B=B, C=C, z=z)

    def steps(self, rates: Rates) -> Tensor:
        """d of every token and head or channel, float32."""
        if self.dt is None:
            return torch.ones(self.x.shape[:2])
        return rates.steps(self.dt)

    def finish(self, y: Tensor, rates: Rates) -> Tensor:
        """Add the skip D x, gate with z, and round once; y float32 of x's shape is consumed."""
        if rates.D is not None:
            skip = rates.D if self.x.ndim == 2 else rates.D.unsqueeze(-1)
            y = y.addcmul_(self.x.float(), skip)
        if self.z is not None:
            y = y.mul_(silu_(self.z.float().clone()))
        return y.to(self.x.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Operands:
    """What one recurrence step needs, all float32, heads first behind the tokens.

    decay `[n, H, 1, 1]` or `[n, H, P, N]`, update d * x `[n, H, P]`, B and C `[n, H, N]`.
    """

    decay: Tensor
    update: Tensor
    B: Tensor
    C: Tensor
    by_channel: bool
    """Whether every channel decays by itself along N: Mamba-1."""

    @classmethod
    def of(cls, tokens: Tokens, rates: Rates) -> Self:
        """The operands of every token; Mamba-1 takes its groups as heads."""
        d = tokens.steps(rates)
        if tokens.x.ndim == 2:
            return cls._by_group(tokens, rates, d)
        ratio = tokens.x.shape[1] // tokens.B.shape[1]
        B, C = (t.float().repeat_interleave(ratio, 1) for t in (tokens.B, tokens.C))
        decay = (d * rates.A).exp_().unsqueeze(-1).unsqueeze(-1)
        return cls(decay, tokens.x.float() * d.unsqueeze(-1), B, C, by_channel=False)

    @classmethod
    def _by_group(cls, tokens: Tokens, rates: Rates, d: Tensor) -> Self:
        count, groups, size = tokens.B.shape
        decay = (d.unsqueeze(-1) * rates.A).exp_().view(count, groups, -1, size)
        update = (tokens.x.float() * d).view(count, groups, -1)
        return cls(decay, update, tokens.B.float(), tokens.C.float(), by_channel=True)

    def rows(self, index: slice) -> Self:
        """The operands of some tokens, viewed."""
        return replace(
            self,
            decay=self.decay[index],
            update=self.update[index],
            B=self.B[index],
            C=self.C[index],
        )


def by_head(state: Tensor, groups: int) -> Tensor:
    """The pool as `[S, H, P, N]`, a view: Mamba-1's channels are split by group."""
    if state.ndim == 4:
        return state
    slots, channels, size = state.shape
    return state.view(slots, groups, channels // groups, size)
