"""Plans and launches of verify."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from hal.runtime.checks import check_rows
from hal.runtime.verify_checks import check_scratch
from hal_triton.delta_rule.call import (
    DeltaCall,
    gate_constants,
    gate_numbers,
    gate_tensors,
    result_strides,
    state_strides,
)
from hal_triton.delta_rule.commit import SCRATCH_TENSORS, check_kept
from hal_triton.delta_rule.kernels.verify import delta_drafts, delta_verify
from hal_triton.launch import Launch, Plans, dense_or_none, signature
from hal_triton.tuning import Tuning, block

MOST_DRAFTS: Final = 16
"""Tokens that a row may have: keys and queries of more would not fit registers."""

_SIZES: Final = (8, MOST_DRAFTS)
"""Tokens that kernels are compiled for; a product serves no fewer columns than eight need."""

_ENTRIES: Final = {
    "split": "delta_rule.verify",
    "bf16x3": "delta_rule.verify.cut",
    "ieee": "delta_rule.verify.float32",
}
"""Table entries by how the state meets keys and queries."""


@dataclass(frozen=True, slots=True, eq=False)
class VerifyCall:
    """The arguments of one verify; `delta.dst` repeats src and is never written."""

    delta: DeltaCall
    max_len: int
    scratch: Sequence[Tensor]
    parents: Tensor | None

    @property
    def bounds(self) -> Tensor:
        """query_start_loc, which every verify has."""
        bounds = self.delta.query_start_loc
        if bounds is None:
            raise TypeError(f"{self.delta.operation}: query_start_loc is None")
        return bounds

    @property
    def size(self) -> int:
        """Tokens of a row that the kernels have room for."""
        return next(size for size in _SIZES if self.max_len <= size)

    def signature(self) -> tuple[object, ...]:
        """What decides the plan of this call."""
        return self.delta.signature(), self.size, signature(self.parents, *self.scratch)

    def is_tidy(self) -> bool:
        """Whether kernels can take the tensors as they are."""
        dense_links = self.parents is None or self.parents.is_contiguous()
        return self.delta.is_tidy() and dense_links

    def tidied(self) -> "VerifyCall":
        """The same call on dense copies, without `out`."""
        return replace(self, delta=self.delta.tidied(), parents=dense_or_none(self.parents))

    def check(self, layout: str) -> None:
        """Refuse what does not fit, before anything is written."""
        call, name = self.delta, self.delta.operation
        call.check(layout)
        tokens, rows = call.q.shape[0], call.src.shape[0]
        check_rows(name, tokens, call.src, (), self.bounds, parents=self.parents)
        check_scratch(name, self.scratch, SCRATCH_TENSORS, min(tokens, rows * self.max_len))
        check_kept(name, self.scratch, call.dims)


def check_width(operation: str, max_len: int) -> None:
    """Refuse rows of more tokens than kernels have room for."""
    if max_len > MOST_DRAFTS:
        raise ValueError(
            f"{operation}: max_len is {max_len}, rows may have up to {MOST_DRAFTS} tokens"
        )


@dataclass(frozen=True, slots=True)
class _Drafts:
    """The two launches of a verify, and the shapes of what passes between them."""

    prepare: Launch
    apply: Launch
    operands: tuple[int, ...]
    weights: tuple[int, ...]

    def __call__(self, call: VerifyCall, out: Tensor) -> None:
        """Fill `out` and the scratch."""
        delta, bounds, (keys, updates, decays, paths) = call.delta, call.bounds, call.scratch
        operands = keys.new_empty(self.operands)
        weights = keys.new_empty(self.weights)
        rate, bias = gate_tensors(delta.gate, operands)
        parents = delta.src if call.parents is None else call.parents
        self.prepare(
            delta.q, delta.k, delta.a, delta.b, rate, bias, bounds, parents, keys, decays, paths,
            operands, weights,
        )  # fmt: skip
        self.apply(
            delta.q, delta.k, delta.v, operands, weights, delta.state, delta.src, bounds, updates,
            out,
        )  # fmt: skip


class VerifyRunner:
    """Runs verify calls on one state layout; a signature is checked and planned once."""

    def __init__(self, tuning: Tuning, layout: str) -> None:
        self._tuning, self._layout = tuning, layout
        self._plans: Plans[_Drafts] = Plans()

    def __call__(self, call: VerifyCall) -> Tensor:
        """Draft tokens, each from the state of its parent, act `[T, HV, V]`."""
        check_width(call.delta.operation, call.max_len)
        key = call.signature()
        run = self._plans.get(key)
        if run is None:
            call.check(self._layout)
            if not call.is_tidy():
                result, out = self(call.tidied()), call.delta.out
                return result if out is None else out.copy_(result)
            run = self._plans.put(key, self._plan(call))
        v, out = call.delta.v, call.delta.out
        out = v.new_empty(v.shape) if out is None else out
        if v.shape[0]:
            run(call, out)
        return out

    def _plan(self, call: VerifyCall) -> _Drafts:
        delta, BT = call.delta, call.size
        dims, rows = delta.dims, delta.src.shape[0]
        channel = bool(gate_constants(delta.gate, delta.a)["CHANNEL"])
        pair = (rows, dims.HV, BT, 2)
        operands = (*pair, dims.K) if channel else pair
        return _Drafts(
            self._plan_drafts(call), self._plan_apply(call, channel), operands, (*pair, BT)
        )

    def _plan_drafts(self, call: VerifyCall) -> Launch:
        delta, dims = call.delta, call.delta.dims
        programs = delta.src.shape[0] * dims.HV
        config = self._tuning.pick("delta_rule.drafts", programs)
        numbers = (
            *(*delta.q.stride()[:2], *delta.k.stride()[:2], *delta.a.stride()[:2]),
            *(delta.b.stride(0), *gate_numbers(delta.gate, dims.K)),
        )
        constants = {
            **{"HV": dims.HV, "R": dims.ratio, "SHARED": dims.HV // call.scratch[0].shape[1]},
            **{"K": dims.K, "BK": block(dims.K), "BT": call.size, "L2": delta.qk_l2norm},
            **gate_constants(delta.gate, delta.a),
            "TREE": call.parents is not None,
        }
        return Launch(delta_drafts, programs, numbers, constants, config.options, delta.v.device)

    def _plan_apply(self, call: VerifyCall, channel: bool) -> Launch:
        delta, dims, rows = call.delta, call.delta.dims, call.delta.src.shape[0]
        precision, small = _precisions(delta.q.dtype, channel, self._tuning.drafts)
        name = _ENTRIES[precision] if call.size == _SIZES[0] else f"{_ENTRIES[precision]}.long"
        config = self._tuning.pick(name, rows * dims.HV)
        s_slot, s_h, s_v, s_k = state_strides(delta.state, self._layout)
        BV = min(config.blocks["BV"], block(dims.V, 16))
        BK = min(config.blocks["BK"], block(dims.K, 16))
        numbers = (
            *(rows, delta.q.shape[0], *delta.q.stride()[:2], *delta.k.stride()[:2]),
            *(*delta.v.stride()[:2], *result_strides(delta.out, dims), s_slot, s_h),
        )
        constants = {
            **{"s_v": s_v, "s_k": s_k, "HV": dims.HV, "R": dims.ratio, "K": dims.K, "V": dims.V},
            **{"BK": BK, "BV": BV, "BT": call.size, "CHANNEL": channel},
            **{"PRECISION": precision, "SMALL": small},
        }
        programs = (rows + 1) * dims.HV * -(-dims.V // BV)
        return Launch(delta_verify, programs, numbers, constants, config.options, delta.v.device)


def _precisions(dtype: torch.dtype, channel: bool, drafts: tuple[str, str]) -> tuple[str, str]:
    """How the state meets keys and queries, and how what comes of it is mixed.

    Keys and queries of bfloat16 are exact operands and only the state has to be split; those that
    carry a decay a channel, and float16 ones, are split too. Float32 inputs take IEEE products.
    """
    if dtype == torch.float32:
        return "ieee", "ieee"
    exact = dtype == torch.bfloat16 and not channel
    return ("split" if exact else drafts[0]), drafts[1]
