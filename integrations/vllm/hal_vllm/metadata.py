"""The metadata of a step for every linear layer kind, made from vLLM's pages without a sync."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.attention.backend import AttentionBackend, AttentionMetadata, AttentionMetadataBuilder
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID, mamba_get_block_table_tensor

from hal.runtime.batch import NO_SLOT
from hal.runtime.foreign import engine_step

if TYPE_CHECKING:
    from torch import Tensor

    from hal.runtime.step import Step


@dataclass(frozen=True, slots=True)
class HalMetadata(AttentionMetadata):  # type: ignore[misc] # vLLM is not there when types are checked
    """The step of one group of layers, whose states share their block ids."""

    step: Step


def step_of(common: Any, blocks: Tensor) -> Step:
    """The rows that have tokens, each with the block `[B]` of its state as its slot.

    Rows that pad a batch trail and have no tokens; they are cut off by the host's row bounds,
    whatever their ids say. The null block is none.
    """
    bounds = common.query_start_loc_cpu[: common.num_reqs + 1]
    rows = int((bounds[1:] > bounds[:-1]).sum())
    if rows and int(bounds[rows]) != int(bounds[-1]):
        raise ValueError(f"a row without tokens stands before others: row bounds {bounds.tolist()}")
    slots = blocks[:rows]
    return engine_step(
        slots.masked_fill(slots == NULL_BLOCK_ID, NO_SLOT),
        common.compute_num_computed_tokens()[:rows],
        common.query_start_loc[: rows + 1],
        tokens=int(bounds[rows]),
        max_len=int(common.max_query_len),
    )


class HalMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Makes the step of one group of layers. Full graphs are left out: its layers run eagerly."""

    reorder_batch_threshold = 1

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> HalMetadata:
        """The step of this batch; the state's block is the newest one where prefixes are cached."""
        common = common_attn_metadata
        blocks = mamba_get_block_table_tensor(
            common.block_table_tensor,
            common.seq_lens,
            self.kv_cache_spec,
            self.vllm_config.cache_config.mamba_cache_mode,
        )
        return HalMetadata(step_of(common, blocks[:, 0]))


class HalBackend(AttentionBackend):  # type: ignore[misc]
    """What vLLM asks a linear layer for: the name and the metadata builder."""

    @staticmethod
    def get_name() -> str:
        """The name in vLLM's logs."""
        return "HAL"

    @staticmethod
    def get_builder_cls() -> type[HalMetadataBuilder]:
        """The one builder of all linear layers."""
        return HalMetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        """Linear layers keep states, not keys and values."""
        return True
