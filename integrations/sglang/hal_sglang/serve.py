"""What runs in place of SGLang's kernels: a bound layer of `hal` inside SGLang's step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from hal.errors import HalError
from hal.runtime.batch import NO_SLOT
from hal.runtime.foreign import engine_step

if TYPE_CHECKING:
    from torch import Tensor

    from hal.integrations.engines.session import Session
    from hal.runtime.layers import DeltaLayer, ShortConvLayer
    from hal.runtime.step import Step

RESERVED: int = 0
"""The slot that SGLang's padded rows name; it is never handed out."""


def step_of(batch: Any, metadata: Any) -> Step:
    """The rows of a batch of SGLang, each with the slot of its state.

    Decode rows have one token; every other batch is one of extends, decode rows among them as
    extends by one token. Rows of slot 0 or a negative one are none.
    """
    slots = metadata.mamba_cache_indices
    slots = slots.masked_fill(slots <= RESERVED, NO_SLOT)
    if batch.logical_forward_mode.is_decode():
        rows = slots.shape[0]
        starts, seen = metadata.query_start_loc, batch.seq_lens - 1
        return engine_step(slots, seen, starts, tokens=rows, max_len=min(rows, 1))
    lens = [int(count) for count in batch.extend_seq_lens_cpu]
    if not all(lens):
        raise HalError(f"SGLang gave rows of {lens} tokens; hal serves rows that have some")
    return engine_step(
        slots,
        batch.extend_prefix_lens,
        metadata.query_start_loc,
        tokens=sum(lens),
        max_len=max(lens, default=0),
    )


def check_mode(batch: Any) -> None:
    """Refuse a batch of drafts, which was refused at the start already."""
    mode = batch.forward_mode
    if mode.is_target_verify() or mode.is_draft_extend_v2():
        raise HalError(f"SGLang runs a step of {mode.name}; hal serves decodes and extends there")


def run_delta(session: Session, step: Step, layer: Any, mixed: Tensor, a: Tensor, b: Tensor) -> Any:
    """The result `[1, T, HV, V]` of a Gated DeltaNet layer on raw projections.

    Tokens beyond the step's pad the batch: they give zeros.
    """
    bound, n = cast("DeltaLayer", session.run(layer.layer_id, step)), step.tokens
    out = mixed.new_zeros(1, mixed.shape[0], layer.num_v_heads, layer.head_v_dim)
    out[0, :n] = bound(mixed[:n], a[:n], b[:n])
    return out


def forward_short_conv(module: Any, hidden_states: Tensor, forward_batch: Any) -> Tensor:
    """The forward of a short-conv layer: both projections SGLang's, the rest by its provider."""
    from sglang.srt.model_executor.forward_context import get_attn_backend

    from hal_sglang.backend import linear_backend

    if forward_batch.forward_mode.is_idle():
        return hidden_states
    backend = linear_backend(get_attn_backend())
    step = backend.running()
    bound = cast("ShortConvLayer", backend.hal_session.run(module.layer_idx, step))
    n = step.tokens
    B, C, x = module.in_proj(hidden_states)[0][:n].chunk(3, dim=-1)
    gated = hidden_states.new_zeros(hidden_states.shape[0], C.shape[-1])
    gated[:n] = bound(B, C, x)
    out: Tensor = module.out_proj(gated)[0]
    return out
