"""Bamba, Granite-4 and Falcon-H1: Mamba-2 with a few attention layers, or beside attention."""

from typing import Final

from hal.model.attention import grouped
from hal.model.build import Family, sizes
from hal.model.fields import Fields
from hal.model.layers import FULL, HYBRID, LINEAR, count, listed, placed
from hal.model.scan import Names, inner_width, mamba2
from hal.model.spec import Kind, ScanDims

NAMES: Final = Names()
HOLDS: Final = {LINEAR: (Kind.MAMBA2,), FULL: (Kind.FULL_ATTENTION,)}


def bamba_words(fields: Fields) -> list[str]:
    """Return the list, or expand `attn_layer_indices`, which names the attention layers alone."""
    full = fields.integers("attn_layer_indices", 0, count(fields) - 1)
    return listed(fields) or placed(fields, full or ())


def granite_words(fields: Fields) -> list[str]:
    """Return the list ("mamba" and "attention" on disk); without it every layer is Mamba-2."""
    return listed(fields) or placed(fields, ())


def dims(fields: Fields) -> ScanDims:
    """Read the Mamba-2 dims; the inner width is expand * hidden."""
    return mamba2(fields, NAMES, inner_width(fields, NAMES), fields.limits("time_step_limit"))


def falcon_words(fields: Fields) -> list[str]:
    """Return attention and Mamba-2 in parallel in every layer."""
    return listed(fields) or [HYBRID] * count(fields)


def falcon_dims(fields: Fields) -> ScanDims:
    """Read the dims; the inner width is expand * hidden only where `mamba_d_ssm` is a written null.

    Without `mamba_rms_norm`, z gates inside the scan.
    """
    derived = fields.null("mamba_d_ssm")
    inner = inner_width(fields, NAMES) if derived else fields.integer("mamba_d_ssm")
    norm = fields.flag("mamba_rms_norm") is True
    return mamba2(fields, NAMES, inner, fields.limits("time_step_limit"), norm)


MAMBA2: Final = {
    "mamba_n_heads": 128,
    "mamba_d_state": 256,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
BAMBA: Final = MAMBA2 | sizes(128000, heads=32, kv=8)
GRANITE: Final = MAMBA2 | sizes(32000, heads=32)
FALCON: Final = {**BAMBA, "mamba_d_ssm": 1024}
PARALLEL: Final = {HYBRID: (Kind.MAMBA2, Kind.FULL_ATTENTION)}

FAMILIES: Final = {
    "bamba": Family(bamba_words, HOLDS, dims, grouped, BAMBA),
    "granitemoehybrid": Family(granite_words, HOLDS, dims, grouped, GRANITE),
    "falcon_h1": Family(falcon_words, PARALLEL, falcon_dims, grouped, FALCON),
}
