"""The depthwise causal convolution through the vendor's functions, on scratch rows.

Sums, windows and weights are float32, so that a result is rounded once and a window not at all.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hal.runtime.checks import check_conv, check_rows
from hal_npu.rows import (
    Grid,
    Spans,
    count_up,
    deliver,
    gather,
    last_steps,
    scatter,
    slots,
    without_pads,
)
from hal_npu.scratch import held, refuse_tree

Call = Callable[..., Any]


class AscendConv:
    """Offers every operation of the convolution for state layouts "CW" and "WC".

    Decode and verify are one vendor function that keeps the window after every step; the other
    update functions ignore a bias, wrap a negative slot around, or round the history to float16.
    """

    def __init__(self, prefill: Call, steps: Call, move: Call, layout: str = "CW") -> None:
        self._prefill = prefill
        self._steps = steps
        self._move = move
        self._layout = layout

    def _by_channel(self, state: Tensor) -> Tensor:
        """The state as `[S, C, W-1]`, a view in either layout."""
        return state if self._layout == "CW" else state.transpose(1, 2)

    def prefill(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        src: Tensor,
        dst: Tensor,
        start: Tensor,
        query_start_loc: Tensor,
        max_len: int,
        *,
        activation: str | None = None,
        out: Tensor | None = None,
        track: Tensor | None = None,
    ) -> Tensor:
        """Convolve any mixture of rows; x and result act `[T, C]`, track i32 `[M, 3]`.

        Every row continues from its scratch window, the zeros of a fresh one included: the vendor
        function leaves a wrong window where some rows have an initial state and others have none.
        """
        name = "conv.prefill"
        check_conv(name, x, weight, bias, state, self._layout, activation, out)
        check_rows(name, x.shape[0], src, (("dst", dst), ("start", start)), query_start_loc, track)
        args = (state.shape[0], x.shape[0], src, dst, query_start_loc, track)
        spans = Spans.of(name, *args, "x")
        if not spans.rows:
            return deliver(torch.zeros_like(x), out, x.dtype)
        state = self._by_channel(state)
        rows = len(spans.rows)
        heads = gather(state, _ints([row.src for row in spans.rows], x)).float()
        windows = heads.clone()
        result = self._prefill(
            x=x.float().t().contiguous(),
            weight=_float(weight),
            bias=_float(bias),
            query_start_loc=_ints([0, *(row.end for row in spans.rows)], x, torch.int32),
            cache_indices=count_up(rows, x),
            has_initial_state=torch.ones(rows, dtype=torch.bool, device=x.device),
            conv_states=windows,
            activation=activation,
        )
        self._track(x, heads, state, spans)
        scatter(state, [row.dst for row in spans.rows], windows)
        return deliver(result.t(), out, x.dtype)

    def _track(self, x: Tensor, heads: Tensor, state: Tensor, spans: Spans) -> None:
        """Store the windows of the rows' track points."""
        points = [(i, row, *point) for i, row in enumerate(spans.rows) for point in row.track]
        for i, row, count, slot in points:
            inputs = torch.cat((heads[i], x[row.begin : row.begin + count].float().t()), dim=1)
            state[slot] = inputs[:, -state.shape[2] :].to(state.dtype)

    def decode(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        src: Tensor,
        dst: Tensor,
        start: Tensor,
        *,
        activation: str | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Convolve one token a row; x and result act `[B, C]`, pad rows exactly zero."""
        name = "conv.decode"
        check_conv(name, x, weight, bias, state, self._layout, activation, out)
        check_rows(name, x.shape[0], src, (("dst", dst), ("start", start)), None)
        rows = x.shape[0]
        if not rows:
            return deliver(torch.zeros_like(x), out, x.dtype)
        state = self._by_channel(state)
        windows = x.new_empty((rows, 1, *state.shape[1:]), dtype=torch.float32)
        result = self._run(x.unsqueeze(2), weight, bias, gather(state, src), windows, activation)
        self._store(state, windows[:, 0], dst)
        return deliver(without_pads(result[:, :, 0], src, dst), out, x.dtype)

    def verify(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        src: Tensor,
        start: Tensor,
        query_start_loc: Tensor,
        max_len: int,
        scratch: Sequence[Tensor],
        *,
        parents: Tensor | None = None,
        activation: str | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Convolve chains of drafts, act `[T, C]`; the window after each stays in scratch."""
        name = "conv.verify"
        check_conv(name, x, weight, bias, state, self._layout, activation, out)
        check_rows(name, x.shape[0], src, (("start", start),), query_start_loc, parents=parents)
        refuse_tree(name, parents)
        windows = held(name, scratch, src.shape[0], max_len)
        rows, tokens = src.shape[0], x.shape[0]
        if not rows or not tokens:
            return deliver(torch.zeros_like(x), out, x.dtype)
        grid = Grid.of(query_start_loc, tokens, windows.shape[1])
        cells = grid.spread(x).view(rows, grid.width, -1).transpose(1, 2)
        heads = gather(self._by_channel(state), src)
        result = self._run(cells, weight, bias, heads, windows, activation)
        packed = grid.collect(result.transpose(1, 2).flatten(0, 1))
        return deliver(packed, out, x.dtype)

    def _run(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        heads: Tensor,
        windows: Tensor,
        activation: str | None,
    ) -> Tensor:
        """Steps of every row from its scratch head, x and result `[B, C, steps]`, float32."""
        index = count_up(x.shape[0], x)
        result: Tensor = self._steps(
            x=x.float().contiguous(),
            conv_state=heads.float().contiguous(),
            weight=_float(weight),
            bias=_float(bias),
            conv_state_indices=index,
            intermediate_conv_window=windows,
            intermediate_state_indices=index,
            activation=activation,
            update_persistent_state=False,
        )
        return result

    def commit(
        self,
        state: Tensor,
        scratch: Sequence[Tensor],
        src: Tensor,
        dst: Tensor,
        start: Tensor,
        query_start_loc: Tensor,
        last: Tensor,
    ) -> None:
        """Write the window after row-relative token `last` (-1: write nothing)."""
        name = "conv.commit"
        check_rows(name, 0, src, (("dst", dst), ("last", last), ("start", start)), query_start_loc)
        rows = src.shape[0]
        windows = held(name, scratch, rows, 0)
        if rows:
            steps = last_steps(query_start_loc, last)
            picked = windows[count_up(rows, state), steps.clamp_min(0)]
            targets = dst.masked_fill(steps < 0, -1)
            self._store(self._by_channel(state), picked, targets)

    def _store(self, state: Tensor, ends: Tensor, dst: Tensor) -> None:
        """Store windows `[B, C, W-1]` in the slots that are there, in the state's dtype."""
        rows = count_up(ends.shape[0], state)
        self._move(
            dst=state.unsqueeze(0),
            src=ends.to(state.dtype)[None, :, None],
            dst_indices=slots(dst),
            src_indices=rows,
            step_indices=torch.zeros_like(rows),
        )


def _float(tensor: Tensor | None) -> Tensor | None:
    """Dense float32; free where `prepare` laid it out so."""
    return None if tensor is None else tensor.float().contiguous()


def _ints(values: list[int], like: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device)
