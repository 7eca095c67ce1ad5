"""The attention of a layer, read for memory planning."""

from hal.model.fields import Fields
from hal.model.spec import AttentionSpec, Kind


def divide(fields: Fields, what: str, whole: int, name: str, parts: int) -> int:
    """Return whole / parts, which has to come out even; `name` is the entry that holds `parts`."""
    if whole % parts:
        raise fields.error(name, f"a divisor of {what} = {whole}", str(parts))
    return whole // parts


def grouped(
    fields: Fields, kind: Kind, dim_name: str = "head_dim", times: int = 1
) -> AttentionSpec:
    """Read grouped-query attention; the heads share times * hidden where no head dim is given."""
    heads = fields.integer("num_attention_heads")
    dim = fields.optional(dim_name)
    if dim is None:
        width = times * fields.integer("hidden_size")
        dim = divide(fields, "the attention width", width, "num_attention_heads", heads)
    return AttentionSpec(kind, heads, kv_heads(fields, heads), dim, window(fields, kind))


def latent(fields: Fields, kind: Kind) -> AttentionSpec:
    """Read multi-head latent attention: one compressed row of kv_lora_rank + rope dim a token."""
    heads = fields.integer("num_attention_heads")
    rope = fields.integer("qk_rope_head_dim", low=0)
    dim = fields.integer("qk_nope_head_dim") + rope
    row = fields.integer("kv_lora_rank") + rope
    return AttentionSpec(kind, heads, kv_heads(fields, heads), dim, latent=row)


def kv_heads(fields: Fields, heads: int, *names: str) -> int:
    """Read the key-value heads; none, or an explicit null, means as many as query heads."""
    names = names or ("num_key_value_heads",)
    name, _ = fields.value(*names)
    found = None if fields.null(name) else fields.optional(*names)
    if found is not None:
        divide(fields, "the query heads", heads, name, found)
    return found or heads


def window(fields: Fields, kind: Kind) -> int | None:
    """Read the window, which a sliding layer has to have and no other layer has."""
    names = ("sliding_window_size", "attention_window_size", "sliding_window")
    return fields.integer(*names) if kind is Kind.SLIDING_ATTENTION else None
