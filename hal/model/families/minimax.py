"""MiniMax: lightning attention (a scan of constant decay) beside softmax attention."""

from typing import Final

from hal.model.attention import grouped
from hal.model.build import Family, sizes
from hal.model.fields import Fields
from hal.model.layers import FULL, LINEAR, LIST_NAMES, count, listed, sized
from hal.model.scan import lightning
from hal.model.spec import Kind, ScanDims

TYPES: Final = "attn_type_list"


def words(fields: Fields) -> list[str]:
    """Return the list, or the types of an original export, or softmax at the even layers.

    The class overlooks the types and fills in the last beside them; such a list does not count.
    """
    found, types = listed(fields), typed(fields)
    layers = len(types) if types else count(fields)
    filled = [LINEAR if i % 2 else FULL for i in range(layers)]
    if types and found not in (None, types, filled):
        raise fields.disagree(LIST_NAMES[0], TYPES, "two lists of layers that differ")
    return types or found or filled


def typed(fields: Fields) -> list[str] | None:
    """Expand `attn_type_list`: 0 is lightning, 1 is softmax."""
    types = fields.integers(TYPES, 0, 1)
    words = [FULL if softmax else LINEAR for softmax in types or ()]
    return None if types is None else sized(fields, TYPES, words)


def softmax_words(fields: Fields) -> list[str]:
    """Return the layers of MiniMax-M2, which kept the list of types but no lightning layer."""
    return typed(fields) or listed(fields) or [FULL] * count(fields)


def dims(fields: Fields) -> ScanDims:
    """Read the dims; heads and head dim are those of the attention."""
    attention = grouped(fields, Kind.FULL_ATTENTION)
    return lightning(attention.heads, attention.head_dim)


HOLDS: Final = {LINEAR: (Kind.LIGHTNING,), FULL: (Kind.FULL_ATTENTION,)}
SOFTMAX: Final = {FULL: (Kind.FULL_ATTENTION,)}
MINIMAX: Final = sizes(32000, heads=32, kv=8)
M2: Final = sizes(200064, heads=48, kv=8, dim=128)

FAMILIES: Final = {
    "minimax": Family(words, HOLDS, dims, grouped, MINIMAX),
    "minimax_m2": Family(softmax_words, SOFTMAX, None, grouped, M2),
}
