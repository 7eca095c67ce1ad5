"""Mamba, Falcon-Mamba and Mamba-2 without any attention; Jamba with some."""

from typing import Final

from hal.model.attention import grouped
from hal.model.build import Family, sizes
from hal.model.fields import Fields
from hal.model.layers import FULL, LINEAR, count, listed, placed
from hal.model.scan import Names, inner_width, mamba1, mamba2
from hal.model.spec import Kind, ScanDims

NAMES: Final = Names(
    heads="num_heads",
    dim="head_dim",
    state=("state_size",),
    groups=("n_groups",),
    kernel=("conv_kernel",),
    bias=("use_conv_bias",),
    expand="expand",
    rank="time_step_rank",
)


def words(fields: Fields) -> list[str]:
    """Return one word for all layers."""
    return listed(fields) or [LINEAR] * count(fields)


def mamba1_dims(fields: Fields) -> ScanDims:
    """Read the Mamba-1 dims."""
    return mamba1(fields, NAMES)


def mamba2_dims(fields: Fields) -> ScanDims:
    """Read the Mamba-2 dims; heads * head dim has to be expand * hidden."""
    return mamba2(fields, NAMES, inner_width(fields, NAMES), fields.limits("time_step_limit"))


def jamba_words(fields: Fields) -> list[str]:
    """Return the list, which saved configs lack, or expand period and offset."""
    period = fields.integer("attn_layer_period")
    offset = fields.integer("attn_layer_offset", low=0, high=period - 1)
    return listed(fields) or placed(fields, range(offset, count(fields), period))


def jamba_dims(fields: Fields) -> ScanDims:
    """Read the Mamba-1 dims."""
    return mamba1(fields, Names())


SSM: Final = {"expand": 2, "state_size": 16, "conv_kernel": 4, **sizes(50280)}
SSM2: Final = {
    **{"num_heads": 128, "state_size": 128, "n_groups": 8, "conv_kernel": 4, "expand": 2},
    **sizes(32768, dim=64),
}
JAMBA: Final = {
    **{"attn_layer_period": 8, "attn_layer_offset": 4},
    **{"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2},
    **sizes(65536, heads=32, kv=8),
}
JAMBA_HOLDS: Final = {LINEAR: (Kind.MAMBA1,), FULL: (Kind.FULL_ATTENTION,)}

FAMILIES: Final = {
    "mamba": Family(words, {LINEAR: (Kind.MAMBA1,)}, mamba1_dims, grouped, SSM),
    "falcon_mamba": Family(words, {LINEAR: (Kind.MAMBA1,)}, mamba1_dims, grouped, SSM),
    "mamba2": Family(words, {LINEAR: (Kind.MAMBA2,)}, mamba2_dims, grouped, SSM2),
    "jamba": Family(jamba_words, JAMBA_HOLDS, jamba_dims, grouped, JAMBA),
}
