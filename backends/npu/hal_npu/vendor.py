"""The vendor's functions that the provider calls, each bound by its own signature."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Self

from hal.errors import ProviderError
from hal_npu.symbols import Found, find_all

Call = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Unbound:
    """Stands where a function was not found; selection refuses the operations that call it."""

    found: Found

    def __call__(self, **given: object) -> NoReturn:
        """Say what is missing."""
        raise ProviderError(str(self.found.reason()))


@dataclass(frozen=True, slots=True)
class Vendor:
    """Every function is called by keywords alone, since positions drift between releases."""

    conv_prefill: Call
    conv_steps: Call
    chunk: Call
    update: Call
    steps: Call
    move: Call

    @classmethod
    def of(cls, found: Mapping[str, Found]) -> Self:
        """The functions among symbols that were looked for."""
        return cls(
            conv_prefill=_bound(found["causal_conv1d_fn_npu"]),
            conv_steps=_bound(found["causal_conv1d_linear_verify_npu"]),
            chunk=_bound(found["chunk_gated_delta_rule_npu"]),
            update=_bound(found["fused_sigmoid_gating_delta_rule_update_npu"]),
            steps=_bound(found["kda_target_verify_npu"]),
            move=_bound(found["speculative_state_scatter_npu"]),
        )

    @classmethod
    def installed(cls) -> Self:
        """The functions of the packages installed here."""
        return cls.of(find_all())


def _bound(found: Found) -> Call:
    return found.call or Unbound(found)
