"""The selective scan on the CPU: Mamba-2, Mamba-1 and lightning."""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from hal.runtime.checks import check_rows
from hal.runtime.scan_checks import check_scan
from hal.runtime.verify_checks import check_scratch
from hal_cpu.paths import Paths, accepted, run_levels
from hal_cpu.rows import Packed, Row, Steps, result_like, start_state
from hal_cpu.scan_chunk import advance_chunk, chunk_size
from hal_cpu.scan_inputs import Operands, Rates, Tokens, by_head
from hal_cpu.scan_step import advance_held, advance_rows

UNLIMITED: Final = (0.0, float("inf"))
"""The dt limit that only keeps dt from being negative."""

MAMBA2_SCRATCH: Final = 4
"""Keys, updates, decays and parents."""

MAMBA1_SCRATCH: Final = 2
"""States and parents."""


class TorchScan:
    """Offers every operation of the scan on a float32 state.

    x of three dimensions is Mamba-2 or lightning, of two Mamba-1.
    """

    def prefill(
        self,
        x: Tensor,
        dt: Tensor | None,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        dt_bias: Tensor | None,
        z: Tensor | None,
        state: Tensor,
        src: Tensor,
        dst: Tensor,
        query_start_loc: Tensor,
        max_len: int,
        *,
        dt_limit: tuple[float, float] = UNLIMITED,
        dt_softplus: bool = True,
        out: Tensor | None = None,
        track: Tensor | None = None,
    ) -> Tensor:
        """Run any mixture of rows; result act of x's shape, D skip and z included."""
        name = "scan.prefill"
        check_scan(name, x, dt, A, B, C, D, dt_bias, z, state, dt_limit, out)
        check_rows(name, x.shape[0], src, (("dst", dst),), query_start_loc, track)
        rows = Packed.of(name, state.shape[0], x.shape[0], src, dst, query_start_loc, track, "x")
        tokens, rates = Tokens(x, dt, B, C, z), Rates(A, D, dt_bias, dt_limit, dt_softplus)
        state, out = by_head(state, B.shape[1]), result_like(x, out)
        out[rows.end :] = 0
        if rows.steps.tokens:
            index = torch.tensor(rows.steps.tokens)
            out.index_copy_(0, index, _step(tokens.pick(index), rates, state, rows.steps))
        for row in rows.runs:
            _run(tokens, rates, state, row, out)
        return out

    def decode(
        self,
        x: Tensor,
        dt: Tensor | None,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        dt_bias: Tensor | None,
        z: Tensor | None,
        state: Tensor,
        src: Tensor,
        dst: Tensor,
        *,
        dt_limit: tuple[float, float] = UNLIMITED,
        dt_softplus: bool = True,
        out: Tensor | None = None,
    ) -> Tensor:
        """Advance every row by one token; the dt limit binds here as in prefill."""
        name = "scan.decode"
        check_scan(name, x, dt, A, B, C, D, dt_bias, z, state, dt_limit, out)
        check_rows(name, x.shape[0], src, (("dst", dst),), None)
        steps = Steps.of(name, state.shape[0], src, dst)
        tokens, rates = Tokens(x, dt, B, C, z), Rates(A, D, dt_bias, dt_limit, dt_softplus)
        if not steps.tokens:
            return result_like(x, out).zero_()
        state = by_head(state, B.shape[1])
        if len(steps.tokens) == x.shape[0]:
            result = _step(tokens, rates, state, steps)
            return result if out is None else out.copy_(result)
        index = torch.tensor(steps.tokens)
        result = _step(tokens.pick(index), rates, state, steps)
        return result_like(x, out).zero_().index_copy_(0, index, result)

    def verify(
        self,
        x: Tensor,
        dt: Tensor | None,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        dt_bias: Tensor | None,
        z: Tensor | None,
        state: Tensor,
        src: Tensor,
        query_start_loc: Tensor,
        max_len: int,
        scratch: Sequence[Tensor],
        *,
        dt_limit: tuple[float, float] = UNLIMITED,
        dt_softplus: bool = True,
        parents: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Run draft tokens, each from the state of its parent, as decodes of its path would."""
        name = "scan.verify"
        check_scan(name, x, dt, A, B, C, D, dt_bias, z, state, dt_limit, out)
        check_rows(name, x.shape[0], src, (), query_start_loc, parents=parents)
        paths = Paths.of(name, state.shape[0], x.shape[0], src, query_start_loc, parents, "x")
        check_scratch(name, scratch, _tensors(state), paths.starts[-1])
        paths.remember(scratch[-1])
        tokens, rates = Tokens(x, dt, B, C, z), Rates(A, D, dt_bias, dt_limit, dt_softplus)

        def advance(held: Tensor, index: Tensor) -> Tensor:
            picked = tokens.pick(index)
            operands = Operands.of(picked, rates)
            y = advance_held(operands, by_head(held, B.shape[1]))
            _keep(scratch, index, operands, held)
            return picked.finish(y.view(picked.x.shape), rates)

        return run_levels(paths, state, advance, result_like(x, out))

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
        tensors = _tensors(state)
        rows = accepted("scan.commit", state, scratch, tensors, src, dst, query_start_loc, last)
        for row in rows:
            if tensors == MAMBA1_SCRATCH:
                state[row.dst] = scratch[0][row.path[-1]]
            else:
                _replay(scratch, start_state(state, row.src, row.dst), row.path)


def _tensors(state: Tensor) -> int:
    """How many scratch tensors a state of this rank has."""
    return MAMBA2_SCRATCH if state.ndim == 4 else MAMBA1_SCRATCH


def _keep(scratch: Sequence[Tensor], index: Tensor, operands: Operands, held: Tensor) -> None:
    """Keep what commit needs of these tokens: a replay's operands, or Mamba-1's states."""
    if len(scratch) == MAMBA1_SCRATCH:
        scratch[0].index_copy_(0, index, held)
        return
    keys, updates, decays, _ = scratch
    keys.index_copy_(0, index, operands.B)
    updates.index_copy_(0, index, operands.update)
    decays.index_copy_(0, index, operands.decay.flatten(1))


def _replay(scratch: Sequence[Tensor], state: Tensor, path: Sequence[int]) -> None:
    """Apply a path's decays and updates to one state `[H, P, N]` in place."""
    keys, updates, decays, _ = scratch
    for token in path:
        state.mul_(decays[token].view(-1, 1, 1))
        state.addcmul_(updates[token].unsqueeze(-1), keys[token].unsqueeze(1))


def _step(tokens: Tokens, rates: Rates, state: Tensor, steps: Steps) -> Tensor:
    """One token of each row; the result in x's dtype."""
    y = advance_rows(Operands.of(tokens, rates), state, steps)
    return tokens.finish(y.view(tokens.x.shape), rates)


def _run(tokens: Tokens, rates: Rates, state: Tensor, row: Row, out: Tensor) -> None:
    """One row of several tokens, chunk by chunk; a chunk also ends at every track point."""
    carried = torch.empty(state.shape[1:])
    carried = carried.zero_() if row.src < 0 else carried.copy_(state[row.src])
    size, length, done = chunk_size(tokens, carried), row.length, 0
    ends = {*range(size, length, size), length, *(count for count, _ in row.track)}
    for end in sorted(ends):
        part = tokens.cut(row.begin + done, row.begin + end)
        y = advance_chunk(part, rates, carried)
        out[row.begin + done : row.begin + end] = part.finish(y, rates)
        for count, slot in (*row.track, (length, row.dst)):
            if count == end and slot >= 0:
                state[slot] = carried
        done = end
