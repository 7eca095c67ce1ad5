"""Checks of verify and commit that read host data, as `checks` does."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor


def check_parents(operation: str, starts: Sequence[int], parents: Sequence[int]) -> None:
    """Refuse a host-side tree whose row-relative parents do not come before their children."""
    for row, (begin, end) in enumerate(pairwise(starts)):
        for token, parent in enumerate(parents[begin:end]):
            if not -1 <= parent < token:
                raise ValueError(
                    f"{operation}: row {row}: parent {parent} of token {token} "
                    f"does not come before it"
                )


def check_last(operation: str, starts: Sequence[int], last: Sequence[int]) -> None:
    """Refuse a host-side last token behind the end of its row; a row without tokens has none."""
    for row, ((begin, end), token) in enumerate(zip(pairwise(starts), last, strict=True)):
        if begin < end <= begin + token:
            raise ValueError(
                f"{operation}: last is token {token} in row {row}, row {row} has "
                f"{end - begin} tokens"
            )


def check_scratch(
    operation: str, scratch: Sequence[Tensor], tensors: int, tokens: int | None = None
) -> None:
    """Refuse scratch of another count of tensors, or with room for fewer tokens than the rows."""
    if len(scratch) != tensors:
        raise ValueError(f"{operation}: scratch has {len(scratch)} tensors, expected {tensors}")
    room = min(tensor.shape[0] for tensor in scratch)
    if tokens is not None and tokens > room:
        raise ValueError(f"{operation}: rows have {tokens} tokens, scratch has room for {room}")
