"""How a mixture of experts runs where nothing may be read on the host."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel


@contextmanager
def on_device(model: PreTrainedModel) -> Iterator[None]:
    """Experts whose products wait for no count on the host, so that a graph can record them.

    Torch groups the products of bfloat16 experts on the device; for other dtypes it reads on the
    host how many tokens each expert has. There the weights are gathered a token instead.
    """
    if model.dtype is torch.bfloat16:
        yield
        return
    chosen = model.get_experts_implementation()
    model.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        model.set_experts_implementation(chosen)
