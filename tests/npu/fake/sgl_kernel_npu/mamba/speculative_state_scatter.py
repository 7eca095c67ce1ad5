"""Moving one snapshot a row into a pool."""

from torch import Tensor


def speculative_state_scatter_npu(
    dst: Tensor,
    src: Tensor,
    dst_indices: Tensor,
    src_indices: Tensor,
    step_indices: Tensor,
) -> Tensor:
    """dst `[layers, slots, ...]`, src `[layers, scratch, steps, ...]`; any negative index skips."""
    if dst.ndim < 3 or src.ndim != dst.ndim + 1:
        raise ValueError(f"invalid state ranks: dst.ndim={dst.ndim}, src.ndim={src.ndim}")
    if dst.shape[0] != src.shape[0] or dst.shape[2:] != src.shape[3:]:
        raise ValueError("persistent and speculative state shapes do not match")
    if dst.dtype != src.dtype:
        raise ValueError("persistent and speculative states must share dtype/device")
    if not 1 <= dst.ndim - 2 <= 3:
        raise ValueError("state tail rank must be in [1, 3]")
    indices = (dst_indices, src_indices, step_indices)
    if any(index.ndim != 1 for index in indices):
        raise ValueError("state index tensors must be one-dimensional")
    if len({index.numel() for index in indices}) > 1:
        raise ValueError("state index tensors must have equal lengths")
    for slot, row, step in zip(*(index.tolist() for index in indices), strict=True):
        if min(slot, row, step) >= 0:
            dst[:, slot] = src[:, row, step]
    return dst
