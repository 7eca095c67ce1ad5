"""The depthwise causal convolution on the CPU, tap by tap in float32."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import silu

from hal.runtime.checks import check_conv, check_rows
from hal.runtime.verify_checks import check_scratch
from hal_cpu.gates import silu_
from hal_cpu.paths import Paths, accepted
from hal_cpu.rows import Packed, Row, Steps, gather, result_like, scatter

BLOCK_ELEMENTS: Final = 1 << 18
"""Elements of a time block: its float32 sum stays in cache over all taps."""


class TorchConv:
    """Offers every operation of the convolution for state layouts "CW" and "WC".

    The state has x's dtype or is float32; both keep the inputs exactly. A row's bits do not depend
    on the rest of its batch.
    """

    def __init__(self, layout: str = "CW") -> None:
        self._layout = layout

    def _by_time(self, state: Tensor) -> Tensor:
        """The state as `[S, W-1, C]`, a view in either layout."""
        return state.transpose(1, 2) if self._layout == "CW" else state

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
        """Convolve any mixture of rows; x and result act `[T, C]`, track i32 `[M, 3]`."""
        name = "conv.prefill"
        check_conv(name, x, weight, bias, state, self._layout, activation, out)
        check_rows(name, x.shape[0], src, (("dst", dst), ("start", start)), query_start_loc, track)
        rows = Packed.of(name, state.shape[0], x.shape[0], src, dst, query_start_loc, track, "x")
        taps, offset = _taps(weight), _float(bias)
        state = self._by_time(state)
        out = result_like(x, out)
        out[rows.end :] = 0
        if rows.steps.tokens:
            index = torch.tensor(rows.steps.tokens)
            y = _step(x.index_select(0, index), taps, offset, state, rows.steps, activation)
            out.index_copy_(0, index, y)
        for row in rows.runs:
            _run(x, taps, offset, state, row, activation, out)
        return out

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
        steps = Steps.of(name, state.shape[0], src, dst)
        if not steps.tokens:
            return result_like(x, out).zero_()
        taps, offset = _taps(weight), _float(bias)
        state = self._by_time(state)
        if len(steps.tokens) == x.shape[0]:
            y = _step(x, taps, offset, state, steps, activation)
            return y if out is None else out.copy_(y)
        index = torch.tensor(steps.tokens)
        y = _step(x.index_select(0, index), taps, offset, state, steps, activation)
        return result_like(x, out).zero_().index_copy_(0, index, y)

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
        """Convolve draft tokens, act `[T, C]`, each over the window of its parents."""
        name = "conv.verify"
        check_conv(name, x, weight, bias, state, self._layout, activation, out)
        check_rows(name, x.shape[0], src, (("start", start),), query_start_loc, parents=parents)
        paths = Paths.of(name, state.shape[0], x.shape[0], src, query_start_loc, parents, "x")
        live = paths.starts[-1]
        check_scratch(name, scratch, 2, live)
        out = result_like(x, out)
        out[live:] = 0
        if live:
            scratch[0][:live] = x[:live]
            paths.remember(scratch[1])
            heads = gather(self._by_time(state), paths.sources).float().flatten(0, 1)
            inputs, taps = torch.cat((heads, x[:live].float())), _taps(weight)
            index = torch.tensor(_windows(paths, taps.shape[0]))
            out[:live] = _along(inputs, index, taps, _float(bias), activation)
        return out

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
        """Write the window after the path to row-relative token `last` (-1: write nothing)."""
        others = (("start", start),)
        rows = accepted("conv.commit", state, scratch, 2, src, dst, query_start_loc, last, others)
        state, inputs = self._by_time(state), scratch[0]
        for row in rows:
            head = gather(state, (row.src,))[0]
            seen = torch.cat((head, inputs[row.path].to(state.dtype)))
            state[row.dst] = seen[-state.shape[1] :]


def _windows(paths: Paths, width: int) -> list[list[int]]:
    """Where the inputs of every token's taps lie: the rows' windows first, then the tokens."""
    first, windows = len(paths.sources) * (width - 1), list[list[int]]()
    for row, (begin, end) in enumerate(pairwise(paths.starts)):
        committed = list(range(row * (width - 1), (row + 1) * (width - 1)))
        for token in range(begin, end):
            parent = paths.up[token]
            seen = windows[parent][1:] if parent >= 0 else committed
            windows.append([*seen, first + token])
    return windows


def _along(
    inputs: Tensor, index: Tensor, taps: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """Convolve the inputs at `index` `[n, W]`, tap by tap."""
    total = inputs.index_select(0, index[:, 0]) * taps[0]
    for tap in range(1, taps.shape[0]):
        total.addcmul_(inputs.index_select(0, index[:, tap]), taps[tap])
    if bias is not None:
        total.add_(bias)
    return silu_(total) if activation else total


def _float(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()


def _taps(weight: Tensor) -> Tensor:
    """The weight as dense float32 `[W, C]`; free where `prepare` laid it out so."""
    return weight.float().t().contiguous()


def _step(
    x: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    state: Tensor,
    steps: Steps,
    activation: str | None,
) -> Tensor:
    """Convolve one token of each row, x and result `[n, C]`, and move the windows on."""
    window = torch.cat((gather(state, steps.sources), x.to(state.dtype).unsqueeze(1)), dim=1)
    y = (window * taps).sum(1)
    if bias is not None:
        y.add_(bias)
    if activation:
        silu_(y)
    scatter(state, steps.targets, window[:, 1:])
    return y.to(x.dtype)


def _run(
    x: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    state: Tensor,
    row: Row,
    activation: str | None,
    out: Tensor,
) -> None:
    """Convolve one row of several tokens, block by block of time."""
    width, channels = taps.shape
    head = gather(state, (row.src,))[0]
    inputs = torch.cat((head, x[row.begin : row.end].to(state.dtype)))
    block = max(1, BLOCK_ELEMENTS // max(1, channels))
    for begin in range(0, row.length, block):
        end = min(begin + block, row.length)
        part = inputs[begin : end + width - 1].float()
        total = part[: end - begin] * taps[0]
        for tap in range(1, width):
            total.addcmul_(part[tap : tap + end - begin], taps[tap])
        if bias is not None:
            total.add_(bias)
        out[row.begin + begin : row.begin + end] = silu(total) if activation else total
    for count, slot in (*row.track, (row.length, row.dst)):
        if slot >= 0:
            state[slot] = inputs[count : count + width - 1]
