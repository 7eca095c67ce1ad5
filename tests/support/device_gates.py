"""Delta-rule cases that checks on a device share: decays, keys and gates that are hard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from support.device_checks import PACKED
from support.ops import Case, Delta, delta_case, make_rows

Named = Iterator[tuple[str, Case]]


def strengths(ready: Delta, dtype: torch.dtype) -> Named:
    """Decays from none to all at once, as ready gates, NaN behind the rows."""
    gen = torch.Generator().manual_seed(7)
    for least in (-0.3, -5.0, -20.0, -200.0):
        case = delta_case(PACKED, ready, dtype=dtype)
        g = torch.rand(case.args["a"].shape, generator=gen) * least
        g[::5], g[1::7] = least, 0.0
        g[case.rows.bounds[-1] :] = float("nan")
        yield f"decay down to {least}", case.replace(a=g)


def hard_keys(ready: Delta, dtype: torch.dtype) -> Named:
    """Keys that are nearly one, beta up to 2, and states that hardly decay."""
    for log_g in (-1e-3, -1e-4):
        dims = replace(ready, hard=True, beta_scale=2, log_g=log_g)
        case = delta_case(make_rows([(513, "fork"), (64, "fresh")]), dims, dtype=dtype)
        yield f"hard g={log_g}", case


def lengths(dims: Delta, dtype: torch.dtype, wanted: Iterable[tuple[float, bool]]) -> Named:
    """Keys and queries of other lengths, with the norm that makes them 1 or without."""
    for scale, norm in wanted:
        case = delta_case(PACKED, replace(dims, scale=scale, qk_l2norm=norm), dtype=dtype)
        yield f"scale={scale} norm={norm}", case


def wide_gates(dims: Delta, dtype: torch.dtype) -> Named:
    """Raw gates in other dtypes than the tokens'."""
    case = delta_case(PACKED, dims, dtype=dtype)
    for other in (torch.float32, torch.float16):
        wide = {name: case.args[name].to(other) for name in ("a", "b")}
        yield f"raw gates in {other}", case.replace(**wide)


def slices(dims: Delta, dtype: torch.dtype, gaps: Iterable[int]) -> Named:
    """Tokens that are slices of wider projections, beside dense states."""
    for gap in gaps:
        wide, case = (delta_case(PACKED, dims, dtype=dtype, gap=n) for n in (gap, 0))
        tokens = {name: wide.args[name] for name in ("q", "k", "v", "a", "b")}
        yield f"slices of {gap}", case.replace(**tokens)
