"""Shape and dtype checks of the selective scan; they read host data only, as `checks` does."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hal.runtime.checks import check_act, check_out, check_same, dtype_name, shape_text


def check_scan(
    operation: str,
    x: Tensor,
    dt: Tensor | None,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    z: Tensor | None,
    state: Tensor,
    dt_limit: tuple[float, float],
    out: Tensor | None,
    *,
    state_dtypes: frozenset[torch.dtype] = frozenset({torch.float32}),
) -> None:
    """Refuse a scan whose inputs, parameters, state and result do not fit each other.

    x of three dimensions is Mamba-2 or lightning, of two Mamba-1.
    """
    check_act(operation, "x", x, 3 if x.ndim == 3 else 2)
    tokens, heads = x.shape[:2]
    unit = "heads" if x.ndim == 3 else "channels"
    _check_groups(operation, x, B, C, unit)
    rate = (heads,) if x.ndim == 3 else (heads, B.shape[2])
    _check_shape(operation, "A", A, rate)
    for name, param in (("D", D), ("dt_bias", dt_bias)):
        if param is not None:
            _check_shape(operation, name, param, (heads,))
    if dt is not None:
        check_act(operation, "dt", dt, dt.ndim)
        _check_shape(operation, "dt", dt, (tokens, heads))
    if z is not None:
        check_same(operation, "z", z, x.dtype, "x")
        _check_shape(operation, "z", z, x.shape)
    if not dt_limit[0] <= dt_limit[1]:
        raise ValueError(f"{operation}: dt_limit is {dt_limit}, expected (least, most)")
    _check_shape(operation, "state", state[:0], (0, *x.shape[1:], B.shape[2]), state.shape[0])
    if state.dtype not in state_dtypes:
        offered = ", ".join(sorted(map(dtype_name, state_dtypes)))
        raise TypeError(f"{operation}: state is {dtype_name(state.dtype)}, expected {offered}")
    check_out(operation, out, x.shape, x.dtype)


def _check_groups(operation: str, x: Tensor, B: Tensor, C: Tensor, unit: str) -> None:
    for name, tensor in (("B", B), ("C", C)):
        check_act(operation, name, tensor, 3)
        check_same(operation, name, tensor, x.dtype, "x")
        if tensor.shape[0] != x.shape[0]:
            raise ValueError(
                f"{operation}: x has {x.shape[0]} tokens, {name} has {tensor.shape[0]}"
            )
    if B.shape != C.shape:
        raise ValueError(f"{operation}: B is {shape_text(B.shape)}, C is {shape_text(C.shape)}")
    heads, groups = x.shape[1], B.shape[1]
    if groups == 0 or heads % groups:
        raise ValueError(f"{operation}: {heads} {unit} are not a multiple of {groups} groups")


def _check_shape(
    operation: str, name: str, tensor: Tensor, expected: Sequence[int], slots: int | None = None
) -> None:
    """Refuse another shape; with `slots` both are shown with that many slots in front."""
    if tensor.shape == tuple(expected):
        return
    has, wants = [*tensor.shape], [*expected]
    if slots is not None:
        has[0], wants[0] = slots, slots
    raise ValueError(f"{operation}: {name} is {shape_text(has)}, expected {shape_text(wants)}")
