"""The vendor's functions and operators: what they are called, and the signatures known here.

A symbol is bound by its own signature, never by the version of the package that brings it. One that
takes other parameters than those known here is not called.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from hal_registry import Code, Failure, Reason, attempt

OPERATORS: Final = "torch.ops.npu"
"""Where the AscendC operators are; sgl-kernel-npu and torch-npu register into one namespace."""


class Status(StrEnum):
    """What a look for a symbol gave."""

    BOUND = "bound"
    UNUSED = "known, not bound"
    ABSENT = "absent"
    UNKNOWN = "of unknown signature"
    WRONG = "not what the oracle has"


@dataclass(frozen=True, slots=True)
class Symbol:
    """A vendor's function or operator, its known signature, and the operations that call it."""

    module: str
    name: str
    signature: str
    operations: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """The full name, as an import or an operator call would spell it."""
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True)
class Found:
    """A symbol with what is there: its status, the signature seen, and the callable if bound."""

    symbol: Symbol
    status: Status
    seen: str = ""
    call: Callable[..., Any] | None = None

    def line(self) -> str:
        """The symbol and its status for people, with both signatures where they differ."""
        text = f"{self.symbol.path}: {self.status}"
        if self.status is Status.UNKNOWN:
            return f"{text}; expected {self.symbol.signature}, found {self.seen}"
        told = self.seen and self.status in (Status.ABSENT, Status.WRONG)
        return f"{text} ({self.seen})" if told else text

    def reason(self) -> Reason:
        """Why an operation that needs this symbol cannot be served."""
        fix = f"install a build of sgl-kernel-npu that has {self.symbol.path} as it is known here"
        path, wanted = self.symbol.path, self.symbol.signature
        if self.status is Status.UNKNOWN:
            return Reason(Code.PROTOCOL_VIOLATION, path, wanted, self.seen, fix=fix)
        if self.status is Status.WRONG:
            detail = "the state may be kept in another layout"
            return Reason(
                Code.PROTOCOL_VIOLATION, path, "the oracle's result", self.seen, detail, fix
            )
        return Reason(Code.OPERATION_MISSING, path, "the function", "absent", self.seen, fix)


def find(symbol: Symbol) -> Found:
    """Look for one symbol; importing its module is attempted, nothing is called."""
    owner = attempt(lambda: _owner(symbol.module))
    if isinstance(owner, Failure):
        return Found(symbol, Status.ABSENT, owner.text[:200])
    member = attempt(lambda: getattr(owner, symbol.name))
    if isinstance(member, Failure):
        return Found(symbol, Status.ABSENT)
    seen = attempt(lambda: _signature(symbol, member))
    if isinstance(seen, Failure) or seen != symbol.signature:
        text = seen.text if isinstance(seen, Failure) else seen
        return Found(symbol, Status.UNKNOWN, text)
    if not symbol.operations:
        return Found(symbol, Status.UNUSED, seen)
    return Found(symbol, Status.BOUND, seen, member)


def _owner(module: str) -> object:
    """The module, or the namespace of operators, which is no module that can be imported."""
    if module != OPERATORS:
        return importlib.import_module(module)
    import torch

    return torch.ops.npu


def _signature(symbol: Symbol, member: Any) -> str:
    """Parameter names and defaults of a function without annotations; an operator's schema."""
    if symbol.module == OPERATORS:
        return str(member.default._schema).removeprefix("npu::")
    found = inspect.signature(member)
    bare = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    return str(found.replace(parameters=bare, return_annotation=found.empty))


def find_all() -> Mapping[str, Found]:
    """Every symbol of the table by its name."""
    return {symbol.name: find(symbol) for symbol in SYMBOLS}


def lacking(found: Mapping[str, Found], operation: str) -> Iterator[Reason]:
    """The reasons against an operation: symbols that it calls and that are not bound."""
    for each in found.values():
        if operation in each.symbol.operations and each.status is not Status.BOUND:
            yield each.reason()


_CONV: Final = "sgl_kernel_npu.mamba.causal_conv1d"
_FLA: Final = "sgl_kernel_npu.fla"

