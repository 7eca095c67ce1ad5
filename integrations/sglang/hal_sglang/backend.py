"""The linear backend that SGLang gets: its own metadata, and `hal`'s bound layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.layers.attention.hybrid_linear_attn_backend import (
    HybridLinearAttnBackend,
    MambaAttnBackendBase,
)

from hal.errors import HalError
from hal_sglang import members
from hal_sglang.serve import check_mode, run_delta, step_of

if TYPE_CHECKING:
    from torch import Tensor

    from hal.integrations.engines.session import Session
    from hal.runtime.step import Step


class HalLinearBackend(MambaAttnBackendBase):  # type: ignore[misc] # SGLang is not there when types are checked
    """Serves every linear layer of one model; slots and their copies stay SGLang's."""

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any, session: Session) -> None:
        super().__init__(runner)
        self.hal_session = session
        self.hal_step: Step | None = None
        self.conv_states_shape = runner.req_to_token_pool.mamba_pool.mamba_cache.conv[0].shape
        for member in members.of(session):
            member.pool = runner.req_to_token_pool
        session.forget()

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Make the step of this batch, once for all layers."""
        check_mode(forward_batch)
        super().init_forward_metadata(forward_batch)
        self.hal_step = None
        if not forward_batch.forward_mode.is_idle():
            self.hal_step = step_of(forward_batch, self.forward_metadata)

    def running(self) -> Step:
        """The step of the batch that runs."""
        if self.hal_step is None:
            raise HalError("a linear layer runs before SGLang made the step's metadata")
        return self.hal_step

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Graphs were refused at the start."""
        raise HalError("SGLang captures or replays a graph; hal's linear layers run eagerly there")

    def init_forward_metadata_capture_cpu_graph(self, *given: object, **named: object) -> None:
        """Graphs were refused at the start."""
        raise HalError("SGLang captures a graph; hal's linear layers run eagerly there")

    def forward_decode(
        self,
        layer: Any,
        forward_batch: Any,
        mixed_qkv: Tensor,
        a: Tensor,
        b: Tensor,
        q: Tensor | None = None,
        k: Tensor | None = None,
        v: Tensor | None = None,
        save_kv_cache: bool = True,
        linear_attn_output: Tensor | None = None,
    ) -> Any:
        """A Gated DeltaNet layer's `[1, T, HV, V]` for a batch of decodes."""
        return run_delta(self.hal_session, self.running(), layer, mixed_qkv, a, b)

    def forward_extend(
        self,
        layer: Any,
        forward_batch: Any,
        mixed_qkv: Tensor,
        a: Tensor,
        b: Tensor,
        q: Tensor | None = None,
        k: Tensor | None = None,
        v: Tensor | None = None,
        save_kv_cache: bool = True,
        linear_attn_output: Tensor | None = None,
    ) -> Any:
        """The same for a batch of extends: the step knows its mode."""
        return self.forward_decode(layer, forward_batch, mixed_qkv, a, b)


def hybrid(runner: Any, full: Any, layers: list[int], session: Session) -> Any:
    """SGLang's composition of full attention and the linear backend."""
    return HybridLinearAttnBackend(full, HalLinearBackend(runner, session), layers)


def linear_backend(backend: Any) -> HalLinearBackend:
    """The linear side of the running backend; anything but `hal`'s is an error."""
    linear = vars(backend).get("linear_attn_backend")
    if not isinstance(linear, HalLinearBackend):
        raise HalError(
            f"a linear layer runs on {type(backend).__name__}: hal's backend is not there"
        )
    return linear
