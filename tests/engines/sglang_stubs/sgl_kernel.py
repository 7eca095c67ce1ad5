"""Stands in for SGLang's kernel package, which has no build for CPUs on the package index."""

import torch
from placeholders import Placeholder, install, placeholder

__path__: list[str] = []

OPERATORS = (
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "chunk_gated_delta_rule_cpu",
    "fused_gdn_gating_cpu",
    "causal_conv1d_fwd_cpu",
    "causal_conv1d_update_cpu",
    "causal_conv1d_weight_pack",
    "fused_qkvzba_split_reshape_cat_cpu",
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_moe_router_cpu",
)
"""Operators that SGLang's modules take by name when they are imported on a CPU."""

LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")
for _operator in OPERATORS:
    LIBRARY.define(f"{_operator}(Tensor x) -> Tensor")
install("sgl_kernel")


def __getattr__(name: str) -> type[Placeholder]:
    return placeholder("sgl_kernel", name)