SYMBOLS: Final = (
    Symbol(
        _CONV,
        "causal_conv1d_fn_npu",
        "(x, weight, bias=None, query_start_loc=None, cache_indices=None, has_initial_state=None, "
        "conv_states=None, activation='silu', pad_slot_id=-1, **kwargs)",
        ("conv.prefill",),
    ),
    Symbol(
        "sgl_kernel_npu.mamba.causal_conv1d_verify",
        "causal_conv1d_linear_verify_npu",
        "(x, conv_state, weight, bias, conv_state_indices, intermediate_conv_window, "
        "intermediate_state_indices, activation='silu', update_persistent_state=False)",
        ("conv.decode", "conv.verify"),
    ),
    Symbol(
        "sgl_kernel_npu.mamba.speculative_state_scatter",
        "speculative_state_scatter_npu",
        "(dst, src, dst_indices, src_indices, step_indices)",
        ("conv.decode", "conv.commit", "delta_rule.decode", "delta_rule.commit"),
    ),
    Symbol(
        f"{_FLA}.chunk",
        "chunk_gated_delta_rule_npu",
        "(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=True, "
        "cu_seqlens=None, head_first=False, use_qk_l2norm_in_kernel=False)",
        ("delta_rule.prefill",),
    ),
    Symbol(
        f"{_FLA}.fused_sigmoid_gating_recurrent",
        "fused_sigmoid_gating_delta_rule_update_npu",
        "(A_log, a, dt_bias, softplus_beta, softplus_threshold, q, k, v, b, initial_state_source, "
        "initial_state_indices, scale=None, use_qk_l2norm_in_kernel=False, cu_seqlens=None, "
        "is_kda=False)",
        ("delta_rule.decode",),
    ),
    Symbol(
        f"{_FLA}.kda_target_verify",
        "kda_target_verify_npu",
        "(*, A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, "
        "intermediate_states_buffer, intermediate_state_indices, cache_steps, scale=None, "
        "gates_are_preactivated=None, lower_bound=None)",
        ("delta_rule.decode", "delta_rule.verify"),
    ),
    Symbol(
        _CONV,
        "causal_conv1d_update_npu",
        "(x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, "
        "conv_state_indices=None, num_accepted_tokens=None, intermediate_conv_window=None, "
        "pad_slot_id=-1, metadata=None, validate_data=False)",
    ),
    Symbol(
        _CONV,
        "causal_conv1d_update_v2",
        "(x, conv_state, weight, bias=None, activation=None, conv_state_indices=None, "
        "num_accepted_tokens=None, query_start_loc=None, max_query_len=-1, pad_slot_id=-1, "
        "block_idx_last_scheduled_token=None, initial_state_idx=None, validate_data=False)",
    ),
    Symbol(
        OPERATORS,
        "causal_conv1d",
        "causal_conv1d(Tensor x, Tensor weight, Tensor conv_states, Tensor? bias=None, "
        "Tensor? query_start_loc=None, Tensor? cache_indices=None, "
        "Tensor? has_initial_state=None, Tensor? num_accepted_tokens=None, "
        "int activation_mode=0, int pad_slot_id=-1, int run_mode=0) -> Tensor",
    ),
    Symbol(
        OPERATORS,
        "causal_conv1d_update",
        "causal_conv1d_update(Tensor x, Tensor weight, Tensor(a!) conv_state, "
        "Tensor conv_state_indices, Tensor? bias=None, Tensor? num_accepted_tokens=None, "
        "Tensor? query_start_loc=None, bool activation_mode=False, int pad_slot_id=-1) -> Tensor",
    ),
    Symbol(
        OPERATORS,
        "recurrent_gated_delta_rule",
        "recurrent_gated_delta_rule(Tensor mix_qkv, Tensor(a!) recurrent_state, Tensor beta, "
        "float scale, Tensor actual_seq_lengths, Tensor ssm_state_indices, int nk, int nv, "
        "Tensor(b!)? intermediate_state=None, Tensor? cache_indices=None, "
        "Tensor? num_accepted_tokens=None, Tensor? g=None, Tensor? gk=None) -> Tensor",
    ),
    Symbol(OPERATORS, "chunk_gated_delta_rule", "no released schema is known"),
    Symbol(OPERATORS, "chunk_kda_fwd", "no released schema is known"),
)
"""Called ones first; the others are looked for so that a report of the machine is complete."""
