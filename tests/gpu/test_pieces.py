"""A long prompt in small pieces ends where it ends in large ones."""

import pytest
import torch
from torch import Tensor

from hal.interfaces import Gate
from hal.model.spec import GateKind
from support import device_checks as checks
from support.ops import LIMITS

pytestmark = pytest.mark.cuda
TOKENS, H, HV, K, V, W = 300_000, 1, 2, 32, 32, 4
CHANNELS = 2 * H * K + HV * V


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=gen) * scale).to(checks.DEVICE)


def prompt(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """mixed_qkv, a and b of the whole prompt."""
    return (
        normal(TOKENS, CHANNELS, seed=1).to(dtype),
        normal(TOKENS, HV, seed=2).to(dtype),
        normal(TOKENS, HV, seed=3).to(dtype),
    )


def run(piece: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Conv and recurrence over the prompt in pieces: both results and both end states."""
    ops = checks.provider()
    x, a, b = prompt(dtype)
    weight = normal(CHANNELS, W, seed=4, scale=0.5).to(dtype)
    gate = Gate(GateKind.SCALAR, normal(HV, seed=5) - 1.0, normal(HV, seed=6) - 3.0)
    ring = torch.full((2, W, CHANNELS), float("nan"), device=checks.DEVICE, dtype=dtype)
    state = torch.full((2, HV, V, K), float("nan"), device=checks.DEVICE)
    mixed, out = torch.empty_like(x), torch.empty(TOKENS, HV, V, device=checks.DEVICE, dtype=dtype)
    for at in range(0, TOKENS, piece):
        end = min(at + piece, TOKENS)
        src, dst, start, bounds = (
            torch.tensor(ids, device=checks.DEVICE, dtype=torch.int32)
            for ids in ([1 if at else -1], [1], [at], [0, end - at])
        )
        part = slice(at, end)
        ops.conv.prefill(x[part], weight, None, ring, src, dst, start, bounds, end - at,
                         activation="silu", out=mixed[part])  # fmt: skip
        ops.delta_rule.prefill_fused(mixed[part], a[part], b[part], gate, state, src, dst, bounds,
                                     end - at, out=out[part])  # fmt: skip
    return mixed, out, ring[1], state[1]


def error(got: Tensor, want: Tensor, axes: tuple[int, int]) -> float:
    """The largest relative error of a head; NaN is infinite."""
    apart = (got.double() - want.double()).norm(dim=axes) / want.double().norm(dim=axes)
    return float(torch.nan_to_num(apart, nan=float("inf")).max())


@pytest.mark.parametrize("piece", [8_000, 8_191])
def test_300_000_tokens_in_pieces_of_8k_equal_those_of_64k(piece: int) -> None:
    dtype = torch.bfloat16
    small, large = run(piece, dtype), run(64_000, dtype)
    assert torch.equal(small[0], large[0])
    rows = [(TOKENS - W + 1 + i) % W for i in range(W - 1)]
    assert torch.equal(small[2][rows], large[2][rows])
    limits = LIMITS["bfloat16", "chunked"]
    assert error(small[1], large[1], (0, 2)) <= limits[0]
    assert error(small[3], large[3], (1, 2)) <= limits[1]
