"""Shape and dtype checks that every provider shares; they read host data only.

Each raises `ValueError` (wrong size or value) or `TypeError` (wrong dtype) before anything is
written, names the operation and shows both sizes. None reads an element of a device tensor.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from hal.interfaces import Gate
from hal.model.spec import GateKind

ACT_DTYPES: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Dtypes an activation may have."""

ACTIVATIONS: Final = frozenset({"silu", None})
"""Activations of the convolution."""


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype as messages spell it: "bfloat16", not "torch.bfloat16"."""
    return str(dtype).removeprefix("torch.")


def shape_text(shape: Sequence[int]) -> str:
    """The shape as messages spell it: "[8, 64]"."""
    return f"[{', '.join(map(str, shape))}]"


def _shape(tensor: Tensor) -> str:
    return shape_text(tensor.shape)


def check_act(operation: str, name: str, tensor: Tensor, dims: int) -> None:
    """Refuse an activation of another rank or of a dtype that is none."""
    if tensor.ndim != dims:
        raise ValueError(f"{operation}: {name} is {_shape(tensor)}, expected {dims} dimensions")
    if tensor.dtype not in ACT_DTYPES:
        offered = ", ".join(sorted(map(dtype_name, ACT_DTYPES)))
        raise TypeError(f"{operation}: {name} is {dtype_name(tensor.dtype)}, expected {offered}")


def check_same(operation: str, name: str, tensor: Tensor, dtype: torch.dtype, of: str) -> None:
    """Refuse a tensor whose dtype is not that of `of`."""
    if tensor.dtype != dtype:
        raise TypeError(
            f"{operation}: {name} is {dtype_name(tensor.dtype)}, {of} is {dtype_name(dtype)}"
        )


def check_index(operation: str, name: str, tensor: Tensor, dims: int = 1) -> None:
    """Refuse index tensors that are not int32 of the given rank."""
    if tensor.dtype != torch.int32:
        raise TypeError(f"{operation}: {name} is {dtype_name(tensor.dtype)}, expected int32")
    if tensor.ndim != dims:
        raise ValueError(f"{operation}: {name} is {_shape(tensor)}, expected {dims} dimensions")


def check_out(operation: str, out: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Refuse an `out` that is not exactly the result's shape and dtype."""
    if out is None or (out.dtype == dtype and out.shape == tuple(shape)):
        return
    expected = f"[{', '.join(map(str, shape))}] {dtype_name(dtype)}"
    text = f"{operation}: out is {_shape(out)} {dtype_name(out.dtype)}, expected {expected}"
    raise TypeError(text) if out.shape == tuple(shape) else ValueError(text)


def check_rows(
    operation: str,
    tokens: int,
    src: Tensor,
    others: Sequence[tuple[str, Tensor]],
    query_start_loc: Tensor | None,
    track: Tensor | None = None,
    parents: Tensor | None = None,
) -> None:
    """Refuse row indices of unequal length; without `query_start_loc`, row i is token i."""
    check_index(operation, "src", src)
    rows = src.shape[0]
    for name, tensor in others:
        check_index(operation, name, tensor)
        if tensor.shape[0] != rows:
            raise ValueError(f"{operation}: {rows} rows in src, {tensor.shape[0]} in {name}")
    if query_start_loc is None:
        if tokens != rows:
            raise ValueError(f"{operation}: {tokens} tokens, {rows} rows in src")
        return
    check_index(operation, "query_start_loc", query_start_loc)
    entries = query_start_loc.shape[0]
    if entries != rows + 1:
        raise ValueError(
            f"{operation}: query_start_loc has {entries} entries, src has {rows} rows "
            f"(expected {rows + 1})"
        )
    if track is not None:
        check_track(operation, track)
    if parents is not None:
        check_index(operation, "parents", parents)
        if parents.shape[0] != tokens:
            raise ValueError(f"{operation}: {tokens} tokens, {parents.shape[0]} entries in parents")


def check_track(operation: str, track: Tensor) -> None:
    """Refuse track points that are not (row, count, slot) triples."""
    check_index(operation, "track", track, 2)
    if track.shape[1] != 3:
        raise ValueError(f"{operation}: track is {_shape(track)}, expected [M, 3]")


def check_starts(operation: str, starts: Sequence[int], tokens: int, of: str) -> None:
    """Refuse row bounds that do not start at 0, decrease or pass the tokens of input `of`.

    For callers that hold `query_start_loc` as host data; never read it back for this.
    """
    if starts[0] != 0:
        raise ValueError(f"{operation}: query_start_loc starts at {starts[0]}, expected 0")
    for row, (begin, end) in enumerate(pairwise(starts)):
        if end < begin:
            raise ValueError(
                f"{operation}: query_start_loc decreases in row {row}, from {begin} to {end}"
            )
    if starts[-1] > tokens:
        raise ValueError(
            f"{operation}: query_start_loc ends at {starts[-1]}, {of} has {tokens} tokens"
        )


def check_slots(operation: str, name: str, slots: Sequence[int], pool_slots: int) -> None:
    """Refuse host-side slot ids past the pool; negative ids mean none."""
    if slots and (top := max(slots)) >= pool_slots:
        raise ValueError(f"{operation}: slot {top} in {name}, pool has slots 1..{pool_slots - 1}")


def check_track_points(
    operation: str, points: Sequence[Sequence[int]], lengths: Sequence[int], pool_slots: int
) -> None:
    """Refuse host-side track points outside their row; a slot below 0 is an unused entry."""
    for row, count, slot in points:
        if slot < 0:
            continue
        if not 0 <= row < len(lengths):
            raise ValueError(
                f"{operation}: track point of row {row}, batch has {len(lengths)} rows"
            )
        if not 1 <= count <= lengths[row]:
            raise ValueError(
                f"{operation}: track point (row {row}, count {count}), "
                f"row {row} has {lengths[row]} tokens"
            )
        check_slots(operation, "track", (slot,), pool_slots)


