"""Prefill of a scalar gate in chunks: rows gathered to scratch, run, and scattered."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor

from hal.interfaces import Gate
from hal.runtime.checks import dtype_name
from hal_npu.operands import Inputs
from hal_npu.rows import Span, Spans, gather, scatter

MAX_DIM: Final = 128
"""Largest K and V; above it the vendor's chunk kernels compute NaN without an error."""

DTYPES: Final = (torch.bfloat16, torch.float16)
"""Activation dtypes of the chunk kernels."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `[begin, end)` of the row at `place`, and the slots that keep the state after them."""

    place: int
    begin: int
    end: int
    keep: tuple[int, ...]


def rounds(rows: tuple[Span, ...]) -> Iterator[list[Piece]]:
    """The rows cut at their track points; the n-th pieces of all rows run together.

    No rows give no round, and so no call: the vendor's function raises on nothing.
    """
    cut = [list(_pieces(place, row)) for place, row in enumerate(rows)]
    for turn in range(max(map(len, cut), default=0)):
        yield [pieces[turn] for pieces in cut if turn < len(pieces)]


def _pieces(place: int, row: Span) -> Iterator[Piece]:
    done = 0
    for count in sorted({row.length, *(count for count, _ in row.track)}):
        kept = tuple(slot for at, slot in row.track if at == count)
        last = (row.dst,) if count == row.length else ()
        yield Piece(place, row.begin + done, row.begin + count, (*kept, *last))
        done = count


class Chunked:
    """Runs the vendor's chunk function on packed rows; states are `[.., K, V]` here.

    Its chunk indices are cached by the identity of `cu_seqlens`, so every call gets a tensor of its
    own.
    """

    def __init__(self, chunk: Callable[..., Any]) -> None:
        self._chunk = chunk

    def __call__(
        self,
        operation: str,
        inputs: Inputs,
        gate: Gate | None,
        state: Tensor,
        spans: Spans,
        qk_l2norm: bool,
    ) -> Tensor:
        """The result `[T, HV, V]`, exact zeros in pads; end and tracked states go to `state`."""
        _check(operation, inputs)
        result = torch.zeros_like(inputs.v, memory_format=torch.contiguous_format)
        sources = torch.tensor([row.src for row in spans.rows], device=state.device)
        carried = gather(state, sources).float().contiguous()
        for pieces in rounds(spans.rows):
            index = _tokens(pieces, result)
            places = torch.tensor([piece.place for piece in pieces], device=state.device)
            o, ends = self._run(inputs.cut(index), gate, carried[places], pieces, qk_l2norm)
            result[index] = o
            carried[places] = ends
            _keep(state, pieces, ends)
        return result

    def _run(
        self,
        inputs: Inputs,
        gate: Gate | None,
        carried: Tensor,
        pieces: list[Piece],
        qk_l2norm: bool,
    ) -> tuple[Tensor, Tensor]:
        """One call of the vendor's function; later releases return other ranks and counts."""
        decay, beta = inputs.gates(gate)
        bounds = [0]
        for piece in pieces:
            bounds.append(bounds[-1] + piece.end - piece.begin)
        o, ends, *_ = self._chunk(
            q=inputs.q.unsqueeze(0).contiguous(),
            k=inputs.k.unsqueeze(0).contiguous(),
            v=inputs.v.unsqueeze(0).contiguous(),
            g=decay.unsqueeze(0).contiguous(),
            beta=beta.unsqueeze(0).contiguous(),
            scale=inputs.q.shape[2] ** -0.5,
            initial_state=carried,
            output_final_state=True,
            cu_seqlens=torch.tensor(bounds, device=carried.device),
            use_qk_l2norm_in_kernel=qk_l2norm,
        )
        return o.reshape(inputs.v.shape), ends.reshape(carried.shape).float()


def _keep(state: Tensor, pieces: list[Piece], ends: Tensor) -> None:
    """Store the states after pieces in the slots that are to keep them."""
    places = [(i, slot) for i, piece in enumerate(pieces) for slot in piece.keep if slot >= 0]
    index = torch.tensor([i for i, _ in places], dtype=torch.int64, device=ends.device)
    scatter(state, [slot for _, slot in places], ends.index_select(0, index))


def _tokens(pieces: list[Piece], like: Tensor) -> Tensor | slice:
    """The tokens of pieces, as a slice where they lie side by side."""
    if all(left.end == right.begin for left, right in pairwise(pieces)):
        return slice(pieces[0].begin, pieces[-1].end)
    spans = [torch.arange(piece.begin, piece.end, device=like.device) for piece in pieces]
    return torch.cat(spans)


def _check(operation: str, inputs: Inputs) -> None:
    """Refuse what the chunk kernels would get wrong."""
    dtype, dims = inputs.v.dtype, (inputs.q.shape[2], inputs.v.shape[2])
    if dtype not in DTYPES:
        offered = ", ".join(map(dtype_name, DTYPES))
        raise TypeError(f"{operation}: q is {dtype_name(dtype)}, npu.ascend takes {offered}")
    if inputs.a.ndim != 2:
        raise ValueError(
            f"{operation}: a has a decay for every key channel, npu.ascend takes one a head"
        )
    for letter, size in zip("KV", dims, strict=True):
        if size > MAX_DIM:
            raise ValueError(f"{operation}: {letter} = {size}, npu.ascend takes up to {MAX_DIM}")
