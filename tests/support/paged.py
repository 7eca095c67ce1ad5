"""State tensors as a paged engine has them: views into raw pages, full of NaN, with padding."""

from math import prod

import torch
from torch import Tensor

import hal
from hal.model.spec import DTYPE_BYTES
from hal.runtime.binder import Layer
from hal.runtime.foreign import Attachment
from hal.runtime.params import LayerParams
from hal.selection import Selection

PADDING = 24
"""Bytes at the end of a page that belong to nobody."""


def paged_states(selection: Selection, layer: int, blocks: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Raw pages `[blocks, bytes]` whose bytes are all set, and a layer's states inside them."""
    specs = [spec for spec in selection.states if spec.layer == layer]
    pages = torch.full((blocks, sum(s.bytes for s in specs) + PADDING), -1, dtype=torch.int8)
    states, offset = {}, 0
    for spec in specs:
        size = prod(spec.shape) * DTYPE_BYTES[spec.dtype]
        cut = pages[:, offset : offset + size].view(getattr(torch, spec.dtype))
        states[spec.name] = cut.view(blocks, *spec.shape)
        offset += size
    return pages, states


class Paged:
    """Stands where a test binds a layer to a backend; block 0 is the engine's null block."""

    def __init__(self, config: object, blocks: int = 7) -> None:
        self.selection = hal.select("cpu", config)
        self.attachment = Attachment(self.selection, max_batch=8)
        self.pages: dict[int, Tensor] = {}
        for layer in {spec.layer for spec in self.selection.states}:
            self.pages[layer], states = paged_states(self.selection, layer, blocks)
            self.attachment.take(layer, states)

    def layer(self, index: int, params: LayerParams) -> Layer:
        """Bind a layer over its pages."""
        return self.attachment.layer(index, params)
