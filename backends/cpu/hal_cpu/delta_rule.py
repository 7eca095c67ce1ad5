"""The gated delta rule on the CPU: batched recurrence for single tokens, chunks for longer rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hal.interfaces import Gate
from hal.runtime.checks import check_delta, check_rows
from hal.runtime.verify_checks import check_scratch
from hal_cpu.chunk import advance_chunk, chunk_size
from hal_cpu.gates import beta_of, log_decay
from hal_cpu.paths import Paths, accepted, run_levels
from hal_cpu.recurrent import Operands, advance_held, advance_rows
from hal_cpu.rows import Packed, Row, Steps, result_like, start_state

SCRATCH_TENSORS: Final = 4
"""Keys, updates, decays and parents."""


@dataclass(frozen=True, slots=True, eq=False)
class _Inputs:
    """The per-token tensors of a call; they are always cut together."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor

    def pick(self, index: Tensor) -> "_Inputs":
        """The tokens at `index`, copied."""
        tensors = (self.q, self.k, self.v, self.a, self.b)
        return _Inputs(*(tensor.index_select(0, index) for tensor in tensors))

    def cut(self, begin: int, end: int) -> "_Inputs":
        """The tokens `[begin, end)`, viewed."""
        tensors = (self.q, self.k, self.v, self.a, self.b)
        return _Inputs(*(tensor[begin:end] for tensor in tensors))


class TorchDeltaRule:
    """Offers the unfused operations for state layouts "VK" and "KV", all gate kinds and none.

    The state is float32. A row's bits do not depend on the rest of its batch where K and V are
    multiples of 16; for other dims they agree within float32 rounding.
    """

    def __init__(self, layout: str = "VK") -> None:
        self._layout = layout

    def _key_major(self, state: Tensor) -> Tensor:
        """The state as `[S, HV, K, V]`, a view in either layout."""
        return state.transpose(-1, -2) if self._layout == "VK" else state

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
        name = "delta_rule.prefill"
        check_delta(name, q, k, v, a, b, gate, state, self._layout, out)
        check_rows(name, q.shape[0], src, (("dst", dst),), query_start_loc, track)
        rows = Packed.of(name, state.shape[0], q.shape[0], src, dst, query_start_loc, track, "q")
        inputs, state = _Inputs(q, k, v, a, b), self._key_major(state)
        out = result_like(v, out)
        out[rows.end :] = 0
        if rows.steps.tokens:
            index = torch.tensor(rows.steps.tokens)
            result = _step(inputs.pick(index), gate, state, rows.steps, qk_l2norm)
            out.index_copy_(0, index, result)
        for row in rows.runs:
            _run(inputs, out, gate, state, row, qk_l2norm)
        return out

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
        """Advance every row by one token and read its new state; pad rows exactly zero."""
        name = "delta_rule.decode"
        check_delta(name, q, k, v, a, b, gate, state, self._layout, out)
        check_rows(name, q.shape[0], src, (("dst", dst),), None)
        steps = Steps.of(name, state.shape[0], src, dst)
        inputs, state = _Inputs(q, k, v, a, b), self._key_major(state)
        if not steps.tokens:
            return result_like(v, out).zero_()
        if len(steps.tokens) == q.shape[0]:
            result = _step(inputs, gate, state, steps, qk_l2norm)
            return result if out is None else out.copy_(result)
        index = torch.tensor(steps.tokens)
        result = _step(inputs.pick(index), gate, state, steps, qk_l2norm)
        return result_like(v, out).zero_().index_copy_(0, index, result)

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
        """Run draft tokens, each from the state of its parent, as decodes of its path would."""
        name = "delta_rule.verify"
        check_delta(name, q, k, v, a, b, gate, state, self._layout, out)
        check_rows(name, q.shape[0], src, (), query_start_loc, parents=parents)
        paths = Paths.of(name, state.shape[0], q.shape[0], src, query_start_loc, parents, "q")
        check_scratch(name, scratch, SCRATCH_TENSORS, paths.starts[-1])
        paths.remember(scratch[-1])
        inputs = _Inputs(q, k, v, a, b)

        def advance(held: Tensor, tokens: Tensor) -> Tensor:
            operands = _operands(inputs.pick(tokens), gate, qk_l2norm)
            result, update = advance_held(operands, self._key_major(held))
            _keep(scratch, tokens, operands, update)
            return result.to(v.dtype)

        return run_levels(paths, state, advance, result_like(v, out))

    def commit(
        self,
        state: Tensor,
        scratch: Sequence[Tensor],
        src: Tensor,
        dst: Tensor,
        query_start_loc: Tensor,
        last: Tensor,
    ) -> None:
        """Replay the path to row-relative token `last` (-1: write nothing) into `dst`."""
        name = "delta_rule.commit"
        rows = accepted(name, state, scratch, SCRATCH_TENSORS, src, dst, query_start_loc, last)
        state, (keys, updates, decays, _) = self._key_major(state), scratch
        for row in rows:
            target = start_state(state, row.src, row.dst)
            for token in row.path:
                target.mul_(decays[token].unsqueeze(-1))
                target.addcmul_(keys[token].unsqueeze(-1), updates[token].unsqueeze(-2))


def _keep(scratch: Sequence[Tensor], tokens: Tensor, operands: Operands, update: Tensor) -> None:
    """Keep what a replay of these tokens needs, by value head."""
    keys, updates, decays, _ = scratch
    ratio = operands.fall.shape[1]
    shape = (len(tokens), *keys.shape[1:])
    keys.index_copy_(0, tokens, operands.key.expand(-1, ratio, -1, -1).reshape(shape))
    updates.index_copy_(0, tokens, update)
    decays.index_copy_(0, tokens, operands.fall.expand(-1, -1, shape[2], -1).reshape(shape))


def _operands(inputs: _Inputs, gate: Gate | None, qk_l2norm: bool) -> Operands:
    decay, beta = log_decay(inputs.a, gate).exp(), beta_of(inputs.b, gate)
    return Operands.of(inputs.q, inputs.k, inputs.v, decay, beta, qk_l2norm)


def _step(
    inputs: _Inputs, gate: Gate | None, state: Tensor, steps: Steps, qk_l2norm: bool
) -> Tensor:
    """One token of each row; the result in v's dtype."""
    operands = _operands(inputs, gate, qk_l2norm)
    return advance_rows(operands, state, steps).to(inputs.v.dtype)


def _run(
    inputs: _Inputs, out: Tensor, gate: Gate | None, state: Tensor, row: Row, qk_l2norm: bool
) -> None:
    """One row of several tokens, chunk by chunk; a chunk also ends at every track point."""
    carried, length = start_state(state, row.src, row.dst), row.length
    size = chunk_size(scalar=inputs.a.ndim == 2)
    done = 0
    for end in sorted({*range(size, length, size), length, *(count for count, _ in row.track)}):
        part = inputs.cut(row.begin + done, row.begin + end)
        g, beta = log_decay(part.a, gate), beta_of(part.b, gate)
        result = advance_chunk(part.q, part.k, part.v, g, beta, carried, qk_l2norm)
        out[row.begin + done : row.begin + end] = result
        for count, slot in row.track:
            if count == end:
                state[slot] = carried
        done = end
