"""Products of keys and queries under a decay of every channel, by halving the chunk.

A token i of a block's later half reads a token j of its earlier half past the last token m of that
half: the decay from j to i is that from j to m, times that from m to i. Neither is above one, so a
block is a plain product of scaled readers and scaled keys. Decays only ever meet those of their
neighbours: no difference is taken, and a weak decay keeps its digits beside strong ones.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True, slots=True, eq=False)
class Decayed:
    """What a chunk's decays make of its keys and queries.

    `products` `[HV, c, 2, c]` are k_i.k_j and q_i.k_j, each decayed from j to i, valid for i >= j
    (k_i.k_i may be missing). `grown` and `left` `[HV, c, 1 or K]` are the decays from the chunk's
    start and to its end, `whole` `[HV, 1 or K]` that over the chunk.
    """

    products: Tensor
    grown: Tensor
    left: Tensor
    whole: Tensor


def by_channel(pairs: Tensor, g: Tensor) -> Decayed:
    """The products of keys and queries `[H, c, 2, K]`; g `[HV, c, K]` float32, to base two."""
    (key_heads, length, _, _), heads = pairs.shape, g.shape[0]
    size = 1 << (length - 1).bit_length()
    if size > length:
        pairs = pad(pairs, (0, 0, 0, 0, 0, size - length))
        g = pad(g, (0, 0, 0, size - length))
    if key_heads < heads:
        pairs = pairs.repeat_interleave(heads // key_heads, 0)
    products = pairs.new_zeros(heads, size, 2, size)
    own = (pairs[:, :, 0] * pairs[:, :, 1]).sum(-1)
    products[:, :, 1].diagonal(dim1=1, dim2=2).copy_(own)
    grown, left, half = g.exp2(), torch.ones_like(g), 1
    while half < size:
        _later_on_earlier(products, pairs, grown, left, half)
        half *= 2
    # A product of rounded decays would drift over many chunks; their sum does not.
    whole = g.sum(1).exp2_()
    return Decayed(products[:, :length, :, :length], grown[:, :length], left[:, :length], whole)


def _later_on_earlier(
    products: Tensor, pairs: Tensor, grown: Tensor, left: Tensor, half: int
) -> None:
    """Fill what the later half of every block of `2 * half` tokens reads of the earlier.

    `grown` is the decay from a half's start up to each token, `left` that behind it to the half's
    end; both are those of the whole block afterwards.
    """
    heads, size, _, key_dim = pairs.shape
    blocks = size // (2 * half)
    ups, downs = (t.view(heads, blocks, 2, half, key_dim) for t in (grown, left))
    held = pairs.view(heads, blocks, 2, half, 2, key_dim)
    keys = (held[:, :, 0, :, 0] * downs[:, :, 0]).flatten(0, 1)
    readers = held[:, :, 1] * ups[:, :, 1].unsqueeze(3)
    block = torch.bmm(readers.view(heads * blocks, 2 * half, key_dim), keys.transpose(1, 2))
    target = products.view(heads, blocks, 2, half, 2, blocks, 2, half)[:, :, 1, :, :, :, 0]
    block = block.view(heads, blocks, half, 2, half)
    target.diagonal(dim1=1, dim2=4).copy_(block.permute(0, 2, 3, 4, 1))
    downs[:, :, 0].mul_(ups[:, :, 1, -1:])
    ups[:, :, 1].mul_(ups[:, :, 0, -1:])
