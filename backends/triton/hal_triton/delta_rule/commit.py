"""Plans and launches of commit, and what verify has to keep for it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from torch import Tensor

from hal.runtime.checks import check_rows
from hal.runtime.verify_checks import check_scratch
from hal_triton.delta_rule.call import STATE_DTYPES, Dims, state_strides
from hal_triton.delta_rule.kernels.commit import delta_commit
from hal_triton.launch import Launch, Plans, dense, signature
from hal_triton.tuning import Tuning, block

SCRATCH_TENSORS: Final = 4
"""Keys, updates, decays and paths."""


_KEY: Final = 128
"""Key channels that a table's token groups are for: wider keys are held fewer at a time."""


def check_kept(operation: str, scratch: Sequence[Tensor], dims: Dims) -> None:
    """Refuse scratch that was not made for these heads and dims, or is not dense."""
    shared = scratch[0].shape[1]
    if shared == 0 or dims.HV % shared:
        raise ValueError(f"{operation}: scratch keeps keys of {shared} heads, state has {dims.HV}")
    names = ("keys", "updates", "decays", "paths")
    shapes = ((shared, dims.K), (dims.HV, dims.V), (dims.HV, dims.K), (2,))
    for name, tensor, shape in zip(names, scratch, shapes, strict=True):
        if tuple(tensor.shape[1:]) != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{operation}: {name} of scratch is {list(tensor.shape)} of strides "
                f"{list(tensor.stride())}, expected dense [tokens, {', '.join(map(str, shape))}]"
            )


@dataclass(frozen=True, slots=True, eq=False)
class CommitCall:
    """The arguments of one commit."""

    state: Tensor
    scratch: Sequence[Tensor]
    src: Tensor
    dst: Tensor
    query_start_loc: Tensor
    last: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, those of the scratch last."""
        return (self.state, *self.indices(), *self.scratch)

    def indices(self) -> tuple[Tensor, ...]:
        """The index tensors."""
        return self.src, self.dst, self.query_start_loc, self.last

    def check(self, layout: str) -> Dims:
        """Refuse what does not fit, before anything is written; the heads and dims otherwise."""
        name, state = "delta_rule.commit", self.state
        check_rows(name, 0, self.src, (("dst", self.dst), ("last", self.last)),
                   self.query_start_loc)  # fmt: skip
        check_scratch(name, self.scratch, SCRATCH_TENSORS)
        if state.ndim != 4 or state.dtype not in STATE_DTYPES:
            raise ValueError(
                f"{name}: state is {list(state.shape)} {state.dtype}, expected "
                f"[slots, HV, {layout[0]}, {layout[1]}] of a float dtype"
            )
        _, HV, first, second = state.shape
        V, K = (first, second) if layout == "VK" else (second, first)
        dims = Dims(self.scratch[0].shape[1], HV, K, V)
        check_kept(name, self.scratch, dims)
        return dims


class CommitRunner:
    """Runs commits on one state layout; a signature is checked and planned once."""

    def __init__(self, tuning: Tuning, layout: str) -> None:
        self._tuning, self._layout = tuning, layout
        self._plans: Plans[Launch] = Plans()

    def __call__(self, call: CommitCall) -> None:
        """Replay every row's path to its last token into `dst`."""
        key = signature(*call.tensors())
        launch = self._plans.get(key)
        if launch is None:
            dims = call.check(self._layout)
            if not all(t.is_contiguous() for t in call.indices()):
                src, dst, bounds, last = map(dense, call.indices())
                return self(replace(call, src=src, dst=dst, query_start_loc=bounds, last=last))
            launch = self._plans.put(key, self._plan(call, dims))
        launch(*call.scratch, call.state, *call.indices())
        return None

    def _plan(self, call: CommitCall, dims: Dims) -> Launch:
        rows = call.src.shape[0]
        config = self._tuning.pick("delta_rule.commit", rows * dims.HV)
        s_slot, s_h, s_v, s_k = state_strides(call.state, self._layout)
        BV = min(config.blocks["BV"], block(dims.V))
        constants = {
            **{"s_v": s_v, "s_k": s_k, "HV": dims.HV, "SHARED": dims.ratio, "K": dims.K},
            **{"V": dims.V, "BK": block(dims.K), "BV": BV},
            "BG": max(1, config.blocks["BG"] * min(_KEY, block(dims.K)) // block(dims.K)),
            "EVICT": config.evict,
        }
        programs = rows * dims.HV * -(-dims.V // BV)
        numbers = (s_slot, s_h)
        return Launch(delta_commit, programs, numbers, constants, config.options, call.state.device)
