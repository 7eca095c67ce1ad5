"""Cases of the selective scan."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hal.testing.case import Case
from hal.testing.rows import Rows, index_args, packed, poisoned_pool


@dataclass(frozen=True, slots=True)
class Scan:
    """Dims and inputs of a scan case: Mamba-2, Mamba-1 (`kind` "mamba1": I = H * P) or lightning.

    Raw dt is spread wider where there are limits, so that they bind for a part of the tokens.
    """

    kind: str = "mamba2"
    H: int = 4
    P: int = 8
    N: int = 16
    G: int = 2
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    dt_softplus: bool = True
    dt_bias: bool = True
    D: bool = True
    z: bool = False
    x_scale: float = 1.0
    dt_dtype: torch.dtype | None = None
    tail: bool = False
    """Whether raw dt lies about 10, up to where softplus is linear, and decays slowly."""

    @property
    def inner(self) -> tuple[int, ...]:
        """The axes of x behind the tokens."""
        return (self.H * self.P,) if self.kind == "mamba1" else (self.H, self.P)

    @property
    def groups(self) -> int:
        """Groups of B and C; every lightning head has its own."""
        return self.H if self.kind == "lightning" else self.G


def _rates(dims: Scan, gen: torch.Generator) -> dict[str, Tensor | None]:
    """A, D and dt_bias as models initialise them: A in 1..16, D about 1, dt in 1e-3..0.1."""
    heads = dims.inner[0]
    shape = (heads, dims.N) if dims.kind == "mamba1" else (heads,)
    dt = torch.exp(torch.rand(heads, generator=gen) * 4.6 - 6.9)
    bias = dt + torch.log(-torch.expm1(-dt))
    A, D = -1 - 15 * torch.rand(shape, generator=gen), 0.5 + torch.rand(heads, generator=gen)
    if dims.tail:
        A /= 400
    if dims.kind == "lightning":
        return {"A": A / 32, "D": None, "dt_bias": None}
    return {"A": A, "D": D if dims.D else None, "dt_bias": bias if dims.dt_bias else None}


def scan_inputs(
    rows: Rows, dims: Scan, dtype: torch.dtype, gen: torch.Generator, gap: int = 0
) -> dict[str, Any]:
    """The per-token tensors and the layer's parameters, by name.

    C resembles B, so that C.B > 0: a token's own part and its skip D x would cancel otherwise, and
    the relative error of such a head says nothing.
    """
    tokens, limited = rows.tokens, dims.dt_limit != (0.0, float("inf"))
    x, z = (torch.randn(tokens, *dims.inner, generator=gen) for _ in range(2))
    dt = torch.randn(tokens, dims.inner[0], generator=gen) * (3 if limited else 1)
    if dims.tail:
        dt = 10 + 8 * dt
    B, noise = (torch.randn(tokens, dims.groups, dims.N, generator=gen) for _ in range(2))
    x = x * dims.x_scale
    named = {"x": x, "dt": dt, "B": B, "C": B + 0.5 * noise, "z": z}
    absent = {"dt": dims.kind == "lightning", "z": not dims.z}
    own = {"dt": dims.dt_dtype or dtype}
    return {
        name: None if absent.get(name) else packed(tensor.to(own.get(name, dtype)), rows, gap)
        for name, tensor in named.items()
    } | _rates(dims, gen)


def scan_case(
    rows: Rows,
    dims: Scan = Scan(),
    *,
    dtype: torch.dtype = torch.float32,
    decode: bool = False,
    seed: int = 0,
    gap: int = 0,
    strided: bool = False,
    track: Tensor | None = None,
) -> Case:
    """A scan over the given rows; Mamba-1 is judged by row, the others by row and head."""
    gen = torch.Generator().manual_seed(seed)
    args = scan_inputs(rows, dims, dtype, gen, gap)
    args["state"] = poisoned_pool(rows, (*dims.inner, dims.N), torch.float32, gen, pad=gap)
    args |= index_args(rows, decode, strided)
    softplus = dims.dt_softplus and dims.kind != "lightning"
    options: dict[str, Any] = {"dt_limit": dims.dt_limit, "dt_softplus": softplus}
    if track is not None:
        options["track"] = track
    name = "scan.decode" if decode else "scan.prefill"
    heads = 0 if dims.kind == "mamba1" else dims.H
    return Case(name, args, rows, "PN", heads, options)
