"""A fixed number of steps a row, with the window after each."""

import torch
from torch import Tensor
from torch.nn.functional import silu


def causal_conv1d_linear_verify_npu(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state_indices: Tensor,
    intermediate_conv_window: Tensor,
    intermediate_state_indices: Tensor,
    activation: str | None = "silu",
    update_persistent_state: bool = False,
) -> Tensor:
    """x `[B, C, T]`, state `[slots, C, W-1]`, window `[scratch, T, C, W-1]`; negatives skip."""
    _check(x, conv_state, weight, bias, intermediate_conv_window, activation)
    rows = (conv_state_indices, intermediate_state_indices)
    if any(index.shape != (x.shape[0],) for index in rows):
        raise ValueError("state index tensors must have shape [B]")
    out = torch.zeros_like(x)
    for row, (slot, place) in enumerate(zip(*(index.tolist() for index in rows), strict=True)):
        if slot < 0 or place < 0:
            continue
        window = conv_state[slot].float()
        for step in range(x.shape[2]):
            inputs = torch.cat((window, x[row, :, step : step + 1].float()), dim=1)
            total = (inputs * weight.float()).sum(1)
            total = total if bias is None else total + bias.float()
            out[row, :, step] = total if activation is None else silu(total)
            window = inputs[:, 1:]
            intermediate_conv_window[place, step] = window
        if update_persistent_state:
            conv_state[slot] = window
    return out


def _check(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor,
    activation: str | None,
) -> None:
    if x.ndim != 3 or state.ndim != 3 or weight.ndim != 2:
        raise ValueError("x and conv_state must be 3D and weight must be 2D")
    if weight.shape[1] != state.shape[2] + 1:
        raise ValueError("weight width must equal conv state window plus one")
    if not 2 <= weight.shape[1] <= 6:
        raise ValueError("kernel width must be in [2, 6]")
    if state.shape[1] != x.shape[1] or weight.shape[0] != x.shape[1]:
        raise ValueError("channel dimensions do not match")
    if window.ndim != 4 or window.shape[1:] != (x.shape[2], x.shape[1], state.shape[2]):
        raise ValueError("intermediate_conv_window must have shape [scratch, T, C, W]")
    if bias is not None and bias.shape != (x.shape[1],):
        raise ValueError("bias must have shape [C]")
    if activation not in (None, "silu", "swish"):
        raise ValueError("activation must be None, silu, or swish")
    if state.dtype != x.dtype:
        raise ValueError("x and conv_state must have the same dtype")
    if window.dtype != state.dtype:
        raise ValueError("intermediate_conv_window and conv_state must have the same dtype")
    dense = [x, state, weight, window, *([] if bias is None else [bias])]
    if not all(tensor.is_contiguous() for tensor in dense):
        raise ValueError("all data tensors must be contiguous")
