"""RecurrentGemma and Inkling, read only to be refused by their kinds, which have no dims."""

from typing import Final

from hal.model.attention import grouped, kv_heads, window
from hal.model.build import Family, sizes
from hal.model.fields import Fields
from hal.model.layers import FULL, HYBRID, HYBRID_SLIDING, LINEAR, SLIDING, canonical, count, listed
from hal.model.spec import AttentionSpec, Kind

# "attention" in a list of blocks is local attention; RecurrentGemma has no other.
GRIFFIN_HOLDS: Final = {
    LINEAR: (Kind.RG_LRU,),
    FULL: (Kind.SLIDING_ATTENTION,),
    SLIDING: (Kind.SLIDING_ATTENTION,),
}
INKLING_HOLDS: Final = {
    HYBRID: (Kind.MULTI_SHORT_CONV, Kind.FULL_ATTENTION),
    HYBRID_SLIDING: (Kind.MULTI_SHORT_CONV, Kind.SLIDING_ATTENTION),
}


def griffin_words(fields: Fields) -> list[str]:
    """Return the list, which saved configs lack, or repeat the cycle of blocks over the layers."""
    cycle = canonical(fields.strings("block_types") or ())
    if not cycle:
        raise fields.error("block_types", "a list of at least one word")
    return listed(fields) or [cycle[i % len(cycle)] for i in range(count(fields))]


def inkling_words(fields: Fields) -> list[str]:
    """Return the list, or expand the sliding layers: five of six where they are not named."""
    layers = count(fields)
    local = fields.integers("local_layer_ids", 0, layers - 1)
    sliding = {i for i in range(layers) if (i + 1) % 6} if local is None else set(local)
    return listed(fields) or [HYBRID_SLIDING if i in sliding else HYBRID for i in range(layers)]


def attend(fields: Fields, kind: Kind) -> AttentionSpec:
    """Read Inkling's attention; sliding layers have heads of their own."""
    prefix = "swa_" if kind is Kind.SLIDING_ATTENTION else ""
    heads = fields.integer(f"{prefix}num_attention_heads")
    kv = kv_heads(fields, heads, f"{prefix}num_key_value_heads")
    dim = fields.integer(f"{prefix}head_dim")
    return AttentionSpec(kind, heads, kv, dim, window(fields, kind))


GRIFFIN: Final = {
    **{"block_types": ("recurrent", "recurrent", "attention"), "attention_window_size": 2048},
    **sizes(256000, heads=10),
}
INKLING: Final = {
    **{"swa_num_attention_heads": 64, "swa_num_key_value_heads": 16, "swa_head_dim": 128},
    **{"sliding_window_size": 512, **sizes(201024, heads=64, kv=8, dim=128)},
}
INKLING2: Final = {
    **{"swa_num_attention_heads": 48, "swa_num_key_value_heads": 8, "swa_head_dim": 128},
    **{"sliding_window_size": 1024, **sizes(201024, heads=48, kv=8, dim=128)},
}

FAMILIES: Final = {
    "recurrent_gemma": Family(griffin_words, GRIFFIN_HOLDS, None, grouped, GRIFFIN),
    "inkling_text": Family(inkling_words, INKLING_HOLDS, None, attend, INKLING),
    "inkling2_text": Family(inkling_words, INKLING_HOLDS, None, attend, INKLING2),
}
