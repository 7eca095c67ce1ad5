"""Plans and launches of verify and commit."""

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from hal.interfaces import Scratch
from hal.runtime.checks import check_rows
from hal.runtime.verify_checks import check_scratch
from hal_triton.launch import Launch, Plans, signature
from hal_triton.scan.call import (
    Dims,
    ScanCall,
    bounds,
    forms,
    input_strides,
    inputs,
    limits,
    state_strides,
)
from hal_triton.scan.kernels.verify import scan_commit, scan_verify
from hal_triton.scan.kernels.verify_channel import channel_commit, channel_verify
from hal_triton.tuning import Tuning, block

HEAD_SCRATCH: Final = 4
"""Keys, updates, decays and parents."""

CHANNEL_SCRATCH: Final = 2
"""States and parents."""


def scratch_of(shape: Sequence[int], max_batch: int, width: int) -> tuple[Scratch, ...]:
    """What verify leaves for commit, by the shape of a layer's state."""
    tokens = max_batch * width
    kept = {"states": tuple(shape)}
    if len(shape) == 3:
        heads, value_dim, size = shape
        kept = {"keys": (heads, size), "updates": (heads, value_dim), "decays": (heads,)}
    named = [Scratch(name, (tokens, *rest), "float32") for name, rest in kept.items()]
    return (*named, Scratch("parents", (tokens,), "int32"))


def scratch_count(state: Tensor) -> int:
    """How many scratch tensors a state of this rank has."""
    return HEAD_SCRATCH if state.ndim == 4 else CHANNEL_SCRATCH


class VerifyRunner:
    """Runs drafts; a signature is checked and planned once."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._plans: Plans[Launch] = Plans()

    def __call__(self, call: ScanCall, scratch: Sequence[Tensor]) -> Tensor:
        """Every token from the state of its parent, act of x's shape."""
        key = (call.signature(), signature(*scratch))
        launch = self._plans.get(key)
        if launch is None:
            call.check()
            check_scratch(call.operation, scratch, scratch_count(call.state))
            if not call.is_tidy():
                result = self(call.tidied(), scratch)
                return result if call.out is None else call.out.copy_(result)
            launch = self._plans.put(key, self._plan(call))
        out = call.x.new_empty(call.x.shape) if call.out is None else call.out
        if call.x.shape[0]:
            parents = call.src if call.parents is None else call.parents
            launch(*inputs(call), call.state, call.src, bounds(call), parents, *scratch, out)
        return out

    def _plan(self, call: ScanCall) -> Launch:
        dims, rows = call.dims, call.src.shape[0]
        name = "scan.verify.channel" if call.by_channel else "scan.verify"
        config = self._tuning.pick(name, rows * dims.H * dims.P)
        BP = min(config.blocks["BP"], block(dims.P))
        numbers = (
            *(rows, call.x.shape[0], *input_strides(call)),
            *(*state_strides(call.state, dims), *limits(call)),
        )
        constants = {
            **{"H": dims.H, "R": dims.ratio, "P": dims.P, "N": dims.N, "BP": BP},
            **{"BN": block(dims.N), "TREE": call.parents is not None},
            **forms(call, self._tuning),
        }
        kernel = channel_verify if call.by_channel else scan_verify
        programs = (rows + 1) * dims.H * -(-dims.P // BP)
        return Launch(kernel, programs, numbers, constants, config.options, call.x.device)


class CommitRunner:
    """Commits accepted paths; a signature is checked and planned once."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._plans: Plans[Launch] = Plans()

    def __call__(
        self,
        state: Tensor,
        scratch: Sequence[Tensor],
        src: Tensor,
        dst: Tensor,
        query_start_loc: Tensor,
        last: Tensor,
    ) -> None:
        """Write the states after the paths to `last`."""
        key = signature(state, *scratch, src, dst, query_start_loc, last)
        launch = self._plans.get(key)
        if launch is None:
            name = "scan.commit"
            check_scratch(name, scratch, scratch_count(state))
            check_rows(name, 0, src, (("dst", dst), ("last", last)), query_start_loc)
            launch = self._plans.put(key, self._plan(state, src.shape[0]))
        src, dst, ends, last = (t.contiguous() for t in (src, dst, query_start_loc, last))
        if state.ndim == 4:
            launch(state, *scratch, src, dst, ends, last)
        else:
            launch(state, scratch[0], dst, ends, last)

    def _plan(self, state: Tensor, rows: int) -> Launch:
        dims = dims_of(state)
        name = "scan.commit.channel" if state.ndim == 3 else "scan.commit"
        config = self._tuning.pick(name, rows * dims.H * dims.P)
        BP = min(config.blocks["BP"], block(dims.P))
        constants = {"H": dims.H, "P": dims.P, "N": dims.N, "BP": BP, "BN": block(dims.N)}
        kernel = scan_commit if state.ndim == 4 else channel_commit
        programs = rows * dims.H * -(-dims.P // BP)
        numbers = state_strides(state, dims)
        return Launch(kernel, programs, numbers, constants, config.options, state.device)


def dims_of(state: Tensor) -> Dims:
    """Dims as the pool alone shows them; Mamba-1's channels are one head."""
    if state.ndim == 4:
        _, heads, channels, size = state.shape
        return Dims(heads, channels, size, 1)
    _, channels, size = state.shape
    return Dims(1, channels, size, 1)
