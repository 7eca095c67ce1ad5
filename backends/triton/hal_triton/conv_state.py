"""The conv-state sidecar: the step's indices paired with each layer's tensors."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from hal.errors import StepOrderError
from hal.interfaces import ConvStep


class TritonConvState:
    """Pairs the pool tensors of each layer with the step's indices; owns neither."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[Tensor, ...]] = {}
        self._steps: dict[int, ConvStep] | None = None

    def attach(self, tensors: Mapping[int, Sequence[Tensor]]) -> None:
        """Take the pool tensors by layer id, once, after the pool is allocated."""
        self._tensors = {layer: tuple(held) for layer, held in tensors.items()}
        self._steps = None

    def begin(
        self, src: Tensor, dst: Tensor, start: Tensor, query_start_loc: Tensor, max_len: int
    ) -> None:
        """Pair every layer with the step's indices, which stay the caller's."""
        self._steps = {
            layer: ConvStep(held, src, dst, start, query_start_loc, max_len)
            for layer, held in self._tensors.items()
        }

    def step(self, layer_id: int) -> ConvStep:
        """The layer's view of this step."""
        if self._steps is None:
            raise StepOrderError(f"conv_state.step: layer {layer_id} asked before begin")
        if layer_id not in self._steps:
            known = ", ".join(map(str, sorted(self._steps))) or "none"
            raise ValueError(f"conv_state.step: layer {layer_id} has no state, attached: {known}")
        return self._steps[layer_id]
