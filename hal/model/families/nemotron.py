"""Nemotron-H: Mamba-2, attention, MLP and MoE, each a layer of its own."""

from typing import Final

from hal.model.attention import grouped
from hal.model.build import Family, sizes
from hal.model.fields import MAX_LAYERS, Fields, shown
from hal.model.layers import FULL, LINEAR, LIST_NAMES, listed, sized
from hal.model.scan import Names, mamba2, time_step_floor
from hal.model.spec import Kind, ScanDims

HOLDS: Final = {
    LINEAR: (Kind.MAMBA2,),
    FULL: (Kind.FULL_ATTENTION,),
    "mlp": (Kind.MLP,),
    "moe": (Kind.MOE,),
}
LETTERS: Final = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
PATTERNS: Final = ("hybrid_override_pattern", "hybrid_layer_pattern")

# What the config class fills in where it overlooks a pattern; no model has these four layers.
SAMPLE: Final = [LINEAR, "moe", FULL, "mlp"]

# The class takes the Mamba spellings first; copies with num_groups and state_dim exist.
NAMES: Final = Names(
    heads="mamba_num_heads",
    dim="mamba_head_dim",
    state=("mamba_state_dim", "ssm_state_size"),
    groups=("mamba_n_groups", "mamba_num_groups", "n_groups"),
    kernel=("mamba_d_conv", "conv_kernel"),
    bias=("mamba_conv_bias", "use_conv_bias"),
)


def words(fields: Fields) -> list[str]:
    """Return the list, or expand a pattern string; there is no default."""
    string, found = pattern(fields), listed(fields)
    if found is not None and (string is None or found != SAMPLE):
        return found
    if string is None:
        raise fields.error(LIST_NAMES[1], f"given, or {PATTERNS[0]} in its place")
    return sized(fields, *string)


def pattern(fields: Fields) -> tuple[str, list[str]] | None:
    """Return the spelling of the pattern string and its words; two that differ are refused."""
    found = [(name, letters(fields, name)) for name in PATTERNS if fields.name(name)]
    if len(found) == 2 and found[0][1] != found[1][1]:
        raise fields.disagree(*PATTERNS, "two patterns that differ")
    return found[0] if found else None


def letters(fields: Fields, name: str) -> list[str]:
    """Expand a pattern string, one letter a layer."""
    string, need = fields.data[name], f"a string of the letters {' '.join(LETTERS)}"
    if not isinstance(string, str) or len(string) > MAX_LAYERS:
        raise fields.error(name, need)
    bad = next((letter for letter in string if letter not in LETTERS), None)
    if bad is not None:
        raise fields.error(name, need, f"{shown(bad)} in it")
    return [LETTERS[letter] for letter in string]


def dims(fields: Fields) -> ScanDims:
    """Read the Mamba-2 dims; the inner width is heads * head dim, whatever `expand` says."""
    inner = fields.integer(NAMES.heads) * fields.integer(NAMES.dim)
    return mamba2(fields, NAMES, inner, time_step_floor(fields, "mamba_dt_min", "time_step_min"))


DEFAULTS: Final = {
    **{"mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8},
    **{"conv_kernel": 4, "time_step_min": 0.001, "mamba_ssm_cache_dtype": "float32"},
    **sizes(131072, heads=32, kv=8, dim=128),
}

FAMILIES: Final = {"nemotron_h": Family(words, HOLDS, dims, grouped, DEFAULTS)}
