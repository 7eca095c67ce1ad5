"""The fake vendor refuses what the vendor's schemas, dtypes, shapes and strides refuse.

A fake that takes anything would prove nothing about the adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from npu import fakes
from npu.children import on_machine

Case = tuple[dict[str, Any], type[BaseException], str]

IDS = torch.tensor([0, 1])


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def strided(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape[:-1], 2 * shape[-1])[..., ::2]


PREFILL = {
    "x": zeros(3, 5),
    "weight": zeros(3, 4),
    "query_start_loc": torch.tensor([0, 2, 5]),
    "cache_indices": IDS,
    "has_initial_state": torch.ones(2, dtype=torch.bool),
    "conv_states": zeros(2, 3, 3),
}
STEPS = {
    "x": zeros(2, 3, 4),
    "conv_state": zeros(2, 3, 3),
    "weight": zeros(3, 4),
    "bias": None,
    "conv_state_indices": IDS,
    "intermediate_conv_window": zeros(2, 4, 3, 3),
    "intermediate_state_indices": IDS,
}
MOVE = {
    "dst": zeros(1, 3, 2, 2),
    "src": zeros(1, 2, 1, 2, 2),
    "dst_indices": IDS,
    "src_indices": IDS,
    "step_indices": torch.zeros_like(IDS),
}
HALF = torch.bfloat16
CHUNK = {
    "q": zeros(1, 5, 1, 8, dtype=HALF),
    "k": zeros(1, 5, 1, 8, dtype=HALF),
    "v": zeros(1, 5, 2, 6, dtype=HALF),
    "g": zeros(1, 5, 2),
    "beta": zeros(1, 5, 2),
    "initial_state": zeros(2, 2, 8, 6),
    "cu_seqlens": torch.tensor([0, 2, 5]),
}
DRAFTS = {
    "A_log": zeros(2),
    "dt_bias": zeros(2, 8),
    "q": zeros(1, 4, 2, 8),
    "k": zeros(1, 4, 2, 8),
    "v": zeros(1, 4, 2, 6),
    "a": zeros(1, 4, 2, 8),
    "b": zeros(1, 4, 2),
    "initial_state_source": zeros(3, 2, 6, 8),
    "initial_state_indices": IDS,
    "intermediate_states_buffer": zeros(2, 2, 2, 6, 8),
    "intermediate_state_indices": IDS,
    "cache_steps": 2,
}
UPDATE = {
    "A_log": zeros(2),
    "a": zeros(2, 2),
    "dt_bias": zeros(2),
    "softplus_beta": 1.0,
    "softplus_threshold": 20.0,
    "q": zeros(1, 2, 2, 8),
    "k": zeros(1, 2, 2, 8),
    "v": zeros(1, 2, 2, 6),
    "b": zeros(2, 2),
    "initial_state_source": zeros(3, 2, 8, 6),
    "initial_state_indices": IDS,
    "cu_seqlens": torch.arange(3),
}
GOOD: Mapping[str, Mapping[str, Any]] = {
    "causal_conv1d_fn_npu": PREFILL,
    "causal_conv1d_linear_verify_npu": STEPS,
    "speculative_state_scatter_npu": MOVE,
    "chunk_gated_delta_rule_npu": CHUNK,
    "kda_target_verify_npu": DRAFTS,
    "fused_sigmoid_gating_delta_rule_update_npu": UPDATE,
}

BAD: Mapping[str, list[Case]] = {
    "causal_conv1d_fn_npu": [
        ({"activation": "gelu"}, NotImplementedError, "activation"),
        ({"has_initial_state": None}, TypeError, "NoneType"),
        ({"query_start_loc": None}, TypeError, "NoneType"),
        ({"query_start_loc": torch.tensor([0])}, RuntimeError, "reduction"),
        ({"query_start_loc": torch.tensor([0, 0, 0])}, RuntimeError, "reduction"),
        ({"query_start_loc": torch.tensor([0, 2, 6])}, AssertionError, ""),
        ({"weight": zeros(3, 4, dtype=HALF)}, RuntimeError, "dtype"),
        ({"cache_indices": torch.tensor([0, -1])}, IndexError, ""),
    ],
    "causal_conv1d_linear_verify_npu": [
        ({"x": zeros(2, 3)}, ValueError, "3D"),
        ({"weight": zeros(3, 3)}, ValueError, "plus one"),
        ({"weight": zeros(3, 7), "conv_state": zeros(2, 3, 6)}, ValueError, r"\[2, 6\]"),
        ({"weight": zeros(4, 4)}, ValueError, "channel"),
        ({"intermediate_conv_window": zeros(2, 3, 3, 3)}, ValueError, "scratch"),
        ({"bias": zeros(4)}, ValueError, "bias"),
        ({"activation": "gelu"}, ValueError, "activation"),
        ({"conv_state": zeros(2, 3, 3, dtype=HALF)}, ValueError, "same dtype"),
        ({"intermediate_conv_window": zeros(2, 4, 3, 3, dtype=HALF)}, ValueError, "same dtype"),
        ({"x": strided(2, 3, 4)}, ValueError, "contiguous"),
        ({"conv_state": strided(2, 3, 3)}, ValueError, "contiguous"),
        ({"conv_state_indices": IDS[:1]}, ValueError, r"\[B\]"),
    ],
    "speculative_state_scatter_npu": [
        ({"src": zeros(1, 2, 2, 2)}, ValueError, "ranks"),
        ({"src": zeros(1, 2, 1, 2, 3)}, ValueError, "shapes"),
        ({"src": zeros(1, 2, 1, 2, 2, dtype=HALF)}, ValueError, "dtype"),
        ({"dst_indices": IDS[None]}, ValueError, "one-dimensional"),
        ({"dst_indices": IDS[:1]}, ValueError, "equal lengths"),
        ({"dst": zeros(1, 3, 1, 1, 1, 1), "src": zeros(1, 2, 1, 1, 1, 1, 1)}, ValueError, "rank"),
    ],
    "chunk_gated_delta_rule_npu": [
        ({"q": zeros(1, 5, 1, 8)}, AssertionError, ""),
        ({n: CHUNK[n].float() for n in "qkv"}, AssertionError, "float32"),
        ({"beta": zeros(5, 2)}, AssertionError, "beta"),
        ({"head_first": True}, DeprecationWarning, ""),
        ({"cu_seqlens": None}, UnboundLocalError, ""),
        ({"cu_seqlens": torch.tensor([0, 5])}, ValueError, "initial states"),
        ({n: CHUNK[n].expand(2, *CHUNK[n].shape[1:]) for n in "qkv"}, ValueError, "batch"),
        ({"g": zeros(1, 5, 2, dtype=HALF)}, RuntimeError, "decay"),
        ({"cu_seqlens": torch.tensor([0, 0, 0])}, RuntimeError, "0 elements"),
    ],
    "kda_target_verify_npu": [
        ({"q": zeros(4, 2, 8)}, ValueError, "shape"),
        ({"q": zeros(2, 4, 2, 8)}, ValueError, "must be one"),
        ({"cache_steps": 3}, ValueError, "divisible by positive"),
        ({"v": zeros(1, 6, 2, 6)}, ValueError, "token dimensions"),
        ({"b": zeros(4, 2)}, ValueError, "singleton"),
        ({"k": zeros(1, 4, 2, 6)}, ValueError, "key dimensions"),
        ({"k": zeros(1, 4, 3, 8)}, ValueError, "divisible by q and k"),
        ({"a": zeros(1, 4, 1, 8)}, ValueError, "a must have"),
        ({"b": zeros(1, 4, 3)}, ValueError, "b must have"),
        ({"gates_are_preactivated": False, "A_log": zeros(3)}, ValueError, "A_log"),
        ({"gates_are_preactivated": True, "lower_bound": -5.0}, ValueError, "lower_bound"),
        ({"initial_state_source": zeros(3, 2, 8, 6)}, ValueError, "initial state"),
        ({"intermediate_states_buffer": zeros(2, 1, 2, 6, 8)}, ValueError, "intermediate state"),
        ({"initial_state_source": zeros(3, 2, 6, 8, dtype=HALF)}, ValueError, "dtypes"),
        ({"initial_state_indices": IDS[:1]}, ValueError, "at least B"),
        ({"initial_state_indices": IDS.short()}, ValueError, "int32 or int64"),
        (
            {n: zeros(1, 4, 2, 300) for n in "qka"},
            ValueError,
            "greater than 256",
        ),
    ],
    "fused_sigmoid_gating_delta_rule_update_npu": [
        ({"initial_state_indices": torch.tensor([1 << 30, 0]).int()}, IndexError, "address"),
    ],
}
PAIRS = [(name, number) for name, cases in BAD.items() for number in range(len(cases))]


def called(name: str) -> Callable[..., Any]:
    return fakes.function(fakes.called()[name])


def copied(given: Mapping[str, Any]) -> dict[str, Any]:
    return {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in given.items()}


@pytest.mark.parametrize("name", GOOD)
def test_what_is_right_is_taken(name: str) -> None:
    called(name)(**copied(GOOD[name]))


@pytest.mark.parametrize("name", GOOD)
def test_an_unknown_keyword_is_refused(name: str) -> None:
    if name == "causal_conv1d_fn_npu":  # it swallows any keyword, and so does the vendor's
        called(name)(**copied(GOOD[name]), colour=1)
        return
    with pytest.raises(TypeError, match="unexpected keyword"):
        called(name)(**copied(GOOD[name]), colour=1)


@pytest.mark.parametrize(("name", "number"), PAIRS)
def test_what_is_wrong_is_refused(name: str, number: int) -> None:
    changes, error, text = BAD[name][number]
    with pytest.raises(error, match=text or None):
        called(name)(**{**GOOD[name], **changes})


OPERATORS = """
import torch, torch_npu
ops, half = torch.ops.npu, torch.bfloat16
good = dict(x=torch.zeros(5, 8, dtype=half), weight=torch.zeros(4, 8, dtype=half),
            conv_states=torch.zeros(2, 3, 8, dtype=half), query_start_loc=torch.tensor([0, 5]))