def _check_window(operation: str, x: Tensor, state: Tensor, layout: str, width: int) -> None:
    if state.ndim != 3:
        raise ValueError(f"{operation}: state is {_shape(state)}, expected 3 dimensions")
    channels, held = state.shape[1:] if layout == "CW" else (state.shape[2], state.shape[1])
    if layout == "ring":
        held -= 1
    if channels != x.shape[1]:
        raise ValueError(f"{operation}: x has {x.shape[1]} channels, state has {channels}")
    if held != width - 1:
        raise ValueError(
            f"{operation}: state holds {held} inputs, width {held + 1} weight expected "
            f"W-1 = {held}, got weight width {width}"
        )
    if state.dtype not in (x.dtype, torch.float32):
        raise TypeError(
            f"{operation}: state is {dtype_name(state.dtype)}, x is {dtype_name(x.dtype)}: "
            f"expected x's dtype or float32"
        )


def check_conv(
    operation: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    layout: str,
    activation: str | None,
    out: Tensor | None,
) -> None:
    """Refuse a convolution whose input, weight, state and result do not fit each other.

    A state of x's dtype or of float32 keeps every input exactly; any other would round and is
    refused.
    """
    check_act(operation, "x", x, 2)
    if weight.ndim != 2:
        raise ValueError(f"{operation}: weight is {_shape(weight)}, expected 2 dimensions")
    channels, width = weight.shape
    if x.shape[1] != channels:
        raise ValueError(f"{operation}: x has {x.shape[1]} channels, weight has {channels}")
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"{operation}: bias is {_shape(bias)}, weight has {channels} channels")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            check_act(operation, name, tensor, tensor.ndim)
    if activation not in ACTIVATIONS:
        raise ValueError(f"{operation}: activation is {activation!r}, expected 'silu' or None")
    _check_window(operation, x, state, layout, width)
    check_out(operation, out, x.shape, x.dtype)


def _check_gate(
    operation: str, a: Tensor, b: Tensor, gate: Gate | None, shape: tuple[int, int, int]
) -> None:
    tokens, heads, key_dim = shape
    if b.shape != (tokens, heads):
        raise ValueError(f"{operation}: b is {_shape(b)}, expected [{tokens}, {heads}]")
    scalar, channel = (tokens, heads), (tokens, heads, key_dim)
    if gate is None:
        if a.shape not in (scalar, channel):
            raise ValueError(
                f"{operation}: ready g is {_shape(a)}, expected {list(scalar)} or {list(channel)}"
            )
        return
    needed = scalar if gate.kind is GateKind.SCALAR else channel
    if a.shape != needed:
        raise ValueError(f"{operation}: {gate.kind} gate needs a {list(needed)}, got {_shape(a)}")
    for name, tensor, expected in (
        ("A_log", gate.A_log, (heads,)),
        ("dt_bias", gate.dt_bias, needed[1:]),
    ):
        if tensor.shape != expected:
            raise ValueError(f"{operation}: {name} is {_shape(tensor)}, expected {list(expected)}")


def _check_matrix(
    operation: str, state: Tensor, layout: str, heads: int, dims: tuple[int, int]
) -> None:
    key_dim, value_dim = dims
    if state.ndim != 4 or state.shape[1] != heads:
        raise ValueError(
            f"{operation}: state is {_shape(state)}, v has {heads} heads: "
            f"expected [slots, {heads}, {layout[0]}, {layout[1]}]"
        )
    rows, columns = state.shape[2:]
    held = {layout[0]: rows, layout[1]: columns}
    shown = f"{operation}: state is {layout} [.., {rows}, {columns}]"
    for letter, name, size in (("K", "q", key_dim), ("V", "v", value_dim)):
        if held[letter] != size:
            expected = ", ".join(str(size) if axis == letter else axis for axis in layout)
            raise ValueError(f"{shown}, {name} has {letter} = {size}: expected [.., {expected}]")


def check_delta(
    operation: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gate: Gate | None,
    state: Tensor,
    layout: str,
    out: Tensor | None,
    *,
    state_dtypes: frozenset[torch.dtype] = frozenset({torch.float32}),
) -> None:
    """Refuse a delta rule whose inputs, gate, state and result do not fit each other."""
    check_act(operation, "q", q, 3)
    check_act(operation, "v", v, 3)
    for name, tensor in (("k", k), ("v", v)):
        check_same(operation, name, tensor, q.dtype, "q")
    if k.shape != q.shape:
        raise ValueError(f"{operation}: k is {_shape(k)}, q is {_shape(q)}")
    tokens, key_heads, key_dim = q.shape
    value_tokens, heads, value_dim = v.shape
    if value_tokens != tokens:
        raise ValueError(f"{operation}: q has {tokens} tokens, v has {value_tokens}")
    if key_heads == 0 or heads % key_heads:
        raise ValueError(
            f"{operation}: {heads} value heads are not a multiple of {key_heads} key heads"
        )
    for name, tensor in (("a", a), ("b", b)):
        check_act(operation, name, tensor, tensor.ndim)
    _check_gate(operation, a, b, gate, (tokens, heads, key_dim))
    _check_matrix(operation, state, layout, heads, (key_dim, value_dim))
    if state.dtype not in state_dtypes:
        offered = ", ".join(sorted(map(dtype_name, state_dtypes)))
        raise TypeError(f"{operation}: state is {dtype_name(state.dtype)}, expected {offered}")
    check_out(operation, out, v.shape, v.dtype)
