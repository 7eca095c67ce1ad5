"""Wrong conv-state sidecars: what they hand to layers is not the pool's, or not the step's."""

from typing import Any

import torch
from torch import Tensor

from hal_cpu.conv_state import TorchConvState


class ClonesIndices(TorchConvState):
    """A sidecar whose indices stay as they were when the step began."""

    def begin(self, *ids: Any, **named: Any) -> None:
        super().begin(*(i.clone() if isinstance(i, Tensor) else i for i in ids), **named)


class SkipsEmptySteps(TorchConvState):
    """A sidecar that keeps the last step where the next has no rows."""

    def begin(self, src: Tensor, *others: Any) -> None:
        if len(src) or self._steps is None:
            super().begin(src, *others)


class ClampsLengths(TorchConvState):
    """A sidecar whose grid has room for 64 tokens a row."""

    def begin(self, src: Any, dst: Any, start: Any, bounds: Any, max_len: int) -> None:
        super().begin(src, dst, start, bounds, min(max_len, 64))


class WipesPools(TorchConvState):
    """A sidecar that clears the states at each step."""

    def step(self, layer_id: int) -> Any:
        step = super().step(layer_id)
        for tensor in step.tensors:
            tensor.zero_()
        return step


class WipesNarrowPools(TorchConvState):
    """A sidecar that clears states of 16 bits."""

    def attach(self, tensors: Any) -> None:
        super().attach(tensors)
        for tensor in (t for held in tensors.values() for t in held if t.dtype != torch.float32):
            tensor.zero_()


class OneTensor(TorchConvState):
    """A sidecar that knows one tensor a layer."""

    def attach(self, tensors: Any) -> None:
        super().attach({layer: held[:1] for layer, held in tensors.items()})
