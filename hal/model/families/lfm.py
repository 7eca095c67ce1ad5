"""LFM2, LFM2-MoE and LFM3: gated short convolutions between attention layers."""

from typing import Final

from hal.model.attention import grouped
from hal.model.build import Family, sizes
from hal.model.delta import MAX_WIDTH
from hal.model.fields import Fields
from hal.model.layers import CONV, FULL, LIST_NAMES, SLIDING, count, listed, placed
from hal.model.spec import Kind, ShortConvDims

HOLDS: Final = {CONV: (Kind.SHORT_CONV,), FULL: (Kind.FULL_ATTENTION,)}
SLIDING_HOLDS: Final = {**HOLDS, SLIDING: (Kind.SLIDING_ATTENTION,)}


def lfm2_words(fields: Fields) -> list[str]:
    """Return the list, or expand the attention layers; without either, every layer is attention."""
    return listed(fields) or indexed(fields)


def indexed(fields: Fields) -> list[str]:
    """Expand `full_attn_idxs`."""
    layers = count(fields)
    full = fields.integers("full_attn_idxs", 0, layers - 1)
    return placed(fields, range(layers) if full is None else full, other=CONV)


def moe_words(fields: Fields) -> list[str]:
    """Return the list; the class has no pattern of its own."""
    found = listed(fields)
    if found is None:
        raise fields.error(LIST_NAMES[0], "a list with a word for each layer")
    return found


def lfm3_words(fields: Fields) -> list[str]:
    """Return the list, or a conv at each odd layer and at the first."""
    cycle = (SLIDING, CONV, FULL, CONV)
    return listed(fields) or [cycle[i % 4] if i else CONV for i in range(count(fields))]


def dims(fields: Fields) -> ShortConvDims:
    """Read the dims; `conv_L_cache` is the width, the carry is one less."""
    return ShortConvDims(
        hidden=fields.integer("hidden_size"),
        W=fields.integer("conv_L_cache", high=MAX_WIDTH),
        bias=fields.flag("conv_bias") is True,
    )


LFM2: Final = {"conv_L_cache": 3, **sizes(65536, heads=32, kv=8)}
LFM3: Final = {"conv_L_cache": 7, "sliding_window": 256, **sizes(128000, heads=16, kv=4, dim=128)}

FAMILIES: Final = {
    "lfm2": Family(lfm2_words, HOLDS, dims, grouped, LFM2),
    "lfm2_moe": Family(moe_words, HOLDS, dims, grouped, LFM2),
    "lfm3": Family(lfm3_words, SLIDING_HOLDS, dims, grouped, LFM3),
}
