"""Slots far into a pool of Qwen3-Next's size, 17 GB a layer, are addressed in 64 bits."""

import pytest
import torch

from support import device_checks as checks
from support.ops import Delta, make_rows
from support.triton_cases import fused_case, make_ring

pytestmark = pytest.mark.cuda
SLOTS = 8300
ROWS = make_rows([(1, "fork"), (1, "continue"), (1, "fresh"), (1, "pad")], seed=2)
LAYER = Delta(H=16, HV=32, K=128, V=128)


@pytest.fixture(autouse=True)
def room() -> None:
    """Memory for the pool, or no test."""
    if torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("the pool needs 24 GiB")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_recurrences_beyond_slot_8192_equal_the_oracle(dtype: torch.dtype) -> None:
    checks.far_slots(dtype, SLOTS)


def test_a_fused_decode_beyond_slot_8192_is_the_one_near_slot_0() -> None:
    rule, case = checks.provider().delta_rule, fused_case(ROWS, LAYER, dtype=torch.bfloat16)
    conv, delta = case.conv.args, case.delta.args
    shift = SLOTS - ROWS.slots
    ring, state = checks.to_device(make_ring(conv["state"], ROWS)), checks.to_device(delta["state"])
    wide = torch.empty(SLOTS, *state.shape[1:], device=checks.DEVICE)
    wide_ring = torch.empty(SLOTS, *ring.shape[1:], device=checks.DEVICE, dtype=ring.dtype)
    wide[shift:], wide_ring[shift:] = state, ring
    args = [checks.to_device(t) for t in (conv["x"], delta["a"], delta["b"], conv["weight"])]
    gate, start = checks.to_device(delta["gate"]), checks.to_device(conv["start"])

    def run(ring: torch.Tensor, state: torch.Tensor, shift: int) -> torch.Tensor:
        src, dst = (checks.to_device(conv[name]) for name in ("src", "dst"))
        src, dst = (torch.where(ids >= 0, ids + shift, ids) for ids in (src, dst))
        return rule.decode_fused(*args, None, "silu", gate, ring, state, src, dst, start)

    assert torch.equal(run(ring, state, 0), run(wide_ring, wide, shift))
    for slot in ROWS.written(None) - {0}:
        assert torch.equal(state[slot], wide[shift + slot])
        near, far = (torch.nan_to_num(r.float()) for r in (ring[slot], wide_ring[shift + slot]))
        assert torch.equal(near, far)
