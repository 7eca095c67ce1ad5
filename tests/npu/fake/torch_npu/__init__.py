"""A torch-npu without a device: the backend's name, its module, and the operators' schemas.

Importing this changes the process for good, so it belongs to a process of its own. Nothing can be
allocated on the device; the operators take CPU tensors and refuse what their contracts refuse.
"""

import os
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def _set(name: str, default: int) -> int:
    return int(os.environ.get(f"FAKE_NPU_{name}", default))


class _Npu(ModuleType):
    """The functions that callers ask a device module for."""

    def is_available(self) -> bool:
        return _set("DEVICES", 1) > 0

    def device_count(self) -> int:
        return _set("DEVICES", 1)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, index: int = 0) -> str:
        return "Ascend910B-fake"

    def get_soc_version(self) -> int:
        return _set("SOC", 220)

    def is_initialized(self) -> bool:
        return False

    def _is_in_bad_fork(self) -> bool:
        return False


npu = _Npu("torch_npu.npu")
torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", npu)

SCHEMAS = (
    "causal_conv1d(Tensor x, Tensor weight, Tensor conv_states, Tensor? bias=None, "
    "Tensor? query_start_loc=None, Tensor? cache_indices=None, Tensor? has_initial_state=None, "
    "Tensor? num_accepted_tokens=None, int activation_mode=0, int pad_slot_id=-1, "
    "int run_mode=0) -> Tensor",
    "causal_conv1d_update(Tensor x, Tensor weight, Tensor(a!) conv_state, "
    "Tensor conv_state_indices, Tensor? bias=None, Tensor? num_accepted_tokens=None, "
    "Tensor? query_start_loc=None, bool activation_mode=False, int pad_slot_id=-1) -> Tensor",
    "recurrent_gated_delta_rule(Tensor mix_qkv, Tensor(a!) recurrent_state, Tensor beta, "
    "float scale, Tensor actual_seq_lengths, Tensor ssm_state_indices, int nk, int nv, "
    "Tensor(b!)? intermediate_state=None, Tensor? cache_indices=None, "
    "Tensor? num_accepted_tokens=None, Tensor? g=None, Tensor? gk=None) -> Tensor",
)
"""Of sgl-kernel-npu 2026.08.21."""


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    conv_states: Tensor,
    bias: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    activation_mode: int = 0,
    pad_slot_id: int = -1,
    run_mode: int = 0,
) -> Tensor:
    """Channel last, one dtype of 16 bits, dense; the arithmetic is left out."""
    _refuse(x.dtype not in (torch.bfloat16, torch.float16), f"x is {x.dtype}")
    _refuse(not x.dtype == weight.dtype == conv_states.dtype, "dtypes differ")
    _refuse(not 2 <= weight.shape[0] <= 4, f"width {weight.shape[0]}")
    _refuse(weight.shape[1] != x.shape[-1], "weight is [W, dim]")
    _refuse(not all(t.is_contiguous() for t in (x, weight, conv_states)), "not contiguous")
    _refuse(x.ndim == 2 and query_start_loc is None, "2-D x needs query_start_loc")
    return torch.zeros_like(x)


def causal_conv1d_update(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """3-D input; the arithmetic is left out."""
    _refuse(x.ndim != 3, f"x has {x.ndim} dimensions")
    return torch.zeros_like(x)


def recurrent_gated_delta_rule(
    mix_qkv: Tensor, recurrent_state: Tensor, beta: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """bfloat16 inputs and at most 8 tokens a row; the state's dtype is not looked at."""
    _refuse(mix_qkv.dtype != torch.bfloat16, f"mix_qkv is {mix_qkv.dtype}")
    _refuse(mix_qkv.shape[1] > 8, f"{mix_qkv.shape[1]} tokens a row")
    return torch.zeros(1)


def _refuse(wrong: bool, text: str) -> None:
    if wrong:
        raise RuntimeError(text)


if os.environ.get("FAKE_NPU_ON_CPU", "1") == "1":  # there is no memory on this device
    import hal_npu.smoke

    hal_npu.smoke.place = lambda index: torch.device("cpu")

LIBRARY: Any = torch.library.Library("npu", "FRAGMENT")
for _schema in SCHEMAS:
    _name = _schema.partition("(")[0]
    LIBRARY.define(_schema)
    LIBRARY.impl(_name, globals()[_name], "CPU")
