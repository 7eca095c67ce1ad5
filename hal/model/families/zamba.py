"""Zamba and Zamba2: a Mamba layer everywhere, and one shared attention block at some of them."""

from typing import Final

from hal.model.attention import grouped
from hal.model.build import Family, sizes
from hal.model.fields import Fields
from hal.model.layers import HYBRID, LINEAR, LIST_NAMES, count, listed
from hal.model.scan import Names, inner_width, mamba1, mamba2, time_step_floor
from hal.model.spec import AttentionSpec, Kind, ScanDims

ZAMBA2_LAYERS: Final = 54
ZAMBA2_HYBRID: Final = frozenset({6, 12, 18, 24, 30, 36, 42, 47, 51})

NAMES: Final = Names(heads="n_mamba_heads")
NAMES2: Final = Names(
    heads="n_mamba_heads", dim="mamba_headdim", groups=("mamba_ngroups",), bias=("use_conv_bias",)
)


def zamba_words(fields: Fields) -> list[str]:
    """Return the list, or expand the period; two hybrid layers at least share their attention."""
    words = listed(fields) or periodic(fields)
    if words.count(HYBRID) < 2 and HOLDS.keys() >= set(words):
        name = fields.name(*LIST_NAMES) or "num_hidden_layers"
        raise fields.error(name, "enough for two hybrid layers, which share their attention")
    return words


def periodic(fields: Fields) -> list[str]:
    """Return two Mamba layers, a hybrid one, and one in each period of those that follow."""
    period = fields.integer("attn_layer_period")
    offset = fields.integer("attn_layer_offset", low=0)
    rest = range(count(fields) - 3)
    return [LINEAR, LINEAR, HYBRID, *(HYBRID if i % period == offset else LINEAR for i in rest)]


def zamba_dims(fields: Fields) -> ScanDims:
    """Read the Mamba-1 dims, in heads that are scanned one by one."""
    return mamba1(fields, NAMES, heads=fields.integer(NAMES.heads))


def zamba2_words(fields: Fields) -> list[str]:
    """Return the list; only the model of 54 layers is known without one."""
    found = listed(fields)
    if found is None and fields.optional("num_hidden_layers") not in {None, ZAMBA2_LAYERS}:
        raise fields.error(LIST_NAMES[1], f"given for other than {ZAMBA2_LAYERS} layers")
    return found or [HYBRID if i in ZAMBA2_HYBRID else LINEAR for i in range(ZAMBA2_LAYERS)]


def zamba2_dims(fields: Fields) -> ScanDims:
    """Read the Mamba-2 dims; the inner width is expand * hidden."""
    limit = time_step_floor(fields, "time_step_min")
    return mamba2(fields, NAMES2, inner_width(fields, NAMES2), limit)


def shared(fields: Fields, kind: Kind) -> AttentionSpec:
    """Read the shared attention, which works on the hidden state and the embedding side by side."""
    return grouped(fields, kind, "attention_head_dim", times=2)


ZAMBA: Final = {
    **{"attn_layer_period": 6, "attn_layer_offset": 4},
    **{"n_mamba_heads": 2, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2},
    **sizes(32000, heads=16, kv=16),
}
ZAMBA2: Final = {
    **{"n_mamba_heads": 8, "mamba_d_state": 64, "mamba_d_conv": 4, "mamba_expand": 2},
    **{"mamba_ngroups": 1, "time_step_min": 0.001},
    **sizes(32000, heads=32),
}
HOLDS: Final = {LINEAR: (Kind.MAMBA1,), HYBRID: (Kind.MAMBA1, Kind.FULL_ATTENTION)}
HOLDS2: Final = {LINEAR: (Kind.MAMBA2,), HYBRID: (Kind.MAMBA2, Kind.FULL_ATTENTION)}

FAMILIES: Final = {
    "zamba": Family(zamba_words, HOLDS, zamba_dims, shared, ZAMBA),
    "zamba2": Family(zamba2_words, HOLDS2, zamba2_dims, shared, ZAMBA2),
}
