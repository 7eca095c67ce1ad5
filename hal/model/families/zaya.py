"""ZAYA: a convolution over queries and keys inside the attention of every layer."""

from typing import Final

from hal.model.attention import kv_heads, window
from hal.model.build import Family, sizes
from hal.model.delta import MAX_WIDTH
from hal.model.fields import Fields, shown
from hal.model.layers import HYBRID, HYBRID_SLIDING, LIST_NAMES, count, listed, sized
from hal.model.spec import AttentionSpec, CcaDims, Kind

HOLDS: Final = {
    HYBRID: (Kind.CCA, Kind.FULL_ATTENTION),
    HYBRID_SLIDING: (Kind.CCA, Kind.SLIDING_ATTENTION),
    "moe": (Kind.MOE,),
}
STAGES: Final = "zaya_layers"


def words(fields: Fields) -> list[str]:
    """Return the list, or the stages of an original export, or hybrid layers throughout.

    An original export may turn the convolution off, which no dims describe. Its `swa_layers`
    change no state and are not read: full attention is planned.
    """
    if fields.flag("cca") is False:
        raise fields.error("cca", "true or absent")
    found, items = listed(fields), fields.items(STAGES)
    if items is None:
        return found or [HYBRID] * count(fields)
    return staged(fields, found, [stage(fields, item) for item in items])


def staged(fields: Fields, found: list[str] | None, stages: list[str]) -> list[str]:
    """Choose between a list of layers and the stages beside it.

    The class overlooks stages and fills in as many hybrid layers; such a list does not count.
    A converted export that kept its stages has a layer for each attention stage.
    """
    if found is None or found == [HYBRID] * len(stages):
        return sized(fields, STAGES, stages)
    attention = stages.count(HYBRID)
    if len(found) != attention:
        what = f"{len(found)} layers and {attention} attention stages"
        raise fields.disagree(LIST_NAMES[0], STAGES, what)
    return found


def stage(fields: Fields, item: object) -> str:
    """Return the word of one stage: "a" is attention, a number counts the experts of an MoE."""
    if item == "a":
        return HYBRID
    if isinstance(item, int) and not isinstance(item, bool) and item > 0:
        return "moe"
    raise fields.error(STAGES, 'a list of "a" and expert counts', f"{shown(item)} in it")


def dims(fields: Fields) -> CcaDims:
    """Read the dims of both convolutions; original exports spell the key-value heads as groups."""
    heads = fields.integer("num_attention_heads")
    return CcaDims(
        HQ=heads,
        HKV=kv_heads(fields, heads, "num_query_groups", "num_key_value_heads"),
        D=fields.integer("head_dim"),
        time0=fields.integer("cca_time0", high=MAX_WIDTH),
        time1=fields.integer("cca_time1", high=MAX_WIDTH),
        hidden=fields.integer("hidden_size"),
    )


def attend(fields: Fields, kind: Kind) -> AttentionSpec:
    """Read the attention that the convolutions feed."""
    of = dims(fields)
    return AttentionSpec(kind, of.HQ, of.HKV, of.D, window(fields, kind))


DEFAULTS: Final = {"cca_time0": 2, "cca_time1": 2, **sizes(262272, heads=8, kv=2, dim=128)}

FAMILIES: Final = {"zaya": Family(words, HOLDS, dims, attend, DEFAULTS)}
