"""Prefill in plain torch, and the two update functions that the adapter leaves alone."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu


def causal_conv1d_fn_npu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    conv_states: Tensor | None = None,
    activation: str | None = "silu",
    pad_slot_id: int = -1,
    **kwargs: Any,
) -> Tensor:
    """x `[dim, T]`, weight `[dim, W]`, states `[slots, dim, W-1]` written in place.

    The window is multiplied by `has_initial_state`; where only some rows have one, the others are
    left with a window from too far back.
    """
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError("activation must be None, silu, or swish")
    if has_initial_state is None or conv_states is None or cache_indices is None:
        raise TypeError("bad operand type for unary ~: 'NoneType'")
    if query_start_loc is None:
        raise TypeError("'NoneType' object is not subscriptable")
    starts = query_start_loc.tolist()
    if len(starts) < 2 or starts[-1] == 0:
        raise RuntimeError("max(): Expected reduction dim to be specified")
    assert starts[-1] <= x.shape[-1], f"{query_start_loc=}, {x.shape=}"
    if weight.dtype != x.dtype or conv_states.dtype != x.dtype:
        raise RuntimeError("index_copy_(): self and source expected to have the same dtype")
    out, some = torch.zeros_like(x), bool(has_initial_state.any())
    for row, slot in enumerate(cache_indices.tolist()):
        if slot < 0:
            raise IndexError("index out of range in self")
        tokens = x[:, starts[row] : starts[row + 1]]
        head = conv_states[slot] * has_initial_state[row]
        inputs = torch.cat((head, tokens), dim=1)
        out[:, starts[row] : starts[row + 1]] = _convolve(inputs, weight, bias, activation)
        behind = 0 if has_initial_state[row] or not some else head.shape[1]
        end = max(inputs.shape[1] - behind, head.shape[1])
        conv_states[slot] = inputs[:, end - head.shape[1] : end]
    return out


def causal_conv1d_update_npu(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: bool | str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    intermediate_conv_window: Tensor | None = None,
    pad_slot_id: int = -1,
    metadata: Any = None,
    validate_data: bool = False,
) -> Tensor:
    """x `[B, dim]`: the bias is not read, and -1 is the last slot."""
    if x.ndim != 2 or conv_state_indices is None or conv_state.shape[2] != weight.shape[1] - 1:
        raise RuntimeError("The size of tensor a must match the size of tensor b")
    rows = conv_state_indices.long()
    inputs = torch.cat((conv_state[rows], x.unsqueeze(2)), dim=2)
    conv_state[rows] = inputs[:, :, 1:]
    total = (inputs * weight).sum(2)
    return silu(total) if activation else total


def causal_conv1d_update_v2(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: bool | str | None = None,
    conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int = -1,
    pad_slot_id: int = -1,
    block_idx_last_scheduled_token: Tensor | None = None,
    initial_state_idx: Tensor | None = None,
    validate_data: bool = False,
) -> Tensor:
    """x `[B, dim]`, weight `[W, dim]`, states `[slots, W-1, dim]`; history goes through float16.

    Rows are skipped only where their index equals `pad_slot_id`, and keep the raw input.
    """
    if conv_state_indices is None:
        raise RuntimeError("indices are required")
    out = x.clone()
    for row, slot in enumerate(conv_state_indices.tolist()):
        if slot == pad_slot_id:
            continue
        if slot < 0:
            raise IndexError("read before the pool")
        inputs = torch.cat((conv_state[slot], x[row : row + 1]))
        conv_state[slot] = inputs[1:]
        total = (inputs.half().float() * weight).sum(0) + (0 if bias is None else bias)
        out[row] = silu(total) if activation else total
    return out


def _convolve(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """`[dim, W-1 + n]` to `[dim, n]`."""
    width = weight.shape[1]
    count = inputs.shape[1] - width + 1
    total = sum(weight[:, tap : tap + 1] * inputs[:, tap : tap + count] for tap in range(width))
    assert isinstance(total, Tensor)
    if bias is not None:
        total = total + bias[:, None]
    return total if activation is None else silu(total)
