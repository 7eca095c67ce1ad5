"""The arguments that the host fills are where the kernel's source reads them."""

import ctypes
import struct
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hal_cuda.hopper.arguments import POINTERS, Arguments, Block, strides_fit, view_of

TAIL = (
    *(("q", "q"), ("out_t", "q"), ("out_h", "q"), ("s_slot", "q"), ("s_h", "q")),
    *((name, "i") for name in ("a_t", "b_t", "rows", "tokens", "HV", "R", "points")),
    *((name, "i") for name in ("parts", "waves", "phase", "a_h")),
    *(("scale", "f"), ("beta_scale", "f"), ("lower_bound", "f")),
)


def raw(block: Block) -> bytes:
    return ctypes.string_at(block.address, ctypes.sizeof(Arguments))


def test_blocks_lie_where_tensor_maps_may_and_never_overlap() -> None:
    blocks = [Block.empty() for _ in range(20)]
    assert all(block.address % 64 == 0 for block in blocks)
    ends = sorted((block.address, block.address + 576) for block in blocks)
    assert all(left[1] <= right[0] for left, right in pairwise(ends))
    assert all(raw(block) == bytes(576) for block in blocks)


def test_a_block_lies_within_its_storage() -> None:
    for _ in range(20):
        block = Block.empty()
        first = ctypes.addressof(block.storage)
        assert first <= block.address
        assert block.address + ctypes.sizeof(Arguments) <= first + len(block.storage)


def test_a_launch_is_given_the_address_of_the_address() -> None:
    block = Block.empty()
    (address,) = (ctypes.c_void_p * 1).from_address(block.launchable())
    assert address == block.address


def test_maps_follow_each_other_at_the_front() -> None:
    block = Block.empty()
    assert [at - block.address for at in block.maps()] == [0, 128, 256]


@given(st.lists(st.integers(0, 2**63 - 1), min_size=12, max_size=12))
def test_addresses_stand_behind_the_maps_in_order(addresses: list[int]) -> None:
    block = Block.empty()
    block.point(*addresses)
    assert list(struct.unpack_from("=12Q", raw(block), 384)) == addresses
    assert [getattr(block.arguments, name) or 0 for name in POINTERS] == addresses
    assert raw(block)[:384] == bytes(384) and raw(block)[480:] == bytes(96)


@given(st.lists(st.integers(1, 2**40), min_size=4, max_size=4),
       st.lists(st.integers(-(2**31), 2**31 - 1), min_size=11, max_size=11))  # fmt: skip
def test_numbers_stand_behind_the_addresses_in_order(wide: list[int], narrow: list[int]) -> None:
    block = Block.empty()
    names = [name for name, _ in TAIL[1:]]
    values = dict(zip(names, [*wide, *narrow, 0.5, 2.0, -5.0], strict=True))
    block.number(**values)
    assert struct.unpack_from("=4q11i3f", raw(block), 480) == (*wide, *narrow, 0.5, 2.0, -5.0)
    assert raw(block)[:480] == bytes(480)


@st.composite
def tokens(draw: st.DrawFn) -> torch.Tensor:
    """Views `[T, H, 128]` of something wider, with addresses as values."""
    count, heads = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    apart, beside = draw(st.integers(0, 3)) * 8, draw(st.integers(0, 3)) * 8
    base = torch.arange(count * (heads * (128 + apart) + beside) + 64)
    shape, strides = (count, heads, 128), (heads * (128 + apart) + beside, 128 + apart, 1)
    return base.as_strided(shape, strides, draw(st.integers(0, 3)) * 8).bfloat16()


@given(tokens(), st.sampled_from([1, 2]))
def test_a_view_shows_every_element_where_it_lies(x: torch.Tensor, halves: int) -> None:
    view = view_of(x, halves)
    assert view.pointer == x.data_ptr() and view.box == (64, 64, halves, 1)
    dims, count, parts, heads = view.sizes
    assert (count, heads, dims * parts) == tuple(x.shape)
    for t, h, d in product((0, count - 1), (0, heads - 1), (0, 63, 64, 127)):
        steps = zip((t, d // 64, h), view.strides, strict=True)
        at = sum(n * step for n, step in steps) + 2 * (d % 64)
        assert at == x[t, h, d:].data_ptr() - x.data_ptr()


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (3, 1)])
def test_strides_of_axes_of_one_are_replaced(shape: tuple[int, int]) -> None:
    wild = torch.zeros(4096, dtype=torch.bfloat16)
    steps = [1 if n == 1 else 640 * (2 - axis) for axis, n in enumerate(shape)]
    view = view_of(wild.as_strided((*shape, 128), (*steps, 1)), 2)
    assert all(step % 16 == 0 and step > 0 for step in view.strides)


def test_a_map_is_made_from_an_address_that_it_may_have() -> None:
    odd = torch.zeros(300, dtype=torch.bfloat16)[3:259].view(2, 1, 128)
    assert odd.data_ptr() % 16
    assert 0 <= odd.data_ptr() - view_of(odd, 2).pointer < 16
    assert view_of(odd, 2).pointer % 16 == 0


@pytest.mark.parametrize(
    ("shape", "strides", "fits"),
    [
        ((4, 2, 128), (256, 128, 1), True),
        ((4, 2, 128), (264, 128, 1), True),
        ((4, 2, 128), (260, 128, 1), False),
        ((4, 2, 128), (264, 132, 1), False),
        ((4, 2, 128), (264, 0, 1), False),
        ((4, 2, 128), (0, 128, 1), False),
        ((4, 1, 128), (256, 3, 1), True),
        ((1, 2, 128), (3, 128, 1), True),
        ((4, 1, 128), (512, 3, 2), False),
    ],
)
def test_strides_fit_where_whole_16_bytes_lie_between(
    shape: tuple[int, ...], strides: tuple[int, ...], fits: bool
) -> None:
    x = torch.zeros(4096, dtype=torch.bfloat16).as_strided(shape, strides)
    assert strides_fit(x) is fits
