"""Kimi-Linear, GLM-5-Next, Ling and Ring: Kimi Delta layers beside multi-head latent attention."""

from typing import Final

from hal.model.attention import latent
from hal.model.build import Family, sizes
from hal.model.delta import MAX_WIDTH, kimi_delta, lower_bound
from hal.model.fields import Fields
from hal.model.layers import FULL, INDEXED, LINEAR, count, every, listed, placed
from hal.model.scan import lightning
from hal.model.spec import DeltaDims, Kind, ScanDims

SECTION: Final = "linear_attn_config"
SAFE_BOUND: Final = -5.0
LIGHTNING: Final = "lightning"
WIDTHS: Final = ("linear_conv_kernel_dim", "short_conv_kernel_size")

HOLDS: Final = {LINEAR: (Kind.KIMI_DELTA,), FULL: (Kind.FULL_ATTENTION,)}
BAILING_HOLDS: Final = {**HOLDS, LIGHTNING: (Kind.LIGHTNING,)}
INDEXED_HOLDS: Final = {
    **HOLDS,
    FULL: (Kind.INDEXED_ATTENTION,),
    INDEXED: (Kind.INDEXED_ATTENTION,),
}


def kimi_words(fields: Fields) -> list[str]:
    """Return the list, or expand the layer numbers, which start at one and share out all layers.

    There is no default: what the class falls back to is not what published numbers encode.
    """
    return listed(fields) or numbered(fields)


def numbered(fields: Fields) -> list[str]:
    """Expand `kda_layers` and `full_attn_layers`."""
    numbers, layers = fields.section(SECTION), count(fields)
    kda = numbers.integers("kda_layers", low=1, high=layers)
    if kda is None:
        raise numbers.error("kda_layers", "given where layer_types is not, as no default is safe")
    rest = set(range(1, layers + 1)) - set(kda)
    full = numbers.integers("full_attn_layers", low=1, high=layers)
    if full is not None and set(full) != rest:
        what = f"together they have to name each layer from 1 to {layers} once"
        raise fields.disagree(f"{SECTION}.kda_layers", f"{SECTION}.full_attn_layers", what)
    return placed(fields, {number - 1 for number in rest})


def dims(fields: Fields, bound: float | None = None) -> DeltaDims:
    """Read the dims from the nested section first; the `head_dim` beside it is the rope dim."""
    inner = fields.section(SECTION)
    width = inner.optional("short_conv_kernel_size", high=MAX_WIDTH)
    return kimi_delta(
        heads=inner.optional("num_heads") or fields.integer("linear_num_heads"),
        dim=inner.optional("head_dim") or fields.integer("linear_head_dim"),
        width=width or fields.integer(*WIDTHS, high=MAX_WIDTH),
        bound=bound,
    )


def glm_words(fields: Fields) -> list[str]:
    """Return the list, or an indexed layer after every three."""
    return listed(fields) or placed(fields, range(3, count(fields), 4))


def glm_dims(fields: Fields) -> DeltaDims:
    """Read the dims and the gate: a null bound turns the safe gate off, `safe_gate` on again."""
    inner, top = fields.section(SECTION), "linear_lower_bound"
    bound = None if fields.null(top) else lower_bound(fields, top)
    if "gate_lower_bound" in inner.data:
        bound = lower_bound(inner, "gate_lower_bound")
    if bound is None and inner.data and inner.flag("safe_gate") is not False:
        bound = SAFE_BOUND
    return dims(fields, bound)


def bailing_words(fields: Fields) -> list[str]:
    """Return the list, or expand the interval; without `use_kda` engines run lightning layers."""
    words = listed(fields) or every(fields, "layer_group_size")
    linear = LIGHTNING if fields.flag("use_kda") is False else LINEAR
    return [linear if word == LINEAR else word for word in words]


def bailing_dims(fields: Fields) -> DeltaDims | ScanDims:
    """Read the dims; an object overwrites `head_dim` and keeps it as `linear_head_dim`."""
    heads = fields.integer("num_attention_heads")
    dim = fields.integer("linear_head_dim", "head_dim")
    if fields.flag("use_kda") is False:
        return lightning(heads, dim)
    safe = fields.flag("kda_safe_gate") is not False
    bound = lower_bound(fields, "kda_lower_bound") if safe else None
    return kimi_delta(heads, dim, fields.integer(*WIDTHS, high=MAX_WIDTH), bound)


MLA: Final = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
KDA: Final = {"linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4}
KIMI: Final = {**MLA, **KDA, **sizes(163840, heads=32, kv=32)}
GLM: Final = {
    **{**MLA, "qk_nope_head_dim": 256, "qk_rope_head_dim": 0},
    **{**KDA, "linear_num_heads": 64, "linear_lower_bound": SAFE_BOUND},
    **sizes(154880, heads=64, kv=64),
}
BAILING: Final = {
    **{"layer_group_size": 6, "kda_lower_bound": SAFE_BOUND, "short_conv_kernel_size": 4},
    **MLA,
    **sizes(157184, heads=32, kv=32, dim=128),
}

FAMILIES: Final = {
    "kimi_linear": Family(kimi_words, HOLDS, dims, latent, KIMI),
    "glm5_next_text": Family(glm_words, INDEXED_HOLDS, glm_dims, latent, GLM),
    "bailing_hybrid": Family(bailing_words, BAILING_HOLDS, bailing_dims, latent, BAILING),
}
