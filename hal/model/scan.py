"""Dims of scan layers (Mamba-2, Mamba-1, lightning), shared by the families that have them."""

import math
from dataclasses import dataclass

from hal.model.attention import divide
from hal.model.delta import MAX_WIDTH
from hal.model.fields import Fields
from hal.model.spec import ScanDims


@dataclass(frozen=True, slots=True)
class Names:
    """The entries that hold a family's Mamba dims; a tuple lists spellings, the first one wins."""

    heads: str = "mamba_n_heads"
    dim: str = "mamba_d_head"
    state: tuple[str, ...] = ("mamba_d_state",)
    groups: tuple[str, ...] = ("mamba_n_groups",)
    kernel: tuple[str, ...] = ("mamba_d_conv",)
    bias: tuple[str, ...] = ("mamba_conv_bias",)
    expand: str = "mamba_expand"
    rank: str = "mamba_dt_rank"


def inner_width(fields: Fields, names: Names) -> int:
    """Return expand * hidden."""
    return fields.integer(names.expand) * fields.integer("hidden_size")


def mamba2(
    fields: Fields, names: Names, inner: int, dt_limit: tuple[float, float], norm: bool = True
) -> ScanDims:
    """Read Mamba-2 dims; heads * head dim make up the inner width, and a dim of "auto" is that."""
    heads = fields.integer(names.heads)
    width = divide(fields, "the inner width", inner, names.heads, heads)
    if fields.automatic(names.dim) not in {None, width}:
        raise fields.error(names.dim, f"{width}: {heads} heads make up an inner width of {inner}")
    groups = fields.integer(*names.groups)
    divide(fields, "the heads", heads, fields.value(*names.groups)[0], groups)
    return ScanDims(
        H=heads,
        P=width,
        N=fields.integer(*names.state),
        G=groups,
        W=fields.integer(*names.kernel, high=MAX_WIDTH),
        conv_bias=fields.flag(*names.bias) is not False,
        dt_limit=dt_limit,
        norm_groups=groups if norm else None,
    )


def mamba1(fields: Fields, names: Names, heads: int = 1) -> ScanDims:
    """Read Mamba-1 dims; the rank "auto" is a sixteenth of the hidden size, rounded up.

    One head of the whole inner width, and one group, unless the family scans in heads.
    """
    return ScanDims(
        H=heads,
        P=divide(fields, "the inner width", inner_width(fields, names), names.heads, heads),
        N=fields.integer(*names.state),
        G=heads,
        W=fields.integer(*names.kernel, high=MAX_WIDTH),
        conv_bias=fields.flag(*names.bias) is not False,
        dt_rank=fields.automatic(names.rank) or -(-fields.integer("hidden_size") // 16),
    )


def lightning(heads: int, dim: int) -> ScanDims:
    """Make the dims of lightning attention: a scan of v by k, one group a head, no conv."""
    return ScanDims(H=heads, P=dim, N=dim, G=heads, W=0, conv_bias=False)


def time_step_floor(fields: Fields, *names: str) -> tuple[float, float]:
    """Return the dt limit of the families whose class clamps from the minimal time step up.

    It ignores `time_step_limit`, and clamps in prefill alone; a scan here has one limit for both.
    """
    low = fields.number(*names)
    if low is None or not 0 <= low < math.inf:
        raise fields.error(fields.value(*names)[0], "a number from 0")
    return low, math.inf
