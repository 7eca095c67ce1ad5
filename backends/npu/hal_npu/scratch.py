"""What verify leaves for commit: the state after every step of every row."""

from collections.abc import Mapping, Sequence
from typing import Final

from torch import Tensor

from hal.interfaces import Scratch

STATES: Final[Mapping[str, str]] = {"conv": "conv", "delta_rule": "recurrent"}
"""The state whose snapshots an interface keeps."""


def scratch_of(
    interface: str,
    shapes: Mapping[str, Sequence[int]],
    layouts: Mapping[str, str],
    max_batch: int,
    width: int,
) -> tuple[Scratch, ...]:
    """One float32 tensor `[max_batch, width, ...]`, windows as "CW" and states as "VK".

    That is the order of the vendor's functions, whatever order the pool has.
    """
    state = STATES.get(interface)
    if state is None or state not in shapes:
        return ()
    shape = list(shapes[state])
    if layouts[state] in ("WC", "KV"):
        shape[-2:] = shape[:-3:-1]
    return (Scratch(f"{interface}.snapshots", (max_batch, width, *shape), "float32"),)


def held(operation: str, scratch: Sequence[Tensor], rows: int, steps: int) -> Tensor:
    """The snapshots of a batch, refused where they are too few for its rows or its steps."""
    if len(scratch) != 1:
        raise ValueError(f"{operation}: scratch has {len(scratch)} tensors, expected 1")
    room, width = scratch[0].shape[:2]
    if rows > room:
        raise ValueError(f"{operation}: src has {rows} rows, scratch has room for {room}")
    if steps > width:
        raise ValueError(f"{operation}: rows have {steps} tokens, scratch has room for {width}")
    return scratch[0][:rows]


def refuse_tree(operation: str, parents: Tensor | None) -> None:
    """Refuse parents: the vendor's functions follow the order of tokens."""
    if parents is not None:
        raise ValueError(f"{operation}: parents were given, npu.ascend verifies chains alone")
