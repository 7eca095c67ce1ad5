"""Qwen3-Next, Qwen3.5, Qwen4-Exp, OLMo-Hybrid: Gated DeltaNet, every fourth layer attention."""

from typing import Final

from hal.model.attention import grouped
from hal.model.build import Family, sizes
from hal.model.delta import gated_delta
from hal.model.fields import Fields
from hal.model.layers import FULL, INDEXED, LINEAR, count, every, listed
from hal.model.spec import DeltaDims, Kind

HOLDS: Final = {LINEAR: (Kind.GATED_DELTA_NET,), FULL: (Kind.FULL_ATTENTION,)}

# Every attention layer of Qwen4-Exp goes through an indexer; its class rewrites the word.
INDEXED_HOLDS: Final = {
    **HOLDS,
    FULL: (Kind.INDEXED_ATTENTION,),
    INDEXED: (Kind.INDEXED_ATTENTION,),
}


def words(fields: Fields) -> list[str]:
    """Return the list, which wins over an interval that stands beside it, or expand that."""
    return listed(fields) or every(fields, "full_attention_interval")


def exp_words(fields: Fields) -> list[str]:
    """Return the words of Qwen4-Exp, unless it embeds n-grams per layer."""
    if fields.items("ple_layer_ids"):
        # Each such layer keeps a dilated conv state and raw token ids, which no dims describe.
        raise fields.error("ple_layer_ids", "empty: no plan covers the states of those layers")
    return words(fields)


def dims(fields: Fields) -> DeltaDims:
    """Read the dims from the `linear_*` entries."""
    return gated_delta(
        fields,
        H=fields.integer("linear_num_key_heads"),
        HV=fields.integer("linear_num_value_heads"),
        K=fields.integer("linear_key_head_dim"),
        V=fields.integer("linear_value_head_dim"),
    )


def olmo_words(fields: Fields) -> list[str]:
    """Return the list, or attention at each fourth layer; a model too short for one ends in one."""
    found = [FULL if i % 4 == 3 else LINEAR for i in range(count(fields))]
    return listed(fields) or (found if FULL in found else [*found[:-1], FULL])


def olmo_dims(fields: Fields) -> DeltaDims:
    """Read the dims; those that are null follow from the attention heads and the hidden size."""
    heads = fields.integer("num_attention_heads")
    keys = fields.optional("linear_num_key_heads") or heads
    dim = fields.optional("linear_key_head_dim") or 3 * fields.integer("hidden_size") // (4 * keys)
    if not dim:
        raise fields.error("linear_key_head_dim", f"given: no width is left for {keys} key heads")
    return gated_delta(
        fields,
        H=keys,
        HV=fields.optional("linear_num_value_heads") or heads,
        K=dim,
        V=fields.optional("linear_value_head_dim") or 2 * dim,
        beta_scale=2.0 if fields.flag("linear_allow_neg_eigval") is not False else 1.0,
    )


LINEAR_DEFAULTS: Final = {
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
NEXT: Final = LINEAR_DEFAULTS | sizes(151936, heads=16, kv=2, dim=256)
DENSE: Final = LINEAR_DEFAULTS | sizes(248320, heads=16, kv=4, dim=256)
MOE: Final = LINEAR_DEFAULTS | sizes(248320, heads=16, kv=2, dim=256)
OLMO: Final = {"linear_conv_kernel_dim": 4} | sizes(100352, heads=30)

FAMILIES: Final = {
    "qwen3_next": Family(words, HOLDS, dims, grouped, NEXT),
    "qwen3_5_text": Family(words, HOLDS, dims, grouped, DENSE),
    "qwen3_5_moe_text": Family(words, HOLDS, dims, grouped, MOE),
    "qwen4_exp_text": Family(exp_words, INDEXED_HOLDS, dims, grouped, MOE),
    "olmo_hybrid": Family(olmo_words, HOLDS, olmo_dims, grouped, OLMO),
}