packed = dict(mix_qkv=torch.zeros(1, 2, 32, dtype=half), recurrent_state=torch.zeros(1),
              beta=torch.zeros(1), scale=1.0, actual_seq_lengths=torch.zeros(1),
              ssm_state_indices=torch.zeros(1), nk=1, nv=1)
bad = [
    (ops.causal_conv1d, good, dict(colour=1)),
    (ops.causal_conv1d, good, dict(activation_mode="silu")),
    (ops.causal_conv1d, good, dict(x=torch.zeros(5, 8))),
    (ops.causal_conv1d, good, dict(conv_states=torch.zeros(2, 3, 8))),
    (ops.causal_conv1d, good, dict(weight=torch.zeros(5, 8, dtype=half))),
    (ops.causal_conv1d, good, dict(weight=torch.zeros(4, 7, dtype=half))),
    (ops.causal_conv1d, good, dict(conv_states=torch.zeros(2, 8, 3, dtype=half).mT)),
    (ops.causal_conv1d, good, dict(query_start_loc=None)),
    (ops.recurrent_gated_delta_rule, packed, dict(mix_qkv=torch.zeros(1, 2, 32))),
    (ops.recurrent_gated_delta_rule, packed, dict(mix_qkv=torch.zeros(1, 9, 32, dtype=half))),
    (ops.recurrent_gated_delta_rule, packed, dict(nk=None)),
    (ops.causal_conv1d_update, dict(x=torch.zeros(2, 8), weight=torch.zeros(4, 8),
     conv_state=torch.zeros(2, 3, 8), conv_state_indices=torch.zeros(2)), {}),
]
ops.causal_conv1d(**good)
ops.recurrent_gated_delta_rule(**packed)
print(len(bad))
for op, given, changes in bad:
    try:
        op(**{**given, **changes})
    except RuntimeError as error:
        print("refused")
try:
    torch.empty(1, device="npu")
except NotImplementedError:
    print("no memory")
print(torch.device("npu:0"), torch.npu.is_available(), torch.accelerator.current_accelerator())
"""


def test_operators_refuse_by_schema_dtype_and_strides(tmp_path: Path) -> None:
    count, *lines = on_machine(OPERATORS, None).splitlines()
    assert lines == ["refused"] * int(count) + ["no memory", "npu:0 True npu"]


def test_the_schemas_are_those_that_the_adapter_knows(tmp_path: Path) -> None:
    code = """
import torch_npu
from hal_npu.symbols import find_all
for each in find_all().values():
    print(each.symbol.name, each.status)
"""
    told = dict(line.split(" ", 1) for line in on_machine(code, None).splitlines())
    absent = {name for name, status in told.items() if status == "absent"}
    assert absent == {"chunk_gated_delta_rule", "chunk_kda_fwd"}
    assert set(told.values()) == {"bound", "known, not bound", "absent"}
