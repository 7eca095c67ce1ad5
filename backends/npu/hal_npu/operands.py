"""What recurrent vendor functions are given: gates made ready, norms as the contract has them."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from hal.interfaces import Gate
from hal.runtime.gates import ready

EPS_INSIDE = 1e-6
"""Inside the root of the contract's norm: x / sqrt(sum(x * x) + eps)."""

EPS_OUTSIDE = 1e-6
"""Outside the root of the recurrent kernels' norm: x / (sqrt(sum(x * x)) + eps)."""


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """The per-token tensors of a call; they are always cut together."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """q, k, v, a and b."""
        return self.q, self.k, self.v, self.a, self.b

    def cut(self, index: Tensor | slice) -> Self:
        """The tokens at an index or in a slice."""
        return type(self)(*(tensor[index] for tensor in self.tensors()))

    def gates(self, gate: Gate | None) -> tuple[Tensor, Tensor]:
        """Log decay and beta in float32; without a gate they came ready-made."""
        if gate is None:
            return self.a.float(), self.b.float()
        return ready(gate, self.a, self.b)


def squared(x: Tensor) -> Tensor:
    """Squared length over the last axis, which stays."""
    return x.square().sum(-1, keepdim=True)


def normed(x: Tensor, qk_l2norm: bool) -> Tensor:
    """x in float32, with the contract's norm where it is asked for."""
    x = x.float()
    return x * torch.rsqrt(squared(x) + EPS_INSIDE) if qk_l2norm else x


def stretch(x: Tensor, qk_l2norm: bool) -> Tensor:
    """How much longer a key or query of the contract is than what the kernel makes of it."""
    square = squared(x)
    length = square.sqrt() + EPS_OUTSIDE
    return length * torch.rsqrt(square + EPS_INSIDE) if qk_l2norm else length


@dataclass(frozen=True, slots=True, eq=False)
class Recurrent:
    """Operands of a kernel that always divides q and k by their length, in float32.

    q `[T, H, K]`, k and log decay `[T, HV, K]`, v `[T, HV, V]`, beta `[T, HV]`. With k = c * unit
    the update beta * (v - S k) k^T is beta c^2 * (v / c - S unit) unit^T, so that v and beta carry
    c; the result is multiplied by `factor`, which carries the query's length.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor
    factor: Tensor

    @classmethod
    def of(cls, inputs: Inputs, gate: Gate | None, qk_l2norm: bool) -> Self:
        """The operands of some tokens, keys repeated so that every value head has its own."""
        decay, beta = inputs.gates(gate)
        q, k, v = inputs.q.float(), inputs.k.float(), inputs.v.float()
        ratio = v.shape[1] // q.shape[1]
        k = k.repeat_interleave(ratio, 1)
        c = stretch(k, qk_l2norm)
        if decay.ndim == 2:
            decay = decay.unsqueeze(-1).expand(k.shape)
        factor = stretch(q, qk_l2norm).repeat_interleave(ratio, 1)
        return cls(q, k, v / c, decay, beta * c.square().squeeze(-1), factor)
