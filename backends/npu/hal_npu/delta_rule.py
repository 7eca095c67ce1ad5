"""The gated delta rule through the vendor's functions."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hal.interfaces import Gate
from hal.model.spec import GateKind
from hal.runtime.checks import check_delta, check_rows
from hal_npu.chunked import Chunked
from hal_npu.operands import Inputs, Recurrent, normed
from hal_npu.rows import (
    Grid,
    Spans,
    count_up,
    deliver,
    gather,
    last_steps,
    slots,
    without_pads,
)
from hal_npu.scratch import held, refuse_tree

Call = Callable[..., Any]


class AscendDeltaRule:
    """Offers the unfused operations for state layouts "VK" and "KV".

    `steps` runs a fixed number of tokens a row from a pool that it only reads, and keeps the state
    after each; `update` is the one-token kernel of Gated DeltaNet, which works on "KV"; `chunk` is
    prefill, on "KV" rows. Pools are read and written through views, so neither layout is copied.
    """

    def __init__(
        self, chunk: Call, update: Call, steps: Call, move: Call, layout: str = "VK"
    ) -> None:
        self._chunk = Chunked(chunk)
        self._update = update
        self._steps = steps
        self._move = move
        self._layout = layout

    def _value_major(self, state: Tensor) -> Tensor:
        """The state as `[S, HV, V, K]`, a view in either layout."""
        return state if self._layout == "VK" else state.transpose(-1, -2)

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
        """Run any mixture of rows in chunks of 64 tokens; track i32 `[M, 3]` at any position."""
        name = "delta_rule.prefill"
        check_delta(name, q, k, v, a, b, gate, state, self._layout, out)
        check_rows(name, q.shape[0], src, (("dst", dst),), query_start_loc, track)
        args = (state.shape[0], q.shape[0], src, dst, query_start_loc, track)
        spans = Spans.of(name, *args, "q")
        inputs = Inputs(q, k, v, a, b)
        result = self._chunk(
            name, inputs, gate, self._value_major(state).transpose(-1, -2), spans, qk_l2norm
        )
        return deliver(result, out, v.dtype)

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
        if not q.shape[0]:
            return deliver(torch.zeros_like(v), out, v.dtype)
        inputs = Inputs(q, k, v, a, b)
        if gate is not None and self._updates(gate, v.shape[1]):
            result = self._decode_update(inputs, gate, state, src, dst, qk_l2norm)
        else:
            result = self._decode_steps(inputs, gate, state, src, dst, qk_l2norm)
        return deliver(without_pads(result, src, dst), out, v.dtype)

    def _updates(self, gate: Gate, heads: int) -> bool:
        """Whether the one-token kernel can serve: it launches pairs of heads with one decay each.

        Of an odd number of heads it would leave out the last.
        """
        return self._layout == "KV" and gate.kind is GateKind.SCALAR and heads % 2 == 0

    def _decode_update(
        self,
        inputs: Inputs,
        gate: Gate,
        state: Tensor,
        src: Tensor,
        dst: Tensor,
        qk_l2norm: bool,
    ) -> Tensor:
        """One token by the kernel that advances states in place, on dense scratch rows.

        It copies a strided pool before it writes, which would lose the update. beta_scale m is
        carried by sqrt(m) in k and v, since the kernel makes beta itself.
        """
        rows, root = src.shape[0], gate.beta_scale**0.5
        ends = gather(state, src)
        q, k = normed(inputs.q, qk_l2norm), normed(inputs.k, qk_l2norm) * root
        bounds = torch.arange(rows + 1, dtype=torch.int32, device=src.device)
        result: Tensor = self._update(
            A_log=gate.A_log,
            a=inputs.a.float().contiguous(),
            dt_bias=gate.dt_bias,
            softplus_beta=1.0,
            softplus_threshold=20.0,
            q=q.unsqueeze(0),
            k=k.unsqueeze(0),
            v=(inputs.v.float() * root).unsqueeze(0),
            b=inputs.b.float().contiguous(),
            initial_state_source=ends,
            initial_state_indices=count_up(rows, src),
            scale=q.shape[2] ** -0.5,
            use_qk_l2norm_in_kernel=False,
            cu_seqlens=bounds,
            is_kda=False,
        )
        self._store(state, ends.unsqueeze(1), dst, torch.zeros_like(dst))
        return result.reshape(inputs.v.shape)

    def _decode_steps(
        self,
        inputs: Inputs,
        gate: Gate | None,
        state: Tensor,
        src: Tensor,
        dst: Tensor,
        qk_l2norm: bool,
    ) -> Tensor:
        """One token as a verify of one step whose state is stored at once; any gate."""
        pool = self._value_major(state)
        snapshots = pool.new_empty((src.shape[0], 1, *pool.shape[1:]))
        result = self._run(inputs, gate, pool, src, snapshots, qk_l2norm)
        self._store(pool, snapshots, dst, torch.zeros_like(dst))
        return result

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
        """Run chains of drafts; the pool is read alone, the state after each stays in scratch."""
        name = "delta_rule.verify"
        check_delta(name, q, k, v, a, b, gate, state, self._layout, out)
        check_rows(name, q.shape[0], src, (), query_start_loc, parents=parents)
        refuse_tree(name, parents)
        snapshots = held(name, scratch, src.shape[0], max_len)
        if not src.shape[0] or not q.shape[0]:
            return deliver(torch.zeros_like(v), out, v.dtype)
        grid = Grid.of(query_start_loc, q.shape[0], snapshots.shape[1])
        cells = Inputs(q, k, v, a, b).cut(grid.token)
        result = self._run(cells, gate, self._value_major(state), src, snapshots, qk_l2norm)
        return deliver(grid.collect(result), out, v.dtype)

    def _run(
        self,
        cells: Inputs,
        gate: Gate | None,
        pool: Tensor,
        src: Tensor,
        snapshots: Tensor,
        qk_l2norm: bool,
    ) -> Tensor:
        """Steps of every row, `[B * steps, HV, V]` float32; gates are always made ready here."""
        given = Recurrent.of(cells, gate, qk_l2norm)
        result: Tensor = self._steps(
            A_log=given.beta[0],
            dt_bias=given.beta[0],
            q=given.q.unsqueeze(0),
            k=given.k.unsqueeze(0),
            v=given.v.unsqueeze(0),
            a=given.decay.unsqueeze(0),
            b=given.beta.unsqueeze(0),
            initial_state_source=pool,
            initial_state_indices=slots(src),
            intermediate_states_buffer=snapshots,
            intermediate_state_indices=count_up(src.shape[0], src),
            cache_steps=snapshots.shape[1],
            scale=cells.q.shape[2] ** -0.5,
            gates_are_preactivated=True,
        )
        return result.reshape(given.v.shape) * given.factor

    def commit(
        self,
        state: Tensor,
        scratch: Sequence[Tensor],
        src: Tensor,
        dst: Tensor,
        query_start_loc: Tensor,
        last: Tensor,
    ) -> None:
        """Write the state after row-relative token `last` (-1: write nothing)."""
        name = "delta_rule.commit"
        check_rows(name, 0, src, (("dst", dst), ("last", last)), query_start_loc)
        snapshots = held(name, scratch, src.shape[0], 0)
        if src.shape[0]:
            steps = last_steps(query_start_loc, last)
            self._store(self._value_major(state), snapshots, dst, steps)

    def _store(self, pool: Tensor, snapshots: Tensor, dst: Tensor, steps: Tensor) -> None:
        """Move one snapshot a row `[B, steps, ...]` into its slot, through any strides."""
        self._move(
            dst=pool.unsqueeze(0),
            src=snapshots.unsqueeze(0),
            dst_indices=slots(dst),
            src_indices=count_up(snapshots.shape[0], pool),
            step_indices=slots(steps),
        )
